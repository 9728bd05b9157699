"""Examples 2.4 and 2.7 of the thesis (Xue 2022): a bilevel problem whose trajectories and rates are known.

    L_p(w, a) = a w - 2 a + 1        L_a(w, a) = w^2 - 2 a w + a^2

The bilevel problem has its minimum at w = a = 1. First-order DARTS and MiLeNAS converge to (2, 2), RARTS to
`equilibrium(lambda, beta)`, which approaches (1, 1) as lambda and beta grow. The searches are those of the library,
with a score that is attached by hand. A step of RARTS with the rate eta is linear in z = (w, u, a), with the Hessian
H = D + T + T^t of the Lagrangian (2.11), T strictly lower triangular:

    (I + eta T) z' = (I - eta (D + T^t)) z - eta (g + noise)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from compress import Task
from compress.search.base import Job
from compress.search.score_training.regularizer import ScorePositions
from compress.search.score_training.scored_search import ScoredSearch

Array = np.ndarray[Any, np.dtype[np.float64]]
DEFAULTS = {"lr": 0.05, "momentum": 0, "weight_decay": 0, "schedule": "constant", "gamma": 0}


class Draw(NamedTuple):
    """A batch of the example: the half of the data, and the noise in the gradients of weight and score."""

    half: str  # p or a
    weight_noise: float = 0.0
    score_noise: float = 0.0


class SolvableModel(nn.Module):
    """The weight and the score of the example."""

    def __init__(self, w: float, a: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([w], dtype=torch.float64))
        self.a = nn.Parameter(torch.tensor([a], dtype=torch.float64))

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.w, self.a


class SolvableTask(Task):
    """The two losses of the example."""

    train = val = None

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model()

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        w, a = outputs
        loss = a * w - 2 * a + 1 if batch.half == "p" else w**2 - 2 * a * w + a**2
        return (loss + batch.weight_noise * w + batch.score_noise * a).sum()


def start_search(
    cls: type[ScoredSearch], start: tuple[float, float] = (0.3, 0.2), steps: int = 4000, **settings: Any
) -> Any:
    """Return a search of the library on the example, at the weight and score of `start`."""

    class OnExample(cls):  # type: ignore[misc, valid-type]
        def attach_scores(self) -> ScorePositions:
            return {"a": [(self.job.model.a, torch.zeros(1, 1, dtype=torch.long))]}

    method = cls.Config.model_fields["method"].default
    config = cls.Config.model_validate({"method": method, "epochs": f"{steps} steps", **DEFAULTS, **settings})
    return OnExample(config, Job(SolvableModel(*start), None, SolvableTask(), steps))  # type: ignore[arg-type]


def trajectory(search: Any, steps: int, noise: Callable[[], float] = lambda: 0.0) -> Array:
    """Return (w, a), for RARTS (w, u, a), before the first step and after each one."""
    points = [_point(search)]
    for _ in range(steps):
        search.step((Draw("p", noise(), noise()), Draw("a", noise(), noise())))
        points.append(_point(search))
    return np.array(points)


def _point(search: Any) -> list[float]:
    parameters = [search.job.model.w, *getattr(search, "u", []), search.job.model.a]
    return [float(p.detach()) for p in parameters]


def equilibrium(lam: float, beta: float) -> Array:
    """Return (w, u, a) to which RARTS converges (2.19)."""
    d = 4 * beta * lam - beta - 2 * lam
    return np.array([4 * beta * lam - 2 * beta, 4 * beta * lam - 2 * beta - 4 * lam, 4 * beta * lam]) / d


def hessian(lam: float, beta: float) -> Array:
    """Return the Hessian of the Lagrangian in (w, u, a)."""
    return np.array([[2 * lam + beta, -beta, -2 * lam], [-beta, beta, 1.0], [-2 * lam, 1.0, 2 * lam]])


def lagrangian_gap(points: Array, lam: float, beta: float) -> Array:
    """Return L - L* at points (w, u, a): the Lagrangian is a quadratic form around its minimum."""
    z = points - equilibrium(lam, beta)
    return 0.5 * np.einsum("...i,ij,...j->...", z, hessian(lam, beta), z)


def iteration_matrices(lam: float, beta: float, lr: float) -> tuple[Array, Array]:
    """Return M and N of z' - z* = M (z - z*) + N noise, with the noise in the gradients of (w, u, a)."""
    h = hessian(lam, beta)
    inverse = np.linalg.inv(np.eye(3) + lr * np.tril(h, -1))
    return inverse @ (np.eye(3) - lr * np.triu(h)), -lr * inverse


def linear_rate(lam: float, beta: float, lr: float) -> float:
    """Return the factor by which L - L* falls in a step, in the long run."""
    return float(np.abs(np.linalg.eigvals(iteration_matrices(lam, beta, lr)[0])).max() ** 2)


def rate_bound(lam: float, beta: float, lr: float) -> float:
    """Return the bound on that factor of corollary 2.6: 1 - c_4 eta^2 mu / 3, with c_4 from (2.18).

    mu is the smallest eigenvalue of the Hessian (2.26), the Lipschitz constant of both losses is 4.
    """
    lipschitz = 4.0
    c4 = 1 / lr - max(lipschitz + beta / 2, lam * lipschitz + beta / 2, (1 + lam) * lipschitz)
    return float(1 - c4 * lr**2 * np.linalg.eigvalsh(hessian(lam, beta)).min() / 3)


def noise_floor(lam: float, beta: float, lr: float, sigma: float) -> float:
    """Return the expected L - L* to which RARTS falls if each batch's gradients have noise of deviation sigma.

    The covariance of z solves C = M C M^t + N S N^t. S is diagonal: the noise of L_a counts lambda times, and the
    gradient of the score has that of both losses.
    """
    m, n = iteration_matrices(lam, beta, lr)
    source = n @ np.diag([lam**2, 1.0, 1 + lam**2]) @ n.T * sigma**2
    covariance = np.linalg.solve(np.eye(9) - np.kron(m, m), source.ravel()).reshape(3, 3)
    return float(0.5 * np.trace(hessian(lam, beta) @ covariance))
