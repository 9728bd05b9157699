"""Draw a cell as a graph, in SVG: nodes from left to right, edges as arcs with the names of their operations."""

from __future__ import annotations

from html import escape

from .genotype import Cell

STEP, MARGIN, RADIUS = 120, 44, 15  # between nodes, at the sides, of a node
ARC = 0.36  # height of an arc relative to its length
COLORS = {  # of operations, as variables of the report's page
    "skip": "--soft",
    "none": "--grid",
    "max": "--cut",
    "avg": "--cut",
    "dil": "--more",
    "sep": "--kept",
    "nor": "--kept",
    "con": "--last",
}


def draw_cell(cell: Cell, title: str) -> str:
    """Return a cell as an SVG element, in the colors of the report's page; removed edges are left out."""
    edges = [
        (source, node, name)
        for node, into in enumerate(cell.nodes, cell.inputs)
        for name, source in into
        if name != "none"
    ]
    last = cell.inputs + len(cell.nodes)
    joins = [] if cell.inputs == 1 else [(node, last, "") for node in cell.output]
    count = last + bool(joins)
    longest = max((node - source for source, node, _ in [*edges, *joins]), default=1)
    top = ARC * STEP * longest / 2 + 30
    width, height = 2 * MARGIN + STEP * (count - 1), 2 * top
    parts = [
        _arc(source, node, name, top, above=(source + node + number) % 2 == 0, repeated=_count_before(edges, number))
        for number, (source, node, name) in enumerate([*edges, *joins])
    ]
    for node in range(count):
        label = _node_label(node, cell, last)
        x = MARGIN + STEP * node
        parts.append(
            f'<circle cx="{x}" cy="{top:g}" r="{RADIUS}" style="fill:var(--pale);stroke:var(--grid)"/>'
            f'<text x="{x}" y="{top + 4:g}" text-anchor="middle" style="fill:var(--text);font-size:11px">{label}</text>'
        )
    listed = "; ".join(f"{name} from {source} to {node}" for source, node, name in edges)
    return (
        f'<svg viewBox="0 0 {width} {height:g}" width="{width}" role="img" '
        f'aria-label="{escape(f"{title}: {listed}")}">{"".join(parts)}</svg>'
    )


def _node_label(node: int, cell: Cell, last: int) -> str:
    if node < cell.inputs:
        return "in" if cell.inputs == 1 else f"c-{cell.inputs - node}"
    return "out" if node == last or (cell.inputs == 1 and node == last - 1) else str(node)


def _count_before(edges: list[tuple[int, int, str]], number: int) -> int:
    """Return how many edges before this one connect the same nodes."""
    if number >= len(edges):
        return 0
    return sum(edge[:2] == edges[number][:2] for edge in edges[:number])


def _arc(source: int, node: int, name: str, y: float, above: bool, repeated: int) -> str:
    start, end = MARGIN + STEP * source + RADIUS, MARGIN + STEP * node - RADIUS
    sign = (-1 if above else 1) * (-1) ** repeated
    bend = 0.0 if node - source == 1 and not repeated else sign * ARC * (end - start)
    middle = (start + end) / 2
    color = f"var({COLORS.get(name[:3], COLORS.get(name[:4], '--grid'))})"
    dashed = ";stroke-dasharray:4 4" if not name else ""
    text = ""
    if name:
        label_y = y + bend / 2 - 5
        style = f"fill:{color};font-size:10px"
        text = f'<text x="{middle:g}" y="{label_y:g}" text-anchor="middle" style="{style}">{escape(name)}</text>'
    path = f"M{start} {y:g}Q{middle:g} {y + bend:g} {end} {y:g}"
    return f'<path d="{path}" style="fill:none;stroke:{color};stroke-width:1.6{dashed}"/>{text}'
