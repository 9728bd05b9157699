"""Random plans in which every group has a width of its own, and what must hold for each of them."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import compress
from cases import distance, run, same_bits, zero_scores_
from compress import Plan
from compress.graph import Groups
from compress.surgery import attach_, fold_, save_model


def unequal_keep(groups: Groups, seed: int) -> dict[str, np.ndarray]:
    """Return a random number of random dimensions for each group, independently of all others."""
    random = np.random.default_rng(seed)
    return {
        g.name: g.indices_per_head(int(random.integers(1, g.width // g.num_heads + 1)), random) for g in groups.offered
    }


def check_random_plans(model: nn.Module, x: Tensor, groups: Groups, count: int, tmp_path: Path) -> None:
    """Check that zeroed and sliced networks are one function for `count` plans, and scored and reloaded ones for one.

    Both sides are in double precision; the zeroed network runs the library's own code.
    """
    dense = run(model, x)
    for seed in range(count):
        keep = unequal_keep(groups, seed)
        plan = Plan.build(model, groups, keep)
        zeroed = run(plan.zero_(copy.deepcopy(model)), x)
        widths = {name: len(kept) for name, kept in keep.items()}
        assert distance(run(plan.apply_(copy.deepcopy(model)), x), zeroed) < 1e-9, widths
        if seed == 0:
            small = plan.apply_(copy.deepcopy(model))
            save_model(small, plan, tmp_path)
            assert same_bits(run(compress.load(copy.deepcopy(model), tmp_path), x), run(small, x))
            scored = copy.deepcopy(model)
            scores = attach_(scored, groups)
            assert same_bits(run(scored, x), dense)
            zero_scores_(scores, keep)
            assert distance(run(scored, x), zeroed) < 1e-9
            assert distance(run(fold_(scored), x), zeroed) < 1e-9


@torch.no_grad()
def randomize_(model: nn.Module, x: Tensor) -> nn.Module:
    """Fill a network with random numbers that hide nothing, and fit the statistics of batch norms to `x`."""
    for name, p in model.named_parameters():
        if p.ndim > 1:
            p.copy_(torch.randn_like(p) * 1.6 / p[0].numel() ** 0.5)
        else:
            p.copy_(0.5 + torch.rand_like(p) if name.endswith("weight") else 0.5 * torch.randn_like(p))
    for norm in [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]:
        norm.momentum = 1.0
    model.train()
    model(x)
    return model.eval()
