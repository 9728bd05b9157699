"""Checkpoints: data only, of one run, with the one before to fall back on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import compress
from compress.storage.checkpoint import CheckpointStore
from helpers.digits import dense
from helpers.interruption import SHORT_RECIPE, Interrupted, InterruptedLoader, small_loaders
from helpers.weights import same_weights

pytestmark = pytest.mark.usefixtures("checkpoint_at_every_step")


def test_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    train, val = small_loaders()
    for name, recipe in (("a", SHORT_RECIPE), ("b", {**SHORT_RECIPE, "seed": 7})):
        with pytest.raises(Interrupted):
            compress.prune(
                dense(), recipe, train=InterruptedLoader(train, 9), val=val, workdir=tmp_path / name, quiet=True
            )
    CheckpointStore(tmp_path / "a").path.write_bytes(CheckpointStore(tmp_path / "b").path.read_bytes())
    with pytest.raises(ValueError, match=r"checkpoint\.safetensors: belongs to another run than run\.json beside it"):
        compress.prune(dense(), SHORT_RECIPE, train=train, val=val, workdir=tmp_path / "a", resume=True, quiet=True)


def test_damaged_checkpoint_falls_back_to_the_one_before_and_two_are_refused(
    undisturbed: compress.Pruned,
    tmp_path: Path,
) -> None:
    train, val = small_loaders()
    for name in ("one", "both"):
        with pytest.raises(Interrupted):
            compress.prune(
                dense(), SHORT_RECIPE, train=InterruptedLoader(train, 5), val=val, workdir=tmp_path / name, quiet=True
            )
    paths = (
        CheckpointStore(tmp_path / "one").path,
        CheckpointStore(tmp_path / "both").path,
        CheckpointStore(tmp_path / "both").previous,
    )
    for path in paths:
        path.write_bytes(path.read_bytes()[:1000])
    again = compress.prune(
        dense(), SHORT_RECIPE, train=train, val=val, workdir=tmp_path / "one", resume=True, quiet=True
    )
    assert same_weights(again.model, undisturbed.model)
    tmp_path /= "both"
    with pytest.raises(ValueError, match=r"not a checkpoint .*; start again in another workdir"):
        compress.prune(dense(), SHORT_RECIPE, train=train, val=val, workdir=tmp_path, resume=True, quiet=True)


def test_checkpoint_is_data(tmp_path: Path) -> None:
    train, val = small_loaders()
    with pytest.raises(Interrupted):
        compress.prune(dense(), SHORT_RECIPE, train=InterruptedLoader(train, 9), val=val, workdir=tmp_path, quiet=True)
    found = CheckpointStore(tmp_path).load()
    assert found is not None
    tensors, facts = found
    assert facts["stage"] == "finetune"
    assert json.loads((tmp_path / "run.json").read_text())["recipe"]["budget"] == {"macs": 0.5}
    assert any(name.startswith("optimizer0/") for name in tensors)
    assert any(name.startswith("average/") for name in tensors)


def test_modules_with_state_of_their_own_and_buffers_that_share_memory_go_through(tmp_path: Path) -> None:
    class Peculiar(torch.nn.Sequential):
        def __init__(self) -> None:
            super().__init__(dense())
            self.register_buffer("table", torch.arange(6.0))
            self.register_buffer("head", self.table[:2])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[0](x) + 0 * self.head.sum()

        def get_extra_state(self) -> Any:
            return {"name": "peculiar"}

        def set_extra_state(self, state: Any) -> None:
            pass

    train, val = small_loaders()
    pruned = compress.prune(Peculiar(), SHORT_RECIPE, train=train, val=val, workdir=tmp_path, quiet=True)
    again = compress.load(Peculiar(), tmp_path).eval()
    x = torch.randn(2, 1, 8, 8)
    assert torch.equal(again(x), pruned.model.eval()(x))
