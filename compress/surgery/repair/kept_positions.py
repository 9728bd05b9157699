"""Kept positions of a weight along a dimension, and the plan's factors there."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..plan import Plan


def kept_index(plan: Plan, name: str, dim: int, dense: Tensor) -> Tensor:
    """Return the kept positions along a dimension of a tensor; all, if the plan does not cut it."""
    kept = plan.slices.get(name, {}).get(dim)
    return torch.as_tensor(np.arange(dense.shape[dim]) if kept is None else kept, device=dense.device)


def kept_scales(plan: Plan, name: str, dim: int, dense: Tensor) -> Tensor:
    """Return the plan's factors on the kept positions along a dimension of a tensor."""
    factors = torch.ones(dense.shape[dim], dtype=dense.dtype, device=dense.device)
    for scale in plan.scales:
        if (scale.tensor, scale.dim) == (name, dim):
            factors[torch.as_tensor(scale.positions, device=dense.device)] *= scale.factor
    return factors[kept_index(plan, name, dim, dense)]
