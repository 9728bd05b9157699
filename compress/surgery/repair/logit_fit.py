"""Best queries and keys of a smaller width, from second moments: truncated SVD of the logits.

Queries q' = A^T q and keys k' = B^T k of width r give the logits q^T A B^T k. The error over all pairs of tokens,

    sum (q^T (A B^T - I) k)^2 = ||Q (A B^T - I) K||^2,    Q = (sum q q^T)^1/2,  K = (sum (k - m) (k - m)^T)^1/2

is least if Q A B^T K is the best matrix of rank r next to Q K = U S V^T (Eckart and Young, 1936):

    A = Q^-1 U_r S_r^1/2,    B = K^-1 V_r S_r^1/2

m is the mean of the keys of one image: it adds the same number to all logits of a query, which softmax ignores.
Alternating least squares of queries and keys ends at the same A B^T. A ridge is added to both moments; it is chosen on
held-out images.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .layer_samples import HELD_OUT
from .regression import RIDGES, WEAKEST_RIDGE

NO_SIGNAL = 1e-13  # eigenvalues below are rounding, relative to the largest


@dataclass
class LogitMoments:
    """Second moments of queries and of centered keys by head, each of shape (heads, width, width)."""

    queries: Tensor
    keys: Tensor

    @classmethod
    def zeros(cls, heads: int, width: int, device: torch.device) -> LogitMoments:
        """Return the moments of no tokens."""
        return cls(*(torch.zeros(heads, width, width, dtype=torch.float64, device=device) for _ in range(2)))

    def add_(self, q: Tensor, k: Tensor) -> None:
        """Add queries and keys of images, of shape (images, heads, tokens, width)."""
        for total, x in ((self.queries, q), (self.keys, k)):
            x = x if x.dtype == torch.float64 else x.float()
            x = (x - x.mean(2, keepdim=True) if total is self.keys else x).transpose(0, 1).flatten(1, 2)
            total += x.mT @ x

    def __add__(self, other: LogitMoments) -> LogitMoments:
        return LogitMoments(self.queries + other.queries, self.keys + other.keys)

    @property
    def is_finite(self) -> bool:
        """Return whether all moments are finite."""
        return bool(torch.isfinite(self.queries).all() and torch.isfinite(self.keys).all())

    def error(self, a: Tensor, b: Tensor) -> float:
        """Return the squared error of the logits of A and B, relative to the logits."""
        difference = a @ b.mT - torch.eye(a.shape[1], dtype=a.dtype, device=a.device)
        error = ((self.queries @ difference @ self.keys) * difference).sum()
        total = (self.queries * self.keys).sum()
        return float((error / total.clamp_min(torch.finfo(torch.float64).tiny)).clamp_min(0))


def split_images(q: Tensor, k: Tensor, batch: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Split queries and keys of a batch into images that are fitted and, one in four, held out."""
    held_out = (torch.arange(len(q)) + batch * len(q)) % HELD_OUT == HELD_OUT - 1
    fitted, held = ((~held_out).nonzero()[:, 0].to(q.device), held_out.nonzero()[:, 0].to(q.device))
    return (q[fitted], k[fitted]), (q[held], k[held])


@dataclass(frozen=True)
class LogitFit:
    """Maps of queries and keys, of shape (heads, width, r), and their error on held-out images."""

    a: Tensor
    b: Tensor
    error: float
    ridge: float | None  # None: the kept dimensions as they are


def fit_logits(fit: LogitMoments, held_out: LogitMoments, kept: Tensor, *, exact: bool) -> tuple[LogitFit, LogitFit]:
    """Return the fit that only keeps dimensions, and the best one; they are the same if nothing lowers the error.

    Args:
        fit: moments of the images that are fitted; the result uses both.
        held_out: moments of the others, on which the ridge is chosen.
        kept: kept dimensions of each head, of shape (heads, r).
        exact: also try the weakest ridge; for samples in double precision.
    """
    width = fit.queries.shape[-1]
    selection = torch.eye(width, dtype=torch.float64, device=kept.device)[kept].mT
    unchanged = LogitFit(selection, selection, held_out.error(selection, selection), None)
    best = unchanged
    for ridge in (*RIDGES, *[WEAKEST_RIDGE] * exact):
        a, b = best_of_rank(fit, kept.shape[1], ridge)
        error = held_out.error(a, b)
        if error < best.error:
            best = LogitFit(a, b, error, ridge)
    if best.ridge is not None:
        best = LogitFit(*best_of_rank(fit + held_out, kept.shape[1], best.ridge), best.error, best.ridge)
    return unchanged, best


def best_of_rank(moments: LogitMoments, rank: int, ridge: float) -> tuple[Tensor, Tensor]:
    """Return A and B with the least error."""
    (q, q_inverse), (k, k_inverse) = (_roots(x, ridge) for x in (moments.queries, moments.keys))
    u, s, vh = torch.linalg.svd(q @ k)
    root = s[:, None, :rank].sqrt()
    return q_inverse @ u[..., :rank] * root, k_inverse @ vh.mT[..., :rank] * root


def _roots(moment: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Return the square root of a moment with a ridge, and its pseudo-inverse."""
    values, vectors = torch.linalg.eigh(moment)
    has_signal = values > NO_SIGNAL * values[:, -1:].clamp_min(0)
    roots = torch.where(has_signal, (values.clamp_min(0) + ridge * values.mean(-1, keepdim=True)).sqrt(), 0)
    inverse = torch.where(has_signal, 1 / roots, 0)
    return (vectors * roots[:, None]) @ vectors.mT, (vectors * inverse[:, None]) @ vectors.mT
