"""Genotype: the operations and connections of the cells of a network, as data."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .operations import DARTS_OPERATIONS, NATS_OPERATIONS, OPERATION_NAMES

Edge = tuple[str, int]  # operation, and the node that it reads
KINDS = {"darts": ("normal", "reduction"), "nats": ("cell",)}  # space -> its kinds of cells
NUM_INPUTS = {"darts": 2, "nats": 1}


@dataclass(frozen=True)
class Cell:
    """The structure of one kind of cell: a directed acyclic graph whose edges are operations.

    Attributes:
        nodes: the edges into every intermediate node. Nodes are counted from the inputs on.
        output: the nodes that are concatenated; in the space of NATS-Bench the last node alone.
        inputs: how many input nodes there are.
    """

    nodes: tuple[tuple[Edge, ...], ...]
    output: tuple[int, ...]
    inputs: int = 2

    @property
    def depth(self) -> int:
        """Return the number of edges on the longest path from an input to the output; `none` is no edge.

        Nodes that are concatenated have an edge to the output; in the space of NATS-Bench the last node is the output.
        """
        depths: list[int | None] = [0] * self.inputs  # None: no path leads there
        for edges in self._real_edges:
            before = [depth for source in edges if (depth := depths[source]) is not None]
            depths.append(1 + max(before) if before else None)
        reached = [depth for node in self.output if (depth := depths[node]) is not None]
        return max(reached) + (self.inputs > 1) if reached else 0

    @property
    def width(self) -> float:
        """Return the width in units of a node's width: each node counts with the fraction of its edges from inputs."""
        return sum(sum(source < self.inputs for source in edges) / max(1, len(edges)) for edges in self._real_edges)

    @property
    def _real_edges(self) -> list[list[int]]:
        """Sources of the edges into every intermediate node, without those that are `none`."""
        return [[source for name, source in edges if name != "none"] for edges in self.nodes]

    def share_of(self, operation: str) -> float:
        """Return the fraction of the edges with this operation."""
        names = [name for edges in self.nodes for name, _ in edges]
        return names.count(operation) / len(names)


