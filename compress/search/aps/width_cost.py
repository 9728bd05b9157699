"""Cost of widths relative to the budget, and the reward; on the device, without waiting for it.

The reward of widths a (11) is

    R = Acc (B(a) / B)^g,  g = alpha if B(a) < B else beta

with B(a) in the unit of the budget: MACs, parameters, bytes, dimensions, or time. With several limits, B(a) / B is the
largest of their ratios. The time of widths follows from the measured time of one dimension of each group.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from compress.budget import PruningSchedule
from compress.distributed import broadcast_object
from compress.graph import Cost

from ..base import Job


class WidthCost:
    """Cost of widths (..., groups) in a unit of the budget, as tensors in double precision."""

    def __init__(
        self, cost: Cost, unit: str, device: torch.device, dimension_times: Mapping[str, float] | None = None
    ) -> None:
        terms = {"macs": cost.mac_terms, "params": cost.parameter_terms, "size": cost.byte_terms}.get(unit)

        def tensor(values: object, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.as_tensor(np.asarray(values)).to(device, dtype)

        self.dense_widths, self.num_heads = tensor(cost.widths), tensor(cost.num_heads)
        self.constant, self.per_dimension = 0.0, torch.zeros_like(self.dense_widths)
        self.factors = self.axes = None
        if terms is not None:
            self.dense_sizes, self.positions = tensor(cost.dense_sizes), tensor(cost.positions_per_dimension.T)
            self.factors, self.axes = tensor(terms.factors), tensor(terms.axes, torch.long)
            self.constant = float(cost.header_bytes) if unit == "size" else 0.0
        elif unit == "latency":
            assert dimension_times is not None
            self.constant, self.per_dimension = 1.0, tensor([dimension_times[name] for name in cost.names])
        else:  # dims
            self.constant, self.per_dimension = float(cost.widths.sum()), torch.ones_like(self.dense_widths)

    def __call__(self, widths: Tensor) -> Tensor:
        dropped = self.dense_widths - widths
        if self.axes is None or self.factors is None:
            return self.constant - dropped @ self.per_dimension
        sizes = self.dense_sizes - (dropped / self.num_heads) @ self.positions
        return sizes[..., self.axes].prod(-1) @ self.factors + self.constant


class BudgetRatio:
    """B(a) / B of widths (..., groups)."""

    def __init__(self, job: Job, device: torch.device) -> None:
        schedule, cost = job.schedule, job.groups.cost
        limits: Mapping[str, float] = {"macs": float(cost.macs(cost.widths))}
        times = None
        if isinstance(schedule, PruningSchedule):
            limits = schedule.limits
            times = broadcast_object(schedule.dimension_times()) if "latency" in limits else None
        self.limits = {unit: max(float(limit), 1e-12) for unit, limit in limits.items()}
        self.costs = {unit: WidthCost(cost, unit, device, times) for unit in limits}

    def __call__(self, widths: Tensor) -> Tensor:
        ratios = [cost(widths) / self.limits[unit] for unit, cost in self.costs.items()]
        return torch.stack(ratios).amax(0)

    def state(self) -> dict[str, Tensor]:
        """Return the measured times, which a resumed search continues with."""
        return {"dimension_times": self.costs["latency"].per_dimension} if "latency" in self.costs else {}


def reward(accuracy: Tensor, ratio: Tensor, alpha: float, beta: float) -> Tensor:
    """Return R of eq. 11 for `ratio` = B(a) / B."""
    return accuracy * torch.where(ratio < 1, ratio**alpha, ratio**beta)
