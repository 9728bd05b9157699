"""A small network for the two-level searches, and their loss written without their code."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import compress
from compress.search.base import Job, search_class
from helpers.regression import RegressionTask

TWO_BATCH_METHODS = ["rarts", "darts1", "darts2", "milenas"]


def small_convolutions() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 16, 4)]
    return nn.Sequential(*layers).double()


def batch_pair() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    made = [(torch.randn(4, 3, 8, 8, generator=generator), torch.randn(4, 4, generator=generator)) for _ in range(2)]
    return tuple((x.double(), y.double()) for x, y in made)  # type: ignore[return-value]


def started_search(method: str, **settings: Any) -> Any:
    model = small_convolutions()
    cls = search_class(method)
    common = {"epochs": "9 steps", "lr": 0.05, "momentum": 0, "weight_decay": 0, "schedule": "constant", "gamma": 0.2}
    config = cls.Config.model_validate({"method": method, **common, **settings})
    search: Any = cls(config, Job(model, compress.find_groups(model, batch_pair()[0][0]), RegressionTask(), 9))
    with torch.no_grad():
        generator = torch.Generator().manual_seed(4)
        for a in search.alpha:
            a.copy_(torch.randn(a.shape, generator=generator))
        for u in getattr(search, "u", []):
            u.add_(0.05 * torch.randn(u.shape, generator=generator))
    return search


def loss_at(search: Any, weights: list[Tensor], alpha: list[Tensor], batch: Any) -> Tensor:
    """The loss as a function of weights and scores, written without the search's code."""
    model = copy.deepcopy(search.job.model)
    names = [n for n, _ in model.named_parameters()]
    mine = {id(p): n for n, p in search.job.model.named_parameters()}
    values = {mine[id(p)]: v for p, v in zip(search.weights, weights, strict=True)}
    values |= {mine[id(p)]: v for p, v in zip(search.alpha, alpha, strict=True)}
    assert set(values) == set(names)
    out = torch.func.functional_call(model, values, (batch[0],))
    return (out - batch[1]).square().mean()


def as_leaves(tensors: Any) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


def gradient(loss: Tensor, wanted: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, wanted))