@dataclass(frozen=True)
class Genotype:
    """The cells of a network, by kind: `normal` and `reduction` in the space of DARTS, `cell` in that of NATS-Bench.

    >>> genotype = Genotype.from_string("|skip_connect~0|+|none~0|nor_conv_3x3~1|+|none~0|none~1|avg_pool_3x3~2|")
    >>> genotype.cells["cell"].nodes[1]
    (('none', 0), ('nor_conv_3x3', 1))
    >>> Genotype.from_json(genotype.to_json()) == genotype
    True

    Raises:
        ValueError: an operation is unknown, an edge reads a node that is not before its own, or a node of the space of
            DARTS has no operation other than none.
    """

    space: str
    cells: Mapping[str, Cell] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.space not in KINDS:
            raise ValueError(f"genotype: space: expected one of {', '.join(KINDS)}; got {self.space!r}")
        if set(self.cells) != set(KINDS[self.space]):
            got = ", ".join(map(str, self.cells)) or "none"
            raise ValueError(f"genotype: expected the cells {', '.join(KINDS[self.space])}; got {got}")
        for kind, cell in self.cells.items():
            _check_cell(kind, cell, self.space)

    def __hash__(self) -> int:
        return hash((self.space, *sorted(self.cells.items())))

    @property
    def normal(self) -> Cell:
        """Return the normal cell, or the only one."""
        return self.cells[KINDS[self.space][0]]

    @property
    def reduction(self) -> Cell:
        """Return the reduction cell, or the only one."""
        return self.cells[KINDS[self.space][-1]]

    def __str__(self) -> str:
        """Return the string of NATS-Bench, or JSON for other spaces."""
        if self.space != "nats":
            return self.to_json()
        return "+".join("|" + "".join(f"{name}~{source}|" for name, source in edges) for edges in self.normal.nodes)

    @classmethod
    def from_string(cls, text: str) -> Genotype:
        """Read a cell as NATS-Bench writes it: `|op~0|+|op~0|op~1|+|op~0|op~1|op~2|`.

        Raises:
            ValueError: the text is not such a string, or names an unknown operation.
        """
        try:
            nodes = tuple(
                tuple(
                    (name, int(source)) for name, _, source in (edge.rpartition("~") for edge in node[1:-1].split("|"))
                )
                for node in text.strip().split("+")
            )
        except ValueError as error:
            raise ValueError(f"genotype: expected a string such as |op~0|+|op~0|op~1|; got {text[:80]!r}") from error
        return cls("nats", {"cell": Cell(nodes, (len(nodes),), inputs=1)})

    def to_dict(self) -> dict[str, Any]:
        """Return the genotype as JSON data."""
        cells = {
            kind: {"nodes": [[list(edge) for edge in edges] for edges in cell.nodes], "output": list(cell.output)}
            for kind, cell in self.cells.items()
        }
        return {"space": self.space, "cells": cells}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Genotype:
        """Build a genotype from the data that `to_dict` returns.

        Raises:
            ValueError: the data is not a genotype, or names an unknown operation.
        """
        try:
            space = data["space"]
            cells = {
                str(kind): Cell(
                    tuple(tuple((str(name), _as_int(source)) for name, source in edges) for edges in cell["nodes"]),
                    tuple(_as_int(node) for node in cell["output"]),
                    NUM_INPUTS.get(space, 2),
                )
                for kind, cell in data["cells"].items()
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"genotype: expected space and cells with nodes and output; got {str(data)[:80]}"
            ) from error
        return cls(space, cells)

    def to_json(self) -> str:
        """Return the genotype as the text of a JSON file."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Genotype:
        """Read the text that `to_json` returns.

        Raises:
            ValueError: the text is not a genotype.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"genotype: expected JSON, as Genotype.to_json writes it: {error}") from error
        return cls.from_dict(data)

    def with_random_operations(self, seed: int) -> Genotype:
        """Return the same connections with every operation drawn anew, uniformly."""
        generator, names = random.Random(seed), operations_of(self.space)
        return self._with_edges(lambda node, edge: (generator.choice(names), edge[1]))

    def with_random_connections(self, seed: int) -> Genotype:
        """Return the same operations with every source drawn anew, uniformly from the nodes before."""
        if self.space == "nats":
            raise ValueError("genotype: every node of this space reads all nodes before it; draw operations instead")
        generator = random.Random(seed)
        return self._with_edges(lambda node, edge: (edge[0], generator.randrange(node)))

    def _with_edges(self, redraw: Any) -> Genotype:
        cells = {
            kind: Cell(
                tuple(
                    tuple(redraw(node, edge) for edge in edges) for node, edges in enumerate(cell.nodes, cell.inputs)
                ),
                cell.output,
                cell.inputs,
            )
            for kind, cell in self.cells.items()
        }
        return Genotype(self.space, cells)


def check_genotype(genotype: Genotype | None, space: str) -> None:
    """Check that a network of a space can be built from a genotype; None is a network to search.

    Raises:
        TypeError: it is not a genotype.
        ValueError: it is one of another space.
    """
    if genotype is None:
        return
    if not isinstance(genotype, Genotype):
        raise TypeError(
            f"genotype: expected a compress.cells.Genotype; got {type(genotype).__name__}. Read one with "
            "Genotype.from_json, from_dict or from_string"
        )
    if genotype.space != space:
        raise ValueError(f"genotype: expected one of the space {space}; got {genotype.space}")


def operations_of(space: str) -> Sequence[str]:
    """Return the operations that a search chooses from; without none in the space of DARTS."""
    return NATS_OPERATIONS if space == "nats" else [name for name in DARTS_OPERATIONS if name != "none"]


def _as_int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected the number of a node; got {value!r}")
    return value


def _check_cell(kind: str, cell: Cell, space: str) -> None:
    known = NATS_OPERATIONS if space == "nats" else OPERATION_NAMES
    for node, edges in enumerate(cell.nodes, cell.inputs):
        where = f"genotype: cell {kind}, node {node}"
        for name, source in edges:
            if name not in known:
                raise ValueError(f"{where}: unknown operation {name!r}; expected one of {', '.join(known)}")
            if not 0 <= source < node:
                raise ValueError(f"{where}: {name} reads node {source}; expected one of 0 to {node - 1}")
        if space == "nats":
            if [source for _, source in edges] != list(range(node)):
                raise ValueError(f"{where}: expected one edge from each of the nodes 0 to {node - 1}")
        elif all(name == "none" for name, _ in edges):
            raise ValueError(f"{where}: `none` was chosen for every edge, so that the node computes nothing")
    last = cell.inputs + len(cell.nodes)
    if not cell.output or not all(cell.inputs <= node < last for node in cell.output):
        raise ValueError(f"genotype: cell {kind}: output: expected nodes from {cell.inputs} to {last - 1}")
