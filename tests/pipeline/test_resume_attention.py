"""Runs that cut queries, keys and values of one attention to widths of their own end the same if they are resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import compress
from cases.families import family
from compress.recipe import Target
from helpers.interruption import Interrupted, InterruptedLoader
from helpers.weights import same_weights

pytestmark = pytest.mark.usefixtures("checkpoint_at_every_step")

RECIPE: dict[str, Any] = {
    "target": {"channels": False, "attention": ["qk", "v"], "mlp": True},
    "search": {"method": "netslim", "epochs": "4 steps"},
    "budget": {"macs": "60%"},
    "finetune": {"epochs": "4 steps"},
}


def _model_and_loader(name: str) -> tuple[torch.nn.Module, DataLoader[Any]]:
    torch.manual_seed(0)
    model, x = family(name)
    classes = model(x).shape[1]
    data = TensorDataset(torch.randn(24, *x.shape[1:], dtype=x.dtype), torch.randint(classes, (24,)))
    return model, DataLoader(data, 8, shuffle=True)


@pytest.mark.parametrize("name", ["transformers vit", "transformers swin", "timm vit"])
@pytest.mark.parametrize("after", [3, 7])  # in the search, and behind the cut
def test_resumed_run_equals_an_uninterrupted_one(name: str, after: int, tmp_path: Path) -> None:
    model, train = _model_and_loader(name)
    whole = compress.prune(model, RECIPE, train=train, workdir=tmp_path / "whole", quiet=True)
    parts = {slot: len(kept) for slot, kept in whole.plan.keep.items()}
    groups = {
        group.name: group for group in compress.find_groups(model, next(iter(train))[0], Target(**RECIPE["target"]))
    }
    assert any(
        groups[name].attention_part in ("qk", "v") and width < groups[name].width for name, width in parts.items()
    )

    model, train = _model_and_loader(name)
    with pytest.raises(Interrupted):
        loader: Any = InterruptedLoader(train, after)
        compress.prune(model, RECIPE, train=loader, workdir=tmp_path / "resumed", quiet=True)
    model, train = _model_and_loader(name)
    resumed = compress.prune(model, RECIPE, train=train, workdir=tmp_path / "resumed", resume=True, quiet=True)
    assert resumed.plan.keep == whole.plan.keep
    assert same_weights(resumed.model, whole.model)
