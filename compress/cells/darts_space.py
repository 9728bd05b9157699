"""The space of DARTS: a stack of normal and reduction cells of four nodes (Liu et al. 2019; Xue 2022, 3.1).

A cell has two inputs, the outputs of the two cells before it, and concatenates its four nodes. In the search every node
reads all earlier ones: 14 edges, each a choice of 8 operations whose scores all cells of a kind share. Selection
(3.1.3): the strongest operation of an edge other than none, and the two strongest edges into each node. Reduction cells
stand at 1/3 and 2/3 of the depth; edges from their inputs have stride 2, and the channels double.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from compress.modules import Choice, Decision, Option, SearchSpace, Strengths, Zero

from .auxiliary import AuxiliaryHead, drop_path
from .genotype import Cell, Genotype, check_genotype
from .operations import DARTS_OPERATIONS, OPERATIONS, FactorizedReduction, relu_conv_norm

NODES = 4
EDGES = [(source, node) for node in range(2, 2 + NODES) for source in range(node)]
KEPT_EDGES = 2  # into each node
STEM_FACTOR = 3  # channels of the stem, relative to those of the first cells


class DartsCell(nn.Module):
    """One cell: preprocessed inputs, edges with operations, and the concatenation of nodes."""

    drop_path_rate: float = 0.0

    def __init__(
        self, structure: Cell | None, inputs: tuple[int, int], channels: int, reduces: bool, follows_reduction: bool
    ) -> None:
        super().__init__()
        kind, affine = "reduction" if reduces else "normal", structure is not None
        first: nn.Module
        if follows_reduction:
            first = FactorizedReduction(inputs[0], channels, affine)
        else:
            first = relu_conv_norm(inputs[0], channels, 1, affine=affine)
        self.preprocess = nn.ModuleList([first, relu_conv_norm(inputs[1], channels, 1, affine=affine)])
        self.edges = nn.ModuleList()
        self.ends: list[tuple[int, int]] = []  # source and node of each edge
        if structure is None:
            self.num_nodes, self.output = NODES, tuple(range(2, 2 + NODES))
            for number, (source, node) in enumerate(EDGES):
                stride = 2 if reduces and source < 2 else 1
                self.edges.append(Choice(shared=f"{kind}.{number}", **_candidates(channels, stride)))
                self.ends.append((source, node))
        else:
            self.num_nodes, self.output = len(structure.nodes), structure.output
            for node, edges in enumerate(structure.nodes, 2):
                for name, source in edges:
                    if name != "none":
                        self.edges.append(OPERATIONS[name](channels, 2 if reduces and source < 2 else 1, True))
                        self.ends.append((source, node))

    def forward(self, before: Tensor, last: Tensor) -> Tensor:
        states = [self.preprocess[0](before), self.preprocess[1](last)]
        for node in range(2, 2 + self.num_nodes):
            total: Tensor | None = None
            for (source, end), operation in zip(self.ends, self.edges, strict=True):
                if end == node and not isinstance(operation, Zero):  # none: the edge is removed
                    out = operation(states[source])
                    if self.training and self.drop_path_rate and not isinstance(operation, nn.Identity):
                        out = drop_path(out, self.drop_path_rate)
                    total = out if total is None else total + out
            assert total is not None
            states.append(total)
        return torch.cat([states[node] for node in self.output], 1)


def _candidates(channels: int, stride: int) -> dict[str, nn.Module]:
    """Return the operations of an edge in the search; a batch norm follows each pool, and norms have no parameters."""
    candidates = {name: OPERATIONS[name](channels, stride, False) for name in DARTS_OPERATIONS}
    for name in ("max_pool_3x3", "avg_pool_3x3"):
        candidates[name] = nn.Sequential(candidates[name], nn.BatchNorm2d(channels, affine=False))
    return candidates


class DartsNetwork(SearchSpace):
    """A network of DARTS cells for small images: with choices, or of a genotype.

    With an auxiliary head it keeps the head's outputs of the last training pass in `auxiliary_outputs`.
    """

    can_have_auxiliary_head = True

    def __init__(
        self, channels: int, cells: int, classes: int, genotype: Genotype | None = None, image_channels: int = 3
    ) -> None:
        super().__init__()
        self._build(channels, cells, classes, genotype, image_channels)

    def _build(self, channels: int, cells: int, classes: int, genotype: Genotype | None, image_channels: int) -> None:
        _check_sizes(channels=channels, cells=cells, classes=classes)
        check_genotype(genotype, "darts")
        self.sizes = {"channels": channels, "cells": cells, "classes": classes, "image_channels": image_channels}
        self.stem = nn.Sequential(
            nn.Conv2d(image_channels, STEM_FACTOR * channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(STEM_FACTOR * channels),
        )
        reductions = {cells // 3, 2 * cells // 3} if cells > 1 else set()
        self.cells = nn.ModuleList()
        inputs, current, follows_reduction = (STEM_FACTOR * channels,) * 2, channels, False
        self.auxiliary: nn.Module | None = None
        self.auxiliary_outputs = None
        for number in range(cells):
            reduces = number in reductions
            current *= 2 if reduces else 1
            structure = None if genotype is None else genotype.reduction if reduces else genotype.normal
            cell = DartsCell(structure, inputs, current, reduces, follows_reduction)
            self.cells.append(cell)
            inputs, follows_reduction = (inputs[1], len(cell.output) * current), reduces
        self.head = nn.Linear(inputs[1], classes)

    def forward(self, x: Tensor) -> Tensor:
        before = last = self.stem(x)
        self.auxiliary_outputs = None
        for number, cell in enumerate(self.cells):
            before, last = last, cell(before, last)
            if self.training and self.auxiliary is not None and number == 2 * len(self.cells) // 3:
                self.auxiliary_outputs = self.auxiliary(last)
        out: Tensor = self.head(last.mean((2, 3)))
        return out

    def set_drop_path_(self, rate: float) -> None:
        """Drop each path with this probability in training."""
        for cell in self.cells:
            assert isinstance(cell, DartsCell)
            cell.drop_path_rate = rate

    def decisions(self, strengths: Strengths) -> list[Decision]:
        """Return one decision per node: two of its edges, each with an operation other than none."""
        decisions: list[Decision] = []
        for kind in ("normal", "reduction"):
            if f"{kind}.0" not in strengths:
                continue
            for node in range(2, 2 + NODES):
                edges = [number for number, (_, end) in enumerate(EDGES) if end == node]
                decisions.append(_node_options(kind, edges, strengths))
        return decisions

    def predecessors(self) -> dict[str, list[str]]:
        return {
            f"{kind}.{number}": [f"{kind}.{other}" for other, (_, end) in enumerate(EDGES) if end == source]
            for kind in ("normal", "reduction")
            for number, (source, _) in enumerate(EDGES)
        }

    def genotype_of(self, chosen: Mapping[str, str]) -> dict[str, Any]:
        cells = {}
        for kind in ("normal", "reduction"):
            other = "normal" if kind == "reduction" else "reduction"
            source_kind = kind if f"{kind}.0" in chosen else other  # a short network has cells of one kind only
            nodes = tuple(
                tuple(
                    (chosen[f"{source_kind}.{number}"], source)
                    for number, (source, end) in enumerate(EDGES)
                    if end == node and chosen[f"{source_kind}.{number}"] != "none"
                )
                for node in range(2, 2 + NODES)
            )
            cells[kind] = Cell(nodes, tuple(range(2, 2 + NODES)))
        return Genotype("darts", cells).to_dict()

    def describe(self, genotype: Mapping[str, Any], **sizes: Any) -> dict[str, Any]:
        known = {"channels", "cells"}
        if unknown := sorted(set(sizes) - known):
            raise ValueError(f"finetune.{unknown[0]}: a network of DARTS cells has the sizes channels and cells")
        merged = self.sizes | sizes
        _check_sizes(**merged)
        return {"genotype": Genotype.from_dict(genotype).to_dict(), **merged}

    def rebuild_(self, description: Mapping[str, Any]) -> None:
        parameter = next(self.parameters())
        genotype = Genotype.from_dict(description["genotype"])
        self._build(**{name: int(description[name]) for name in self.sizes}, genotype=genotype)
        self.to(parameter.device, parameter.dtype)

    def add_auxiliary_head_(self) -> None:
        """Add the auxiliary head, which is used in training only."""
        parameter = next(self.parameters())
        cell = self.cells[2 * len(self.cells) // 3]
        assert isinstance(cell, DartsCell)
        pre = cell.preprocess[1]
        assert isinstance(pre, nn.Sequential) and isinstance(pre[1], nn.Conv2d)
        head = AuxiliaryHead(len(cell.output) * pre[1].out_channels, self.sizes["classes"])
        self.auxiliary = head.to(parameter.device, parameter.dtype)

    def remove_auxiliary_head_(self) -> None:
        """Remove the auxiliary head and what it computed."""
        self.auxiliary = self.auxiliary_outputs = None


def darts_network(
    channels: int = 16,
    cells: int = 8,
    classes: int = 10,
    genotype: Genotype | None = None,
    image_channels: int = 3,
) -> DartsNetwork:
    """Return a network of DARTS cells: with a choice on each of 14 edges, or the plain network of a genotype.

    The defaults are those of the search on CIFAR-10: 224 scores and 1.93 million weights.

    Raises:
        ValueError: a size is not positive, or the genotype is of another space.
        TypeError: the genotype is none.
    """
    return DartsNetwork(channels, cells, classes, genotype, image_channels)


def _node_options(kind: str, edges: list[int], strengths: Strengths) -> list[Option]:
    """Return every pair of edges into a node with every pair of operations; the other edges are none."""
    options = []
    operations = [name for name in DARTS_OPERATIONS if name != "none"]
    for kept in combinations(edges, min(KEPT_EDGES, len(edges))):
        dropped = {f"{kind}.{number}": "none" for number in edges if number not in kept}
        pairs: list[tuple[dict[str, str], float]] = [({}, 0.0)]
        for number in kept:
            table = strengths[f"{kind}.{number}"]
            pairs = [
                (chosen | {f"{kind}.{number}": name}, strength + table[name])
                for chosen, strength in pairs
                for name in operations
            ]
        options += [Option(chosen | dropped, strength) for chosen, strength in pairs]
    return options


def _check_sizes(**sizes: Any) -> None:
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**5:
            raise ValueError(f"{name}: expected a positive integer; got {value!r}")
