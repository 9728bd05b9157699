"""The space of DARTS: published counts, the rule of selection against brute force, cut and derived networks."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

import compress
from compress.budget.operation_choice import strongest
from compress.cells import DARTS_V2, NASNET_A, Genotype, darts_network, draw_cell, nats_genotypes
from compress.cells.darts_space import EDGES
from compress.cells.operations import DARTS_OPERATIONS
from compress.modules import Zero, choices_of, decisions_of

RECIPE: dict[str, Any] = {
    "target": {"operations": True},
    "search": {"method": "darts1", "epochs": "2 steps", "lr": 0.025},
    "timing": {"repeats": 3},
}


def batches(count: int = 16, size: int = 8) -> list[Any]:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(count, 3, size, size, generator=random)
    return list(zip(x.split(4), torch.randint(0, 10, (count,), generator=random).split(4), strict=True))


def test_search_network_has_224_scores_and_1930618_weights() -> None:
    network = darts_network()
    scores = {id(c.scores): c.scores for c in choices_of(network).values()}
    assert len(scores) == 2 * 14
    assert sum(a.numel() for a in scores.values()) == 224
    assert sum(p.numel() for p in network.parameters() if id(p) not in scores) == 1_930_618


def test_darts_v2_at_20_cells_and_36_channels_has_335_million_parameters() -> None:
    network = darts_network(36, 20, 10, DARTS_V2)
    assert round(sum(p.numel() for p in network.parameters()) / 1e6, 2) == 3.35


@pytest.mark.parametrize("size", [8, 11])
def test_networks_of_genotypes_run_and_halve_the_resolution_twice(size: int) -> None:
    network = darts_network(4, 5, 7, NASNET_A)
    seen = []
    for cell in network.cells:
        cell.register_forward_hook(lambda _, __, out: seen.append(out.shape[-1]))
    assert network(torch.randn(2, 3, size, size)).shape == (2, 7)
    half = (size + 1) // 2
    assert seen == [size, half, half, (half + 1) // 2, (half + 1) // 2]


def test_selection_is_the_strongest_operation_and_the_two_strongest_edges() -> None:
    torch.manual_seed(0)
    network = darts_network(2, 3, 4)
    strengths = {
        f"{kind}.{number}": dict(zip(DARTS_OPERATIONS, torch.rand(8).softmax(0).tolist(), strict=True))
        for kind in ("normal", "reduction")
        for number in range(14)
    }
    for table in list(strengths.values())[::3]:
        table["none"] = 0.9  # takes part in the softmax and is not selected
    chosen = strongest(decisions_of(network, strengths))
    for kind in ("normal", "reduction"):
        for node in range(2, 6):
            edges = [number for number, (_, end) in enumerate(EDGES) if end == node]
            best = {n: max((s, op) for op, s in strengths[f"{kind}.{n}"].items() if op != "none") for n in edges}
            kept = max(combinations(edges, 2), key=lambda pair: sum(best[n][0] for n in pair))
            assert {n: chosen[f"{kind}.{n}"] for n in edges} == {n: best[n][1] if n in kept else "none" for n in edges}
    genotype = Genotype.from_dict(network.genotype_of(chosen))
    assert all(len(node) == 2 for cell in genotype.cells.values() for node in cell.nodes)


def test_predecessors_are_the_edges_into_the_node_that_is_read() -> None:
    predecessors = darts_network(2, 1, 4).predecessors()
    last = EDGES.index((4, 5))
    into_4 = [number for number, (_, end) in enumerate(EDGES) if end == 4]
    assert predecessors[f"normal.{last}"] == [f"normal.{n}" for n in into_4]
    assert predecessors["normal.0"] == []


def test_a_searched_network_is_cut_drawn_and_reloaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    pruned = compress.prune(darts_network(2, 3, 10), RECIPE, train=batches(), workdir=tmp_path, quiet=True)
    genotype = pruned.genotype
    assert genotype is not None and genotype.space == "darts"
    assert not choices_of(pruned.model)
    removed = sum(isinstance(module, Zero) for module in pruned.model.modules())
    assert removed == 3 * 6  # 8 of 14 edges stay
    again = compress.load(darts_network(2, 3, 10), tmp_path)
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(again.eval()(x), pruned.model(x))
    page = (tmp_path / "report.html").read_text()
    for kind, cell in genotype.cells.items():
        assert draw_cell(cell, f"{kind} cell") in page
        for node in cell.nodes:
            for name, _ in node:
                assert name in draw_cell(cell, kind)


def test_drawing_has_an_arc_for_every_edge_and_a_circle_for_every_node() -> None:
    svg = draw_cell(DARTS_V2.normal, "normal <cell>")
    assert svg.count("<path") == 8 + 4  # operations, and the concatenation
    assert svg.count("<circle") == 2 + 4 + 1
    assert "normal &lt;cell&gt;: sep_conv_3x3 from 0 to 2" in svg


def test_bad_sizes_and_genotypes_are_refused() -> None:
    with pytest.raises(ValueError, match="channels: expected a positive integer; got 0"):
        darts_network(channels=0)
    with pytest.raises(ValueError, match="genotype: expected one of the space darts; got nats"):
        darts_network(4, 3, 10, next(nats_genotypes()))
    with pytest.raises(
        TypeError, match=r"expected a compress.cells.Genotype; got dict. Read one with Genotype.from_json"
    ):
        darts_network(4, 3, 10, DARTS_V2.to_dict())  # type: ignore[arg-type]
    network = darts_network(2, 1, 4)
    with pytest.raises(ValueError, match=r"finetune.depth: a network of DARTS cells has the sizes channels and cells"):
        network.describe(DARTS_V2.to_dict(), depth=3)


def test_rebuilt_network_is_that_of_the_genotype() -> None:
    network = darts_network(2, 2, 10).double()
    network.rebuild_(network.describe(DARTS_V2.to_dict(), cells=4, channels=6))
    expected = darts_network(6, 4, 10, DARTS_V2)
    assert {n: t.shape for n, t in network.state_dict().items()} == {
        n: t.shape for n, t in expected.state_dict().items()
    }
    assert next(network.parameters()).dtype == torch.float64
