"""Network slimming: the penalty acts on the scores alone, and useless channels rank last."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compress
from cases import CASES, build, example, groups_of
from compress.search.base import Job, data_free_importance
from compress.search.netslim import Netslim, NetslimConfig
from compress.surgery.gates import fold_, scores_of
from helpers.regression import RegressionTask, with_useless_features


def network(norm: bool) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8) if norm else nn.Identity(), nn.ReLU()]
    layers += [nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6) if norm else nn.Identity(), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(5, 3, 9, 9, generator=generator), torch.randn(5, 4, generator=generator)
    return x.double(), y.double()


def started(norm: bool, steps: int = 10, **settings: Any) -> tuple[nn.Module, Netslim]:
    model = network(norm)
    groups = compress.find_groups(model, batch()[0])
    config = NetslimConfig.model_validate({"epochs": f"{steps} steps", "gamma": 1e-4, **settings})
    search = Netslim(config, Job(model, groups, RegressionTask(), steps))
    return model.train(), search


@pytest.mark.parametrize("norm", [True, False])
def test_score_is_the_norms_scale_where_there_is_one_and_a_gate_elsewhere(norm: bool) -> None:
    model, search = started(norm)
    if norm:
        assert [id(s) for s in search.alpha] == [id(model[1].weight), id(model[4].weight)]
        assert not scores_of(model)
    else:
        assert set(scores_of(model)) == {"0", "3"}
    model, search = started(norm, score="gate")
    assert set(scores_of(model)) == {"0", "3"}


def test_frozen_norm_gets_a_gate() -> None:
    model = network(norm=True)
    model[1].weight.requires_grad_(False)
    search = Netslim(
        NetslimConfig.model_validate({"epochs": "5 steps", "gamma": 1e-4}),
        Job(model, compress.find_groups(model, batch()[0]), RegressionTask(), 5),
    )
    assert set(scores_of(model)) == {"0"}
    assert [a is model[4].weight for a, _ in search.score_positions["3"]] == [True]


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_subgradient_goes_to_the_scores_and_to_nothing_else(norm: bool, optimizer: str) -> None:
    """One step of plain SGD, against the formula; then the same with and without the penalty."""
    common: dict[str, Any] = {"lr": 0.05, "momentum": 0, "weight_decay": 0.1, "schedule": "constant"}
    model, search = started(norm, gamma=0.3, optimizer=optimizer, **common)
    with torch.no_grad():
        for s in search.alpha:
            s.copy_(torch.randn(s.shape, generator=torch.Generator().manual_seed(2)))
    free = copy.deepcopy(model)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    loss = RegressionTask().loss(RegressionTask().forward(free, batch()), batch())
    gradients = dict(zip(before, torch.autograd.grad(loss, list(free.parameters())), strict=True))
    search.step(batch())
    scored = {id(s) for s in search.alpha}
    for name, p in model.named_parameters():
        penalty = 0.3 * before[name].sign() if id(p) in scored else torch.zeros_like(p)
        assert torch.allclose(p.grad, gradients[name] + penalty, rtol=0, atol=1e-12), name  # type: ignore[arg-type]
        if optimizer == "sgd":
            decay = 0.1 * before[name] if p.ndim > 1 else torch.zeros_like(p)
            expected = before[name] - 0.05 * (gradients[name] + penalty + decay)
            assert torch.allclose(p, expected, rtol=0, atol=1e-12), name


@pytest.mark.parametrize("norm", [True, False])
def test_proximal_step_is_soft_thresholding_after_the_gradient_step(norm: bool) -> None:
    common: dict[str, Any] = {
        "lr": 0.05,
        "momentum": 0,
        "weight_decay": 0,
        "schedule": "constant",
        "proximal": True,
    }
    model, search = started(norm, gamma=2.0, **common)
    with torch.no_grad():
        for s in search.alpha:
            s.copy_(0.2 * torch.randn(s.shape, generator=torch.Generator().manual_seed(2)))
    free = copy.deepcopy(model)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    loss = RegressionTask().loss(RegressionTask().forward(free, batch()), batch())
    gradients = dict(zip(before, torch.autograd.grad(loss, list(free.parameters())), strict=True))
    search.step(batch())
    scored, zeros = {id(s) for s in search.alpha}, 0
    for name, p in model.named_parameters():
        moved = before[name] - 0.05 * gradients[name]
        if id(p) in scored:
            moved = F.softshrink(moved, 0.05 * 2.0)
            zeros += int((p == 0).sum())
        assert torch.allclose(p, moved, rtol=0, atol=1e-12), name
    assert zeros > 0


def test_penalty_reported_is_gamma_times_l1() -> None:
    _, search = started(norm=True, gamma=0.25, lr=1e-9)
    terms = search.step(batch())
    total = sum(float(s.detach().abs().sum()) for s in search.alpha)
    assert float(terms["penalty"]) == pytest.approx(0.25 * total)
    assert float(terms["loss"]) == pytest.approx(float(terms["task"]) + float(terms["penalty"]))


def test_norm_is_scored_only_on_a_group() -> None:
    """A norm over a concatenation whose one part may not be cut: l1 leaves that part alone."""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 5, 1)
            self.norm, self.read = nn.BatchNorm2d(9), nn.Conv2d(9, 2, 1)

        def forward(self, x: Tensor) -> Any:
            b = self.b(x)
            return self.read(self.norm(torch.cat([self.a(x), b], 1))).mean((2, 3)), b

    torch.manual_seed(0)
    model = Joined().double()
    groups = compress.find_groups(model, batch()[0])
    search = Netslim(
        NetslimConfig.model_validate({"epochs": "5 steps", "gamma": 1e-4}), Job(model, groups, RegressionTask(), 5)
    )
    assert [g.name for g in groups] == ["a"]
    assert search.regularizer.costs[0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("name", ["chain", "residual_stream_with_projection", "dense_connections"])
def test_search_of_a_table_network_folds_to_what_it_computed(name: str) -> None:
    """Scores trained, folded, sliced: the network still computes what the gated one did with the dropped at zero."""
    case = CASES[name]
    model, x = build(case), example(case)
    groups = groups_of(name)
    config = NetslimConfig.model_validate({"epochs": "3 steps", "score": "gate", "gamma": 1e-4, "lr": 1e-3})
    search = Netslim(config, Job(model, groups, RegressionTask(), 3))
    target = torch.zeros_like(model(x))
    model.train()
    for _ in range(3):
        search.step((x, target))
    model.eval()
    found = search.importance()
    keep = {g.name: torch.topk(found[g.name], max(1, g.width // 2)).indices.sort().values.numpy() for g in groups}
    with torch.no_grad():
        for group, gate in scores_of(model).items():
            mask = torch.zeros_like(gate)
            mask[torch.as_tensor(keep[group])] = 1
            gate.mul_(mask)
        expected = model(x)
        fold_(model)
        assert torch.equal(model(x), expected)
        compress.Plan.build(model, groups, keep).apply_(model)
        assert float((model(x) - expected).abs().max() / expected.abs().max()) < 1e-10


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("proximal", [False, True])
def test_planted_useless_channels_are_ranked_last(norm: bool, proximal: bool, seed: int) -> None:
    model, data, useless = with_useless_features(norm, seed)
    groups = compress.find_groups(model, data[0][0])
    task = compress.Classification(data)
    config = NetslimConfig.model_validate({"epochs": 6, "gamma": 0.01, "lr": 0.05, "proximal": proximal})
    search = Netslim(config, Job(model, groups, task, 6 * len(data)))
    model.train()
    for _ in range(6):
        for one in data:
            search.step(one)
    ranked = search.importance()["0"].argsort().tolist()
    assert set(ranked[:3]) == useless


def test_importance_of_a_trained_search_is_not_to_be_had_without_training() -> None:
    model = network(True)
    groups = compress.find_groups(model, batch()[0])
    with pytest.raises(TypeError, match=r"search netslim reads data: use compress.prune"):
        data_free_importance(NetslimConfig.model_validate({"epochs": 1}), model, groups)
