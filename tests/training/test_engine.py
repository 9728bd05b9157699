"""The training loop stops at a loss that is not finite, and names the step and the terms."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import compress
from compress.storage.checkpoint import CheckpointStore
from helpers.digits import RECIPE, loaders
from helpers.refusals import refused


@pytest.mark.parametrize("stage", ["search", "finetune"])
def test_loss_that_stops_being_a_number_names_step_and_terms(stage: str, tmp_path: Path) -> None:
    train, _ = loaders()
    recipe = {**RECIPE, stage: {**RECIPE[stage], "lr": 1e12, "schedule": "constant"}}
    pattern = rf"{stage}, step \d+ of \d+: the loss is not finite \(loss .*task .*\)\. Lower its lr"
    text = refused(pattern, recipe, train=train, error=compress.Diverged, workdir=tmp_path)
    assert "start again (in another workdir" in text


def test_every_term_of_a_bilevel_loss_is_named_and_the_last_good_checkpoint_stays(tmp_path: Path) -> None:
    """The second half of the data turns into NaN after five steps; what was saved before is whole, and can be read."""
    train, _ = loaders()
    images, labels = next(iter(train))
    good = [(images, labels)] * 10
    bad = [*good, (images, labels), (images * math.nan, labels)]

    class Saving(CheckpointStore):
        def save(self, tensors: Any, metadata: Any) -> None:
            assert all(bool(torch.isfinite(t).all()) for t in tensors.values() if t.is_floating_point())
            super().save(tensors, metadata)

    recipe = {**RECIPE, "search": {"method": "rarts", "epochs": "6 steps", "lr": 0.01}}
    pattern = r"search, step 6 of 6: .*loss nan, primary [\d.]+, auxiliary nan, penalty"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compress.pipeline.run.CheckpointStore", Saving)
        patch.setattr("compress.training.engine.Engine.checkpoint_is_due", lambda self: True)
        refused(pattern, recipe, train=bad, error=compress.Diverged, workdir=tmp_path)
    found = CheckpointStore(tmp_path).load()
    assert found is not None
    assert found[1]["done"] >= 1


def test_loader_that_breaks_half_way_leaves_its_own_error() -> None:
    def broken() -> Any:
        yield from list(loaders()[0])[:5]
        raise OSError("the disk is gone")

    refused(
        "the disk is gone",
        {**RECIPE, "search": {"method": "netslim", "epochs": "9 steps"}, "finetune": None},
        train=broken(),
        error=OSError,
    )


@pytest.mark.parametrize("method", ["netslim", "rarts", "darts1", "darts2", "milenas", "bayesnas"])
def test_every_search_says_that_it_diverged(method: str) -> None:
    train, _ = loaders()
    recipe = {**RECIPE, "search": {"method": method, "epochs": "20 steps", "lr": 1e9, "schedule": "constant"}}
    refused(r"search, step \d+ of 20: the loss is not finite", recipe, train=train, error=compress.Diverged)
