"""Importance is checked before it is used."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cases import groups_of
from compress.budget.choose import choose_widths
from compress.recipe import Budget, Target
from helpers.widths import random_importance


def test_tensors_and_arrays_are_the_same() -> None:
    groups = groups_of("chain")
    importance = random_importance(groups)
    tensors = {name: torch.tensor(value, requires_grad=True) for name, value in importance.items()}
    a, b = (choose_widths(groups, i, Budget(macs=0.5), Target()) for i in (importance, tensors))
    assert all(a[name].tolist() == b[name].tolist() for name in a)


def test_wrong_importance_is_named() -> None:
    groups = groups_of("chain")
    right = random_importance(groups)
    broken = right["1.0"].copy()
    broken[[2, 4]] = np.nan
    with pytest.raises(ValueError, match=r"importance of 1\.0: 2 of 6 are NaN, the first at 2\. Look for NaN"):
        choose_widths(groups, right | {"1.0": broken}, Budget(macs=0.5), Target())
    with pytest.raises(ValueError, match=r"importance of 1\.0: expected 6 numbers, got shape \[5\]"):
        choose_widths(groups, right | {"1.0": broken[:5]}, Budget(macs=0.5), Target())
    with pytest.raises(ValueError, match=r"importance: group 1\.0 is missing"):
        choose_widths(groups, {n: v for n, v in right.items() if n != "1.0"}, Budget(macs=0.5), Target())
