"""Ridge regression towards given weights, from sums over samples; the ridge is chosen on held-out samples.

    W = argmin sum_s ||W x_s + b - y_s||^2 + ridge * m * ||W - W_0||^2,    m: mean diagonal of sum_s x_s x_s^T, centered

The bias is not penalized: it takes the mean of the residual. Samples are summed up as they come (X^T X, X^T Y and
means), so memory does not grow with their number; the sums of several processes add up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compress.distributed import all_reduce_sum

# Strong to weak. The weakest, for exact fits, is tried in double precision only.
RIDGES = (1.0, 0.1, 1e-2, 1e-3, 1e-4, 1e-6)
WEAKEST_RIDGE = 1e-14
CONSTANT = 1e-12  # variance of the inputs of a group, next to that of the most variable group: below, it is rounding


@dataclass
class Sums:
    """Sums over samples of a regression in several groups: X has shape (samples, groups, D), Y (samples, groups, O)."""

    count: Tensor  # one number
    x: Tensor  # (groups, D)
    y: Tensor  # (groups, O)
    xx: Tensor  # (groups, D, D)
    xy: Tensor  # (groups, D, O)
    yy: Tensor  # (groups, O)

    @classmethod
    def zeros(cls, groups: int, inputs: int, outputs: int, device: torch.device) -> Sums:
        """Return the sums of no samples."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        return cls(
            zeros(1),
            zeros(groups, inputs),
            zeros(groups, outputs),
            zeros(groups, inputs, inputs),
            zeros(groups, inputs, outputs),
            zeros(groups, outputs),
        )

    def add_(self, x: Tensor, y: Tensor) -> None:
        """Add samples; products are computed in their precision and summed in double precision."""
        x, y = x.transpose(0, 1), y.transpose(0, 1)  # (groups, samples, ...)
        self.count += x.shape[1]
        self.x += x.sum(1, dtype=torch.float64)
        self.y += y.sum(1, dtype=torch.float64)
        self.xx += x.mT @ x
        self.xy += x.mT @ y
        self.yy += y.square().sum(1, dtype=torch.float64)

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def all_reduced(self) -> Sums:
        """Return the sums over all processes."""
        parts = list(vars(self).values())
        flat = all_reduce_sum(torch.cat([part.flatten() for part in parts]), sum(part.numel() for part in parts))
        split = torch.split(flat.to(parts[0].device), [part.numel() for part in parts])
        return Sums(*(new.view(old.shape) for new, old in zip(split, parts, strict=True)))

    def centered(self) -> Sums:
        """Return the sums of the samples minus their means; `x` and `y` become the means."""
        count = self.count.clamp_min(1)
        x, y = self.x / count, self.y / count
        return replace(
            self,
            x=x,
            y=y,
            xx=self.xx - x[:, :, None] * self.x[:, None],
            xy=self.xy - x[:, :, None] * self.y[:, None],
            yy=self.yy - y * self.y,
        )

    @property
    def is_finite(self) -> bool:
        """Return whether all sums are finite."""
        return all(bool(torch.isfinite(part).all()) for part in vars(self).values())


@dataclass(frozen=True)
class Fit:
    """Weights of a regression and their error, relative to the variance of the outputs, on held-out samples."""

    weight: Tensor  # (groups, O, D)
    bias: Tensor  # (groups, O)
    error: float
    ridge: float | None  # None: the given weights and bias


def solve(fit: Sums, held_out: Sums, weight: Tensor, bias: Tensor, *, exact: bool) -> tuple[Fit, Fit]:
    """Return the given weights with their error, and the best solution.

    The ridge is the one whose solution from `fit` has the least error on `held_out`; the solution that is returned uses
    both. If no solution is better than the given weights, they are returned again.

    Args:
        weight: W_0, of shape (groups, O, D).
        bias: b of the given weights, of shape (groups, O).
        exact: also try the weakest ridge; for samples in double precision.
    """
    unchanged = Fit(weight, bias, relative_error(held_out, weight, bias), None)
    training, best = fit.centered(), unchanged
    for ridge in (*RIDGES, *[WEAKEST_RIDGE] * exact):
        solution = _ridge_solution(training, weight, ridge)
        error = relative_error(held_out, *solution)
        if error < best.error:
            best = Fit(*solution, error, ridge)
    if best.ridge is not None:
        best = Fit(*_ridge_solution((fit + held_out).centered(), weight, best.ridge), best.error, best.ridge)
    return unchanged, best


def _ridge_solution(centered: Sums, weight: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Return weights and bias; a group that is singular, such as a constant input, gets only a new bias."""
    diagonal = centered.xx.diagonal(dim1=1, dim2=2)
    scale = diagonal.mean(1)
    eye = torch.eye(diagonal.shape[1], dtype=diagonal.dtype, device=diagonal.device)
    factor, failed = torch.linalg.cholesky_ex(centered.xx + (ridge * scale)[:, None, None] * eye)
    residual = centered.xy - centered.xx @ weight.mT  # of the given weights
    change = torch.cholesky_solve(residual, factor).mT
    is_solved = (failed == 0) & (scale > CONSTANT * scale.max()) & torch.isfinite(change).all(2).all(1)
    solution = torch.where(is_solved[:, None, None], weight + change, weight)
    return solution, centered.y - (solution @ centered.x[..., None])[..., 0]


def relative_error(sums: Sums, weight: Tensor, bias: Tensor) -> float:
    """Return the squared error of weights, relative to the variance of the outputs."""
    centered = sums.centered()
    offset = bias + (weight @ centered.x[..., None])[..., 0] - centered.y  # error of the mean
    squares = ((weight @ centered.xx - 2 * centered.xy.mT) * weight).sum() + centered.yy.sum()
    error, variance = squares + sums.count * offset.square().sum(), centered.yy.sum()
    return float((error / variance.clamp_min(torch.finfo(torch.float64).tiny)).clamp_min(0))
