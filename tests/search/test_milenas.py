"""MiLeNAS: a mix of both losses for the scores; it shares the spurious equilibrium of first-order DARTS."""

from __future__ import annotations

import pytest

from compress.search.milenas import Milenas
from helpers.closed_form_example import on_example


@pytest.mark.parametrize("weight", [0.5, 2.0])
def test_milenas_goes_to_the_spurious_equilibrium(weight: float) -> None:
    search = on_example(Milenas, start=(1.9, 1.8), lr=0.05, steps=2000, **{"lambda": weight})
    assert float(search.job.model.w.detach()) == pytest.approx(2, abs=1e-3)
    assert float(search.alpha[0].detach()) == pytest.approx(2, abs=1e-3)
