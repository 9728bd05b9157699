"""The topology space of NATS-Bench: every cell can be built, selection, and the cut of a searched network."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import compress
from compress.budget.operation_choice import strongest
from compress.cells import DARTS_V2, Genotype, nats_genotypes, nats_network
from compress.cells.operations import NATS_OPERATIONS
from compress.modules import choices_of, choose_, decisions_of
from helpers.choice_networks import images


def test_built_networks_have_the_cell_of_their_string() -> None:
    """A cut supernet, and a network of a genotype, for some of all 15,625 cells."""
    x = torch.randn(1, 3, 8, 8)
    for genotype in itertools.islice(nats_genotypes(), 0, None, 521):
        names = [name for node in genotype.normal.nodes for name, _ in node]
        plain = nats_network(2, 1, 10, genotype).eval()
        assert plain(x).shape == (1, 10)
        supernet = nats_network(2, 1, 10)
        chosen = {f"cell.{number}": name for number, name in enumerate(names)}
        assert str(Genotype.from_dict(supernet.genotype_of(chosen))) == str(genotype)
        paths = {path: chosen[str(c.shared)] for path, c in choices_of(supernet).items()}
        assert choose_(supernet, paths).eval()(x).shape == (1, 10)


def test_scores_are_shared_by_all_cells() -> None:
    network = nats_network(4, 2, 10)
    assert len(choices_of(network)) == 3 * 2 * 6
    assert len({id(c.scores) for c in choices_of(network).values()}) == 6


def test_none_may_be_chosen_but_not_for_every_edge_of_a_node() -> None:
    network = nats_network(2, 1, 10)
    strengths = {
        f"cell.{n}": {op: 0.9 if op == "none" else 0.02 + 0.01 * i for i, op in enumerate(NATS_OPERATIONS)}
        for n in range(6)
    }
    chosen = strongest(decisions_of(network, strengths))
    assert chosen["cell.0"] == "avg_pool_3x3"  # the only edge of node 1
    into_3 = [chosen[f"cell.{n}"] for n in (3, 4, 5)]
    assert sorted(into_3) == ["avg_pool_3x3", "none", "none"]


@pytest.mark.parametrize("method", ["darts1", "bayesnas"])
def test_a_searched_network_has_a_genotype(method: str) -> None:
    recipe: dict[str, Any] = {
        "target": {"operations": True},
        "search": {"method": method, "epochs": "2 steps", "lr": 0.025},
        "timing": {"repeats": 3},
    }
    torch.manual_seed(0)
    pruned = compress.prune(nats_network(2, 1, 4), recipe, train=images(), quiet=True)
    assert pruned.genotype is not None
    names = [name for node in pruned.genotype.normal.nodes for name, _ in node]
    assert [pruned.plan.choices[f"blocks.0.edges.{n}"] for n in range(6)] == names


def test_bad_sizes_and_genotypes_are_refused() -> None:
    with pytest.raises(ValueError, match="cells_per_stage: expected a positive integer; got -1"):
        nats_network(4, -1)
    with pytest.raises(ValueError, match="genotype: expected one of the space nats; got darts"):
        nats_network(4, 1, 10, DARTS_V2)
    with pytest.raises(
        TypeError, match=r"expected a compress.cells.Genotype; got dict. Read one with Genotype.from_json"
    ):
        nats_network(4, 1, 10, DARTS_V2.to_dict())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"finetune.depth: a network of NATS cells"):
        nats_network(4, 1).describe(next(nats_genotypes()).to_dict(), depth=3)
