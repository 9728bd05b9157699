"""Atoms: joined positions form classes; marks and reasons are those of the class."""

from __future__ import annotations

import numpy as np
import pytest

from compress.graph.atoms import Atoms, Mark


def components(count: int, edges: list[tuple[int, int]]) -> list[int]:
    """Return the smallest member of each element's connected component, by repeated search."""
    neighbors: dict[int, set[int]] = {i: set() for i in range(count)}
    for a, b in edges:
        neighbors[a].add(b)
        neighbors[b].add(a)
    smallest = []
    for start in range(count):
        reached, border = {start}, [start]
        while border:
            border = [n for i in border for n in neighbors[i] if n not in reached]
            reached.update(border)
        smallest.append(min(reached))
    return smallest


@pytest.mark.parametrize("seed", range(5))
def test_classes_are_connected_components(seed: int) -> None:
    random = np.random.default_rng(seed)
    atoms = Atoms()
    arrays = [atoms.new(int(size)) for size in random.integers(1, 9, 12)]
    edges = []
    for _ in range(10):
        a, b = (arrays[i] for i in random.integers(len(arrays), size=2))
        size = min(len(a), len(b))
        a, b = random.permutation(a)[:size], random.permutation(b)[:size]
        atoms.join(a, b)
        edges += [(int(x), int(y)) for x, y in zip(a, b, strict=True)]
    assert atoms.class_roots().tolist() == components(atoms.count, edges)


def test_marks_and_reasons_hold_for_the_class() -> None:
    atoms = Atoms()
    a, b, c = atoms.new(3), atoms.new(3), atoms.new(2)
    atoms.join(a, b[::-1])
    atoms.mark(b[:1], Mark.READ)
    atoms.freeze(c, "is first")
    atoms.current_module = "head"
    atoms.freeze(c[:1], "is second")
    roots = atoms.class_roots()
    assert np.flatnonzero(atoms.marked_classes(Mark.READ, roots)).tolist() == [2]
    assert np.flatnonzero(atoms.marked_atoms(Mark.READ)).tolist() == [3]
    first, reasons = atoms.freeze_reasons(roots)
    assert [reasons[i] for i in first[c]] == ["is first", "is first"] and reasons[1] == "is second (in head)"
    assert set(first[roots[a]]) == {-1}


def test_a_snapshot_is_not_changed_by_what_follows() -> None:
    atoms = Atoms()
    a = atoms.new(2)
    before = atoms.snapshot()
    atoms.mark(a, Mark.READ)
    atoms.freeze(atoms.new(3), "is new")
    atoms.join(a[:1], a[1:])
    atoms.restore_(before)
    assert atoms.count == 2 and atoms.class_roots().tolist() == [0, 1] and not atoms.marked_atoms(Mark.READ).any()
