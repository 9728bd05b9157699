"""Scores in front of an MLP's activation function: sigma(x W1 A) W2, cut exactly where the function maps 0 to 0."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

import compress
from cases import distance, randomise_, run
from compress import Plan
from compress.graph import Groups
from compress.recipe import Target
from compress.surgery import attach_, fold_
from helpers.regression import RegressionTask

BEFORE = Target(channels=False, mlp="before_activation")
X = torch.randn(2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.norm, self.fc1, self.act, self.fc2 = nn.LayerNorm(6), nn.Linear(6, 16), activation, nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.fc2(self.act(self.fc1(self.norm(x))))
        return out


def make_block(activation: nn.Module) -> Block:
    torch.manual_seed(1)
    return Block(activation).double().eval()


def find(model: nn.Module, x: Tensor = X) -> Groups:
    return compress.find_groups(model, x, BEFORE)


@pytest.mark.parametrize("activation", [nn.GELU(), nn.ReLU(), nn.SiLU(), nn.Tanh()], ids=lambda a: type(a).__name__)
def test_score_multiplies_the_input_of_the_activation_function(activation: nn.Module) -> None:
    model = make_block(activation)
    (group,) = find(model)
    assert (group.name, group.kind, group.width) == ("fc1", "mlp", 16)
    scores = torch.rand(16, dtype=torch.float64) + 0.5
    x = model.norm(X)
    expected = X + model.fc2(activation(model.fc1(x) * scores))
    attach_(model, [group])["fc1"].data.copy_(scores)
    assert distance(run(model, X), [expected.detach()]) < 1e-14
    assert distance(run(fold_(model), X), [expected.detach()]) < 1e-14


@pytest.mark.parametrize("seed", range(3))
def test_cut_computes_what_the_network_computes_with_these_scores_at_zero(seed: int) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=48, num_heads=3).double().eval()
    randomise_(model)
    x, random = torch.randn(2, 3, 32, 32, dtype=torch.float64), np.random.default_rng(seed)
    groups = find(model, x)
    assert len(list(groups)) == 2
    keep = {g.name: np.sort(random.permutation(g.width)[: random.integers(1, g.width)]) for g in groups}
    plan = Plan.build(model, groups, keep)
    hooks = []
    for name, kept in keep.items():  # independent of gates: zeros in front of the activation function
        mask = torch.zeros(192, dtype=torch.float64)
        mask[torch.as_tensor(kept)] = 1
        hooks.append(model.get_submodule(name).register_forward_hook(lambda m, i, out, mask=mask: out * mask))
    expected = run(model, x)
    for hook in hooks:
        hook.remove()
    small = plan.apply_(copy.deepcopy(model))
    assert distance(run(small, x), expected) < 1e-10
    assert small.blocks[0].mlp.fc1.out_features == len(keep["blocks.0.mlp.fc1"])


@pytest.mark.parametrize("activation", [nn.Sigmoid(), nn.Softplus()], ids=lambda a: type(a).__name__)
def test_functions_that_do_not_map_0_to_0_are_refused(activation: nn.Module) -> None:
    groups = find(make_block(activation))
    assert not list(groups)
    (refused,) = [g for g in groups.refused if g.name == "fc1"]
    assert "cannot be scored in front of its activation function" in refused.reason
    assert "mlp: true scores the layer that reads it" in refused.reason
    assert [g.name for g in compress.find_groups(make_block(activation), X, Target(channels=False, mlp=True))] == [
        "fc1"
    ]


def test_search_drops_planted_useless_dimensions() -> None:
    """They have large writers and readers of zero; the budget leaves all others."""
    torch.manual_seed(0)
    model = make_block(nn.GELU()).float()
    with torch.no_grad():
        model.fc2.weight[:, [3, 7]] = 0
        model.fc1.weight[[3, 7]] *= 5
    x = torch.randn(64, 5, 6)
    batches: Any = [(x, model(x).detach() + torch.randn_like(x))]
    recipe = {
        "target": {"channels": False, "mlp": "before_activation", "round_to": 1},
        "budget": {"dims": "88%"},
        "search": {"method": "taylor", "epochs": "1 step", "ranking": "global"},
        "timing": {"repeats": 3},
    }

    task = RegressionTask()
    task.train = task.val = batches
    pruned = compress.prune(model, recipe, task=task, quiet=True)
    assert set(range(16)) - {int(i) for i in pruned.plan.keep["fc1"]} == {3, 7}
