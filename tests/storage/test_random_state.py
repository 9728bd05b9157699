"""The random state of the caller is restored."""

from __future__ import annotations

import torch

from compress.storage.random_state import get_random_state, isolated_random_state


def test_random_numbers_of_the_caller_are_put_back() -> None:
    import random

    import numpy as np

    before = get_random_state()
    with isolated_random_state(3):
        first = (random.random(), np.random.rand(), float(torch.rand(())))
    assert get_random_state() == before
    with isolated_random_state(3):
        assert first == (random.random(), np.random.rand(), float(torch.rand(())))
