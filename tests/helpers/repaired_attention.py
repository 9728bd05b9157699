"""A small attention whose queries and keys are cut and repaired, in one process or in several."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import nn

import compress
from compress.distributed import rank, world_size
from compress.recipe import Recipe
from compress.surgery import repair_, slice_


def repair_attention(folder: Path) -> list[float]:
    """Repair on a part of the batches in each process; return outputs and errors of the logits."""
    return repair_small_attention(rank(), world_size())


def repair_small_attention(first: int = 0, step: int = 1) -> list[float]:
    """Drop half of the queries and keys of each head and repair; return outputs and errors of the logits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 4)).double().eval()
    x = torch.randn(48, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    target = Recipe.load({"budget": {"macs": 0.5}, "target": {"attention": ["qk"]}}).target
    groups = compress.find_groups(model, x[:1], target)
    keep = {group.name: [0, 2] for group in groups if group.kind == "attention"}
    plan = compress.Plan.build(model, groups, keep)
    cut = slice_(copy.deepcopy(model), plan)
    result = repair_(cut, model, plan, list(x.split(8))[first::step], lambda m, batch: m(batch))
    (attention,) = result.attentions
    assert attention.error_before is not None and attention.error_after is not None
    with torch.no_grad():
        return [*cut(x[:2]).flatten().tolist(), attention.error_before, attention.error_after]
