"""Genotypes: JSON and strings, width and depth of published cells, random variants, refused genotypes."""

from __future__ import annotations

import pytest

from compress.cells import AMOEBANET_A, DARTS_V1, DARTS_V2, ENAS, NASNET_A, Cell, Genotype, nats_genotypes

PUBLISHED = {
    "darts_v1": (DARTS_V1, 3.5, 3),
    "darts_v2": (DARTS_V2, 3.5, 3),
    "enas": (ENAS, 5.0, 2),
    "nasnet": (NASNET_A, 5.0, 2),
    "amoebanet": (AMOEBANET_A, 4.0, 4),
}


@pytest.mark.parametrize(("genotype", "width", "depth"), PUBLISHED.values(), ids=PUBLISHED)
def test_width_and_depth_of_published_cells_are_those_of_the_paper(
    genotype: Genotype, width: float, depth: int
) -> None:
    assert (genotype.normal.width, genotype.normal.depth) == (width, depth)


@pytest.mark.parametrize(("nodes", "width"), [(4, 4.0), (5, 5.0)])
def test_the_widest_cell_reads_only_its_inputs(nodes: int, width: float) -> None:
    cell = Cell(tuple((("skip_connect", 0), ("skip_connect", 1)) for _ in range(nodes)), tuple(range(2, 2 + nodes)))
    assert (cell.width, cell.depth) == (width, 2)
    chain = Cell(tuple((("skip_connect", node - 1),) * 2 for node in range(2, 2 + nodes)), tuple(range(2, 2 + nodes)))
    assert (chain.width, chain.depth) == (1.0, nodes + 1)


def test_the_space_of_nats_bench_has_15625_cells_whose_strings_read_back() -> None:
    strings = set()
    for number, genotype in enumerate(nats_genotypes()):
        strings.add(str(genotype))
        if number % 50 == 0:
            assert Genotype.from_string(str(genotype)) == genotype
            assert Genotype.from_json(genotype.to_json()) == genotype
    assert len(strings) == 5**6 == 15625
    assert "|avg_pool_3x3~0|+|nor_conv_1x1~0|none~1|+|skip_connect~0|nor_conv_3x3~1|none~2|" in strings


def test_json_reads_back() -> None:
    for genotype, _, _ in PUBLISHED.values():
        assert Genotype.from_json(genotype.to_json()) == genotype
        assert hash(Genotype.from_json(genotype.to_json())) == hash(genotype)


def test_random_variants_change_only_what_they_say() -> None:
    def sources(genotype: Genotype) -> list[int]:
        return [s for cell in genotype.cells.values() for node in cell.nodes for _, s in node]

    def names(genotype: Genotype) -> list[str]:
        return [n for cell in genotype.cells.values() for node in cell.nodes for n, _ in node]

    operations, connections = DARTS_V2.with_random_operations(1), DARTS_V2.with_random_connections(1)
    assert sources(operations) == sources(DARTS_V2) and names(operations) != names(DARTS_V2)
    assert names(connections) == names(DARTS_V2) and sources(connections) != sources(DARTS_V2)
    assert DARTS_V2.with_random_operations(1) == operations
    drawn = [name for seed in range(60) for name in names(DARTS_V2.with_random_operations(seed))]
    assert "none" not in drawn
    assert {name: drawn.count(name) for name in set(drawn)}.keys() == {
        *("max_pool_3x3", "avg_pool_3x3", "skip_connect"),
        *("sep_conv_3x3", "sep_conv_5x5", "dil_conv_3x3", "dil_conv_5x5"),
    }
    assert all(abs(drawn.count(name) / len(drawn) - 1 / 7) < 0.05 for name in set(drawn))
    with pytest.raises(ValueError, match="every node of this space reads all nodes before it"):
        next(nats_genotypes()).with_random_connections(0)


def test_share_of_an_operation() -> None:
    text = "|skip_connect~0|+|skip_connect~0|none~1|+|nor_conv_3x3~0|none~1|none~2|"
    assert Genotype.from_string(text).normal.share_of("skip_connect") == pytest.approx(1 / 3)


def changed(**cells: object) -> dict[str, object]:
    return {"space": "darts", "cells": {**DARTS_V2.to_dict()["cells"], **cells}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            changed(normal={"nodes": [[["conv_9x9", 0]]], "output": [2]}),
            "node 2: unknown operation 'conv_9x9'; expected",
        ),
        (changed(normal={"nodes": [[["none", 0], ["none", 1]]], "output": [2]}), "`none` was chosen for every edge"),
        (
            changed(normal={"nodes": [[["skip_connect", 2]]], "output": [2]}),
            "skip_connect reads node 2; expected one of 0",
        ),
        (changed(normal={"nodes": [[["skip_connect", 0]]], "output": [7]}), "output: expected nodes from 2 to 2"),
        (changed(normal={"nodes": [[["skip_connect", "0"]]], "output": [2]}), "expected space and cells with nodes"),
        ({"space": "darts", "cells": {}}, "expected the cells normal, reduction; got none"),
        ({"space": "other", "cells": {}}, "space: expected one of darts, nats; got 'other'"),
        ([], "expected space and cells"),
    ],
)
def test_bad_genotypes_are_refused(data: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Genotype.from_dict(data)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("|conv~0|", "unknown operation 'conv'; expected one of none, skip_connect"),
        ("|none~1|", "none reads node 1; expected one of 0 to 0"),
        ("|none~0|+|none~0|", "expected one edge from each of the nodes 0 to 1"),
        ("|none|", "expected a string such as"),
    ],
)
def test_bad_strings_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Genotype.from_string(text)


@pytest.mark.parametrize(
    ("text", "width", "depth"),
    [
        ("|nor_conv_3x3~0|+|nor_conv_3x3~0|nor_conv_1x1~1|+|none~0|none~1|nor_conv_3x3~2|", 1.5, 3),
        ("|none~0|+|none~0|nor_conv_3x3~1|+|skip_connect~0|none~1|nor_conv_3x3~2|", 0.5, 1),  # node 1 is zero, so is 2
        ("|none~0|+|none~0|none~1|+|none~0|none~1|none~2|", 0.0, 0),
    ],
)
def test_removed_edges_count_neither_for_width_nor_for_depth(text: str, width: float, depth: int) -> None:
    cell = Genotype.from_string(text).normal
    assert (cell.width, cell.depth) == (width, depth)


def test_text_that_is_no_json_is_named() -> None:
    with pytest.raises(ValueError, match=r"genotype: expected JSON, as Genotype.to_json writes it: Expecting"):
        Genotype.from_json("{")
