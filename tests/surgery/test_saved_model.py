"""Saved models hold the extra state of modules, without pickle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import compress
from compress.errors import PlanError
from helpers.digits import dense
from helpers.stateful_network import Counting, Stateful

MAGNITUDE = {"budget": {"macs": "50%"}, "timing": {"repeats": 3}}


def cut(model: nn.Module) -> compress.Pruned:
    return compress.prune(model, MAGNITUDE, example_inputs=torch.randn(2, 1, 8, 8), quiet=True)


def test_loaded_model_has_the_extra_state_of_the_saved_one(tmp_path: Path) -> None:
    pruned, x = cut(Stateful()), torch.randn(4, 1, 8, 8)
    pruned.model.train()(x)
    counting = pruned.model[1]  # type: ignore[index]
    counting.trend.zero_()  # not persistent: not saved
    pruned.save(tmp_path / "out")
    again: Any = compress.load(Stateful(), tmp_path / "out").eval()
    assert again[1].steps == counting.steps > 0
    assert torch.equal(again[1].seen["mean"], counting.seen["mean"])
    assert torch.equal(again(x), pruned.model.eval()(x))
    with pytest.raises(PlanError, match=r"1\._extra_state: not in the model"):
        compress.load(nn.Sequential(dense(), nn.Identity()), tmp_path / "out")
    cut(nn.Sequential(dense(), nn.Identity())).save(tmp_path / "plain")
    with pytest.raises(PlanError, match=r"1\._extra_state: missing from the file"):
        compress.load(Stateful(), tmp_path / "plain")


def test_extra_state_that_is_a_tensor_is_loaded(tmp_path: Path) -> None:
    class Scaling(Counting):
        def get_extra_state(self) -> Any:
            return self.seen["mean"] + 0  # a new tensor in each call

        def set_extra_state(self, state: Any) -> None:
            self.seen = {"mean": state}

    pruned = cut(nn.Sequential(dense(), Scaling()))
    pruned.model[1].seen = {"mean": torch.tensor(2.5)}  # type: ignore[index]
    pruned.save(tmp_path / "out")
    again: Any = compress.load(nn.Sequential(dense(), Scaling()), tmp_path / "out")
    assert float(again[1].seen["mean"]) == 2.5


def test_extra_state_that_needs_pickle_is_named_before_a_run_and_when_it_is_saved(tmp_path: Path) -> None:
    class Peculiar(Counting):
        def get_extra_state(self) -> Any:
            return {"names": {"a", "b"}}

    said = r"model\.1 \(Peculiar\): get_extra_state: expected numbers, text, tensors, and lists, tuples and dicts"
    with pytest.raises(compress.NotReady, match=said):
        given: dict[str, Any] = {"example_inputs": torch.randn(2, 1, 8, 8), "quiet": True}
        compress.prune(nn.Sequential(dense(), Peculiar()), MAGNITUDE, workdir=tmp_path / "run", **given)
    pruned = cut(nn.Sequential(dense(), Peculiar()))
    with pytest.raises(ValueError, match=said):
        pruned.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()
