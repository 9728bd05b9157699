"""Selection by reconstruction error: keep the dimensions of a group from which the others can best be predicted.

    R(S) = min_B tr(M C_e),  C_e: covariance of x - B x_S;  M = sum over outputs and taps of w w^T of the reader

Dimensions are dropped one after the other, each time the one whose loss raises R least. With P the inverse covariance
of the kept ones and B the regression of all dimensions on them, dropping dimension i raises R by (B^T M B)_ii / P_ii.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from compress.graph import Group, Groups

RIDGE = 1e-4  # of the mean variance


def select_by_reconstruction(
    model: nn.Module, groups: Groups, keep: Mapping[str, Any], batches: Sequence[Tensor]
) -> dict[str, Any]:
    """Return other dimensions of the same number for every group whose reader is a linear layer or convolution."""
    modules, readers = dict(model.named_modules()), {group.name: reader_of(model, group) for group in groups}
    moments = {name: Moments(group.width) for group in groups if (name := readers[group.name]) is not None}
    hooks = [modules[name].register_forward_pre_hook(moment.hook) for name, moment in moments.items()]
    with torch.inference_mode():
        for x in batches:
            model(x)
    for hook in hooks:
        hook.remove()
    chosen = dict(keep)
    for group in groups:
        if (name := readers[group.name]) is not None:
            weight: Tensor = modules[name].weight.detach().double()  # type: ignore[assignment, union-attr]
            metric = torch.einsum("oct,odt->cd", *(weight.flatten(2) if weight.ndim > 2 else weight[..., None],) * 2)
            chosen[group.name] = dropping_one_by_one(moments[name].covariance(), metric, len(keep[group.name]))
    return chosen


def reader_of(model: nn.Module, group: Group) -> str | None:
    """Return the last linear layer or convolution that reads exactly the dimensions of a group, in their order."""
    modules = dict(model.named_modules())
    for slot in reversed(group.slots):
        name, _, leaf = slot.tensor.rpartition(".")
        layer = modules.get(name)
        is_reader = isinstance(layer, (nn.Linear, nn.Conv2d)) and leaf == "weight" and slot.dim == 1
        if is_reader and np.array_equal(slot.index.ravel(), np.arange(layer.weight.shape[1])):  # type: ignore[union-attr]
            return name
    return None


class Moments:
    """Mean and covariance of the channels of a layer's input."""

    def __init__(self, width: int) -> None:
        self.count, self.total = 0, torch.zeros(width, dtype=torch.float64)
        self.products = torch.zeros(width, width, dtype=torch.float64)

    def hook(self, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Add the input of a forward pass."""
        x = args[0] if isinstance(layer, nn.Linear) else args[0].movedim(1, -1)
        rows = x.reshape(-1, x.shape[-1])
        self.count += len(rows)
        self.total += rows.sum(0, dtype=torch.float64)
        self.products += rows.T @ rows

    def covariance(self) -> Tensor:
        """Return the covariance of what was added, with a small ridge."""
        mean = self.total / self.count
        covariance = self.products / self.count - mean[:, None] * mean
        return covariance + RIDGE * covariance.diagonal().mean() * torch.eye(len(mean), dtype=torch.float64)


def dropping_one_by_one(covariance: Tensor, metric: Tensor, count: int) -> Any:
    """Return the dimensions that are left, in order, if the least needed one is dropped until `count` are left.

    >>> x = torch.tensor([[1.0, 0, 1, 3], [0, 1, 1, 0], [2, 1, 3, 1], [1, 4, 5, 1]]).double()  # the third: sum of two
    >>> dropping_one_by_one(torch.cov(x.T) + 1e-9 * torch.eye(4), torch.eye(4).double(), 3).tolist()
    [1, 2, 3]
    """
    precision, regression = torch.linalg.inv(covariance), torch.eye(len(covariance), dtype=torch.float64)
    kept = torch.arange(len(covariance))
    for _ in range(len(covariance) - count):
        rise = torch.einsum("ck,cd,dk->k", regression, metric, regression) / precision.diagonal()
        i = int(rise.argmin())
        others = torch.arange(len(kept)) != i
        row = precision[i, others] / precision[i, i]
        regression = regression[:, others] - regression[:, i, None] * row
        precision = precision[others][:, others] - precision[others, i, None] * row
        kept = kept[others]
    return kept.numpy()
