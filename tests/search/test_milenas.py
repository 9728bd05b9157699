"""MiLeNAS: a mix of both losses for the scores; it shares the spurious equilibrium of first-order DARTS."""

from __future__ import annotations

import pytest

from benchmarks.solvable_model import start_search, trajectory
from compress.search.milenas import Milenas


@pytest.mark.parametrize("weight", [0.5, 2.0])
def test_milenas_goes_to_the_spurious_equilibrium(weight: float) -> None:
    search = start_search(Milenas, start=(1.9, 1.8), lr=0.05, **{"lambda": weight})
    assert trajectory(search, 2000)[-1] == pytest.approx([2, 2], abs=1e-3)
