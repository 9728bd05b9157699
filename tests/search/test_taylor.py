"""Taylor importance: the change of the loss to first order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import compress
from compress.search.base import Job, search_class
from compress.training import Classification
from helpers.bilevel import batch_pair, small_convolutions
from helpers.interruption import Interrupted, InterruptedLoader, save_at_every_step, small_loaders
from helpers.regression import RegressionTask
from helpers.weights import same_weights


def test_taylor_is_the_squared_change_of_the_loss_to_first_order() -> None:
    model = small_convolutions()
    groups = compress.find_groups(model, batch_pair()[0][0])
    cls = search_class("taylor")
    search: Any = cls(cls.Config.model_validate({"method": "taylor"}), Job(model, groups, RegressionTask(), 2))
    before = [p.detach().clone() for p in model.parameters()]
    for batch in batch_pair():
        search.step(batch)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    for name, values in search.importance().items():
        gate, eps = search.gates[name], 1e-6
        for i in range(0, len(values), 2):
            total = 0.0
            for batch in batch_pair():
                sides = []
                for sign in (1, -1):
                    with torch.no_grad():
                        gate[i] += sign * eps
                        sides.append(float(RegressionTask().loss(model(batch[0]), batch)))
                        gate[i] -= sign * eps
                total += ((sides[0] - sides[1]) / (2 * eps)) ** 2
            assert float(values[i]) == pytest.approx(total, rel=1e-4, abs=1e-10)


RECIPE: dict[str, Any] = {
    "budget": {"macs": "50%"},
    "search": {"method": "taylor", "epochs": "4 steps"},
    "steps": 2,
    "timing": {"repeats": 3},
}


def with_norms_and_dropout() -> nn.Module:
    """An untrained network, in train mode as every new module, whose running statistics are those of no batch."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(12, 12, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 10))


def test_result_does_not_depend_on_the_mode_of_the_model() -> None:
    batches = list(small_loaders()[0])
    in_training = compress.prune(with_norms_and_dropout(), RECIPE, train=batches, quiet=True)
    in_eval = compress.prune(with_norms_and_dropout().eval(), RECIPE, train=batches, quiet=True)
    assert in_training.plan.keep == in_eval.plan.keep
    assert same_weights(in_training.model, in_eval.model)
    norm: Any = in_training.model[1]  # type: ignore[index]
    assert not norm.running_mean.any() and torch.equal(norm.running_var, torch.ones(norm.num_features))
    assert int(norm.num_batches_tracked) == 0


def test_step_is_in_eval_mode_and_restores_the_modes() -> None:
    model = with_norms_and_dropout()
    model[4].eval()  # type: ignore[index]
    modes = {name: module.training for name, module in model.named_modules()}
    batch = next(iter(small_loaders()[0]))
    groups = compress.find_groups(model, batch[0])
    search = search_class("taylor")(search_class("taylor").Config(), Job(model, groups, Classification(), 1))
    search.step(batch)
    assert {name: module.training for name, module in model.named_modules() if name in modes} == modes
    assert int(model[1].num_batches_tracked) == 0  # type: ignore[index, arg-type]


def test_interrupted_second_round_resumes_to_the_same_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_at_every_step(monkeypatch)
    whole = compress.prune(with_norms_and_dropout(), RECIPE, train=small_loaders()[0], quiet=True)
    for after in (3, 4):  # one batch is read before the start, two are read in each round
        stopped = InterruptedLoader(small_loaders()[0], after)
        folder = tmp_path / str(after)
        with pytest.raises(Interrupted):
            compress.prune(with_norms_and_dropout(), RECIPE, train=stopped, workdir=folder, quiet=True)
        train = small_loaders()[0]
        again = compress.prune(with_norms_and_dropout(), RECIPE, train=train, workdir=folder, resume=True, quiet=True)
        assert again.plan.keep == whole.plan.keep
        assert same_weights(again.model, whole.model)
