"""Cases: small networks with known properties, how they are built, and how outputs are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import compress

CASES: dict[str, Case] = {}


@dataclass(frozen=True)
class Case:
    """A small network, the shape of one example, and what has to be found in it."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    groups: int  # at least so many are offered
    refused: str | None  # a regular expression that some reason for a refusal matches
    flops: bool  # whether torch counts all of its products

    def __str__(self) -> str:
        return self.name


class Net(nn.Module):
    """Parts by name and a function that runs them."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.run(self, *inputs)


def case(
    *shape: int, groups: int, refused: str | None = None, flops: bool = True
) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Add the network that a function makes to the table, under the function's name."""

    def add(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        CASES[make.__name__] = Case(make.__name__, make, shape, groups, refused, flops)
        return make

    return add


def example(case: Case, seed: int = 0, dtype: torch.dtype = torch.float64, batch: int = 2) -> Tensor:
    return torch.randn(batch, *case.shape, generator=torch.Generator().manual_seed(1000 + seed)).to(dtype)


@torch.no_grad()
def randomise_(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights, biases, scales, shifts and running statistics that hide nothing: no zeros, no ones."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in [*model.parameters(), *model.buffers()]:
        if not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        if (tensor.ndim > 1 and tensor.shape[-1] > 1) or tensor.ndim in (2, 4, 5):
            tensor.copy_(noise / max(1, tensor[0].numel()) ** 0.5)
        else:
            tensor.copy_(0.5 * noise)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        norm = name.endswith("running_var") or (tensor.ndim == 1 and name.endswith("weight"))
        if norm:
            tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator).to(tensor.dtype))
    return model


def build(case: Case, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The case's network with random numbers everywhere, in eval mode."""
    torch.manual_seed(seed)
    return randomise_(case.make().to(dtype), seed).eval()


@cache
def groups_of(name: str) -> compress.graph.Groups:
    """The groups of a case; they do not depend on its numbers."""
    found = CASES[name]
    return compress.find_groups(build(found), example(found))


def random_keep(groups: Any, ratio: float, seed: int = 0) -> dict[str, np.ndarray]:
    """A random choice from every group, at least one dimension; about `ratio` on average, each group its own share."""
    random = np.random.default_rng(seed)

    def count(width: int) -> int:
        share = ratio + random.uniform(-1, 1) * min(ratio, 1 - ratio)
        return max(1, min(width - 1, round(width * share)))

    return {g.name: np.sort(random.permutation(g.width)[: count(g.width)]) for g in groups}


def tensors_of(output: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]


def run(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return tensors_of(model(*inputs))


def same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(
        x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b, strict=True)
    )


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest difference of two outputs, relative to their range."""
    assert [t.shape for t in a] == [t.shape for t in b]
    assert all(t.isfinite().all() for t in [*a, *b])
    return max(float((x - y).abs().max() / (x.abs().max() + 1e-30)) for x, y in zip(a, b, strict=True))


def zero_scores_(scores: Mapping[str, Tensor], keep: Mapping[str, np.ndarray]) -> None:
    """Set the scores of all that is not kept to zero."""
    with torch.no_grad():
        for name, score in scores.items():
            dropped = np.setdiff1d(np.arange(len(score)), keep[name])
            score[torch.as_tensor(dropped)] = 0
