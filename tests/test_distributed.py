"""The collective operations: of one process, and of two on gloo."""

from __future__ import annotations

from pathlib import Path

import torch

from compress.distributed import all_reduce_mean, broadcast_object, rank
from helpers.two_processes import collectives, run_in_two_processes


def test_alone_nothing_is_exchanged() -> None:
    tensors = [torch.ones(2), torch.zeros(3)]
    assert all(a is b for a, b in zip(all_reduce_mean(tensors), tensors, strict=True))
    assert rank() == 0
    assert broadcast_object("mine") == "mine"


def test_means_flags_and_values_are_those_of_all(tmp_path: Path) -> None:
    expected = {
        "means": [[0.5] * 4, [0.5, 1.5], [1.0] * 3],
        "flags": [[False, False, True], [1.0, 0.5, 0.0]],
        "same": True,
        "world": 2,
        "device": "cpu",
        "double": [0.5, 1.5],
        "every": [0, 1],
        "first": 0,
        "failed": "rank 0 could not",
        "sums": [1.0, 1.0],
    }
    assert run_in_two_processes(collectives, tmp_path) == [expected, expected]
