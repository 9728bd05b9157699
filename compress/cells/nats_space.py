"""The topology space of NATS-Bench: one cell of four nodes and six edges, five operations (Dong et al. 2021).

Node j is the sum over i < j of an operation on node i; the last node is the output. The network: a stem, N cells of C
channels, a residual block of stride 2, N cells of 2C, another block, N cells of 4C, batch norm, ReLU, pool, linear. All
cells share their scores. Selection: the strongest operation of each edge, none included, but not none on every edge of
a node. 15,625 cells, whose accuracies are published.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from compress.modules import Choice, Decision, Option, SearchSpace, Strengths, Zero

from .auxiliary import drop_path
from .genotype import Cell, Genotype, check_genotype
from .operations import NATS_OPERATIONS, OPERATIONS, relu_conv_norm

NODES = 3  # beside the input
EDGES = [(source, node) for node in range(1, 1 + NODES) for source in range(node)]
STAGES = 3


class NatsCell(nn.Module):
    """One cell; an edge with none is left out of the sum."""

    drop_path_rate: float = 0.0

    def __init__(self, channels: int, structure: Cell | None) -> None:
        super().__init__()
        if structure is None:
            edges: list[nn.Module] = [
                Choice(
                    shared=f"cell.{number}",
                    **{name: OPERATIONS[name](channels, 1, False) for name in NATS_OPERATIONS},
                )
                for number in range(len(EDGES))
            ]
        else:
            names = [name for node in structure.nodes for name, _ in node]
            edges = [OPERATIONS[name](channels, 1, True) for name in names]
        self.edges = nn.ModuleList(edges)

    def forward(self, x: Tensor) -> Tensor:
        states = [x]
        for node in range(1, 1 + NODES):
            total: Tensor | None = None
            for (source, end), operation in zip(EDGES, self.edges, strict=True):
                if end == node and not isinstance(operation, Zero):
                    out = operation(states[source])
                    if self.training and self.drop_path_rate and not isinstance(operation, nn.Identity):
                        out = drop_path(out, self.drop_path_rate)
                    total = out if total is None else total + out
            states.append(torch.zeros_like(x) if total is None else total)
        return states[-1]


class ResidualBlock(nn.Module):
    """A basic residual block of stride 2, which doubles the channels."""

    def __init__(self, inputs: int, channels: int) -> None:
        super().__init__()
        self.first = relu_conv_norm(inputs, channels, 3, 2)
        self.second = relu_conv_norm(channels, channels, 3)
        self.shortcut = nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(inputs, channels, 1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.shortcut(x) + self.second(self.first(x))
        return out


class NatsNetwork(SearchSpace):
    """A network of NATS-Bench cells: with choices, or of a genotype."""

    def __init__(
        self,
        channels: int,
        cells_per_stage: int,
        classes: int,
        genotype: Genotype | None = None,
        image_channels: int = 3,
    ) -> None:
        super().__init__()
        self._build(channels, cells_per_stage, classes, genotype, image_channels)

    def _build(
        self, channels: int, cells_per_stage: int, classes: int, genotype: Genotype | None, image_channels: int
    ) -> None:
        self.sizes = {"channels": channels, "cells_per_stage": cells_per_stage, "classes": classes}
        self.sizes["image_channels"] = image_channels
        _check_sizes(**self.sizes)
        check_genotype(genotype, "nats")
        structure = None if genotype is None else genotype.normal
        self.stem = nn.Sequential(
            nn.Conv2d(image_channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        )
        self.blocks = nn.Sequential()
        for stage in range(STAGES):
            width = channels * 2**stage
            if stage:
                self.blocks.append(ResidualBlock(width // 2, width))
            for _ in range(cells_per_stage):
                self.blocks.append(NatsCell(width, structure))
        self.norm = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.blocks(self.stem(x))))
        out: Tensor = self.head(x.mean((2, 3)))
        return out

    def set_drop_path_(self, rate: float) -> None:
        """Drop each path with this probability in training."""
        for cell in self.blocks:
            if isinstance(cell, NatsCell):
                cell.drop_path_rate = rate

    def decisions(self, strengths: Strengths) -> list[Decision]:
        """Return one decision per node: an operation for each of its edges, not none for all of them."""
        decisions: list[Decision] = []
        for node in range(1, 1 + NODES):
            groups = [f"cell.{number}" for number, (_, end) in enumerate(EDGES) if end == node]
            decisions.append(
                [
                    Option(dict(zip(groups, names, strict=True)), _sum_of_strengths(strengths, groups, names))
                    for names in product(NATS_OPERATIONS, repeat=len(groups))
                    if any(name != "none" for name in names)
                ]
            )
        return decisions

    def predecessors(self) -> dict[str, list[str]]:
        return {
            f"cell.{number}": [f"cell.{other}" for other, (_, end) in enumerate(EDGES) if end == source]
            for number, (source, _) in enumerate(EDGES)
        }

    def genotype_of(self, chosen: Mapping[str, str]) -> dict[str, Any]:
        return _genotype([chosen[f"cell.{number}"] for number in range(len(EDGES))]).to_dict()

    def describe(self, genotype: Mapping[str, Any], **sizes: Any) -> dict[str, Any]:
        names = {"channels": "channels", "cells": "cells_per_stage"}
        if unknown := sorted(set(sizes) - set(names)):
            raise ValueError(
                f"finetune.{unknown[0]}: a network of NATS cells has the sizes channels and cells (per stage)"
            )
        merged = self.sizes | {names[key]: value for key, value in sizes.items()}
        _check_sizes(**merged)
        return {"genotype": Genotype.from_dict(genotype).to_dict(), **merged}

    def rebuild_(self, description: Mapping[str, Any]) -> None:
        parameter = next(self.parameters())
        sizes = {name: int(description[name]) for name in self.sizes}
        self._build(**sizes, genotype=Genotype.from_dict(description["genotype"]))
        self.to(parameter.device, parameter.dtype)


def nats_network(
    channels: int = 16,
    cells_per_stage: int = 5,
    classes: int = 10,
    genotype: Genotype | None = None,
    image_channels: int = 3,
) -> NatsNetwork:
    """Return a network of NATS-Bench cells: with a choice on each of 6 edges, or the plain network of a genotype.

    Raises:
        ValueError: a size is not positive, or the genotype is of another space.
        TypeError: the genotype is none.
    """
    return NatsNetwork(channels, cells_per_stage, classes, genotype, image_channels)


def digits_network() -> NatsNetwork:
    """Return a small network of NATS-Bench cells with choices, for scikit-learn's digits."""
    return NatsNetwork(8, 1, 10, image_channels=1)


def nats_genotypes() -> Iterator[Genotype]:
    """Yield all 15,625 cells of the space."""
    for names in product(NATS_OPERATIONS, repeat=len(EDGES)):
        yield _genotype(names)


def _genotype(names: Any) -> Genotype:
    """Return the genotype with these operations, in the order of the edges."""
    nodes = tuple(
        tuple((names[number], source) for number, (source, end) in enumerate(EDGES) if end == node)
        for node in range(1, 1 + NODES)
    )
    return Genotype("nats", {"cell": Cell(nodes, (NODES,), inputs=1)})


def _sum_of_strengths(strengths: Strengths, groups: list[str], names: tuple[str, ...]) -> float:
    return sum(strengths[group][name] for group, name in zip(groups, names, strict=True))


def _check_sizes(**sizes: Any) -> None:
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**5:
            raise ValueError(f"{name}: expected a positive integer; got {value!r}")
