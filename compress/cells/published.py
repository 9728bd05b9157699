"""Published cells, for checks and comparisons.

DARTS_V1, DARTS_V2: Liu et al. 2019, first and second order. ENAS: Pham et al. 2018. NASNET_A: Zoph et al. 2018.
AMOEBANET_A: Real et al. 2019. Their connections are those of Shu et al. 2020, figure 1.
"""

from __future__ import annotations

from .genotype import Cell, Genotype

SHORT_NAMES = {
    "sep3": "sep_conv_3x3",
    "sep5": "sep_conv_5x5",
    "sep7": "sep_conv_7x7",
    "dil3": "dil_conv_3x3",
    "max": "max_pool_3x3",
    "avg": "avg_pool_3x3",
    "skip": "skip_connect",
    "7x1": "conv_7x1_1x7",
}


def _cell(text: str, *output: int) -> Cell:
    """Read a cell as `sep3 0 sep3 1, ...`: operation and source of both edges of each node."""
    nodes = []
    for node in text.split(","):
        words = node.split()
        nodes.append(tuple((SHORT_NAMES[words[i]], int(words[i + 1])) for i in range(0, len(words), 2)))
    return Cell(tuple(nodes), output)


def _genotype(normal: Cell, reduction: Cell) -> Genotype:
    return Genotype("darts", {"normal": normal, "reduction": reduction})


DARTS_V1 = _genotype(
    _cell("sep3 1 sep3 0, skip 0 sep3 1, skip 0 sep3 1, sep3 0 skip 2", 2, 3, 4, 5),
    _cell("max 0 max 1, skip 2 max 0, max 0 skip 2, skip 2 avg 0", 2, 3, 4, 5),
)
DARTS_V2 = _genotype(
    _cell("sep3 0 sep3 1, sep3 0 sep3 1, sep3 1 skip 0, skip 0 dil3 2", 2, 3, 4, 5),
    _cell("max 0 max 1, skip 2 max 1, max 0 skip 2, skip 2 max 1", 2, 3, 4, 5),
)
ENAS = _genotype(
    _cell("sep3 1 skip 1, sep5 1 skip 0, avg 0 sep3 1, sep3 0 avg 1, sep5 1 avg 0", 2, 3, 4, 5, 6),
    _cell("sep5 0 avg 1, sep3 1 avg 1, avg 1 sep3 1, sep5 4 avg 1, sep3 5 sep5 0", 2, 3, 6),
)
NASNET_A = _genotype(
    _cell("sep5 1 sep3 0, sep5 0 sep3 0, avg 1 skip 0, avg 0 avg 0, sep3 1 skip 1", 2, 3, 4, 5, 6),
    _cell("sep5 1 sep7 0, max 1 sep7 0, avg 1 sep5 0, skip 3 avg 2, sep3 2 max 1", 4, 5, 6),
)
AMOEBANET_A = _genotype(
    _cell("avg 0 max 1, sep3 0 sep5 2, sep3 0 avg 3, sep3 1 skip 1, skip 0 avg 1", 4, 5, 6),
    _cell("avg 0 sep3 1, max 0 sep7 2, sep7 0 avg 1, max 0 max 1, 7x1 0 sep3 5", 3, 4, 6),
)
