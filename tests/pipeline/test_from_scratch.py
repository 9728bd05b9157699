"""Training from scratch: other sizes, cutout, drop-path, auxiliary head, reload and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import compress
from compress.cells import darts_network, nats_network
from compress.training.cutout import cutout
from helpers.choice_networks import conv_choices, images
from helpers.interruption import Interrupted
from helpers.weights import same_weights

RECIPE: dict[str, Any] = {
    "target": {"operations": True},
    "search": {"method": "random"},
    "finetune": {"from": "scratch", "epochs": "4 steps", "lr": 0.025},
    "timing": {"repeats": 3},
}
FULL = {**RECIPE["finetune"], "cells": 2, "channels": 6, "cutout": 4, "drop_path": 0.2, "auxiliary": 0.4}


def loader() -> DataLoader[Any]:
    x, y = (torch.cat(part) for part in zip(*images(count=32), strict=True))
    return DataLoader(TensorDataset(x, y), 8, shuffle=True)


def test_a_network_of_cells_is_trained_at_another_size_and_reloaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    pruned = compress.prune(
        darts_network(4, 3, 4), {**RECIPE, "finetune": FULL}, train=loader(), val=loader(), workdir=tmp_path, quiet=True
    )
    assert pruned.genotype is not None
    expected = darts_network(6, 2, 4, pruned.genotype)
    assert {n: t.shape for n, t in pruned.model.state_dict().items()} == {
        n: t.shape for n, t in expected.state_dict().items()
    }
    assert pruned.report.pruned.params == sum(p.numel() for p in expected.parameters())
    assert any("auxiliary" in entry for entry in pruned.report.history)
    assert any(note.startswith("trained from scratch at 6 channels, 2 cells") for note in pruned.report.notes)
    again = compress.load(darts_network(4, 3, 4), tmp_path)
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(again.eval()(x), pruned.model(x))
    assert compress.Plan.load(tmp_path / "plan.json").network["channels"] == 6
    with pytest.raises(compress.PlanError, match="chooses operations of another model"):
        compress.load(conv_choices(), tmp_path)


def test_nats_cells_are_trained_at_another_size(tmp_path: Path) -> None:
    finetune = {**RECIPE["finetune"], "cells": 2, "channels": 4, "drop_path": 0.1}
    pruned = compress.prune(nats_network(2, 1, 4), {**RECIPE, "finetune": finetune}, train=loader(), quiet=True)
    assert pruned.genotype is not None
    expected = nats_network(4, 2, 4, pruned.genotype)
    assert [t.shape for t in pruned.model.parameters()] == [t.shape for t in expected.parameters()]


def test_any_network_starts_with_new_weights() -> None:
    model = conv_choices()
    with torch.no_grad():
        model.head.weight.fill_(7.0)
    pruned = compress.prune(model, RECIPE, train=loader(), quiet=True)
    assert float(pruned.model.get_parameter("head.weight").detach().abs().max()) < 2
    kept = {**RECIPE, "finetune": {**RECIPE["finetune"], "from": "search"}}
    pruned = compress.prune(model, kept, train=loader(), quiet=True)
    assert float(pruned.model.get_parameter("head.weight").detach().abs().min()) > 5


@pytest.mark.usefixtures("checkpoint_at_every_step")
def test_a_resumed_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    class InterruptedImages(TensorDataset):
        left = 10**9

        def __getitem__(self, index: int) -> Any:
            if self.left == 0:
                raise Interrupted
            self.left -= 1
            return super().__getitem__(index)

    dataset = InterruptedImages(*(torch.cat(part) for part in zip(*images(count=32), strict=True)))
    data = DataLoader(dataset, 8, shuffle=True)
    recipe = {**RECIPE, "finetune": FULL}

    def network() -> nn.Module:
        torch.manual_seed(3)
        return darts_network(2, 2, 4)

    whole = compress.prune(network(), recipe, train=data, quiet=True)
    dataset.left = 8 + 20
    with pytest.raises(Interrupted):
        compress.prune(network(), recipe, train=data, workdir=tmp_path, quiet=True)
    dataset.left = 10**9
    again = compress.prune(network(), recipe, train=data, workdir=tmp_path, resume=True, quiet=True)
    assert same_weights(again.model, whole.model)


def test_cutout_sets_one_square_of_every_image_to_zero() -> None:
    torch.manual_seed(0)
    x, y = torch.ones(200, 3, 9, 9), torch.arange(200)
    cut, same = cutout((x, y), 4)
    assert same is y and bool(x.all())
    holes = cut == 0
    assert torch.equal(holes.all(1), holes.any(1))  # the same place in all channels
    rows, columns = holes[:, 0].any(2).sum(1), holes[:, 0].any(1).sum(1)
    assert torch.equal(holes[:, 0].sum((1, 2)), rows * columns)
    assert int(rows.max()) == int(columns.max()) == 4
    assert int(rows.min()) >= 2  # cut off at the border
    assert cutout({"ids": y}, 4)["ids"] is y


def test_drop_path_keeps_the_mean_and_drops_whole_samples() -> None:
    from compress.cells.auxiliary import drop_path

    torch.manual_seed(0)
    out = drop_path(torch.ones(4000, 2, 3, 3), 0.2)
    per_sample = out.flatten(1)
    assert bool((per_sample == per_sample[:, :1]).all())
    assert set(per_sample[:, 0].unique().tolist()) == {0.0, 1.25}
    assert float(out.mean()) == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize(
    ("model", "finetune", "message"),
    [
        (conv_choices, {"drop_path": 0.2}, "finetune.drop_path: needs a network of cells.*the model is a ConvChoices"),
        (conv_choices, {"auxiliary": 0.4}, "finetune.auxiliary: needs a network of cells"),
        (conv_choices, {"cells": 4}, "finetune.cells: needs a network of cells"),
        (lambda: nats_network(2, 1, 4), {"auxiliary": 0.4}, "finetune.auxiliary: a NatsNetwork has no place for"),
    ],
)
def test_settings_that_the_model_does_not_support_are_refused(model: Any, finetune: Any, message: str) -> None:
    with pytest.raises(compress.NotReady, match=message):
        recipe = {**RECIPE, "finetune": {**RECIPE["finetune"], **finetune}}
        compress.prune(model(), recipe, train=loader(), quiet=True)


def test_weights_that_cannot_be_drawn_anew_are_named() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * x

    block = compress.Choice(a=Scaled(), b=nn.Identity())
    model = nn.Sequential(block, nn.Flatten(), nn.Linear(192, 4))
    with pytest.raises(
        compress.NotReady, match=r"finetune.from: scratch needs a method reset_parameters.*0.candidates.a"
    ):
        compress.prune(model, RECIPE, train=loader(), quiet=True)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({**RECIPE, "finetune": {"epochs": 1, "cells": 3}}, "cells: the searched network has its own size"),
        (
            {**RECIPE, "target": {"operations": True, "channels": True}, "budget": {"macs": 0.5}, "finetune": FULL},
            "finetune: widths are cut from the searched network",
        ),
    ],
)
def test_sizes_that_contradict_the_recipe_are_refused(recipe: dict[str, Any], message: str) -> None:
    with pytest.raises(compress.RecipeError, match=message):
        compress.Recipe.load(recipe)
