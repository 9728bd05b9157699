"""State of the random generators of Python, NumPy and PyTorch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

RandomState = dict[str, Any]  # JSON data, by library


def get_random_state() -> RandomState:
    """Return the state of all global generators of this process as JSON data."""
    version, numbers, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().tolist(),
        "cuda": [state.tolist() for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
    }


def set_random_state(state: RandomState) -> None:
    """Set all global generators to a state of `get_random_state`."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if state["cuda"]:
        devices = state["cuda"][: torch.cuda.device_count()]  # the run may continue on a machine with fewer
        torch.cuda.set_rng_state_all([torch.tensor(s, dtype=torch.uint8) for s in devices])


@contextmanager
def isolated_random_state(seed: int | None = None) -> Iterator[None]:
    """Restore all global generators after the block; seed them before it if a seed is given."""
    before = get_random_state()
    try:
        if seed is not None:
            seed_all(seed)
        yield
    finally:
        set_random_state(before)


def seed_all(seed: int) -> None:
    """Seed all global generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
