"""Each process reads its part of a loader."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from compress.data.sharding import shard_loader
from helpers.two_processes import (
    divided_loaders,
    run_in_two_processes,
)


def test_loaders_are_divided_where_they_can_be_and_left_alone_elsewhere(tmp_path: Path) -> None:
    first, second = run_in_two_processes(divided_loaders, tmp_path)
    assert first["parts"][:2] == [[[0, 1], [4, 5], [8, 9]], [[0, 1], [4, 5], [8, 9]]]
    assert second["parts"][:2] == [[[2, 3], [6, 7], [0, 1]], [[2, 3], [6, 7]]]
    assert first["parts"][2] == [[0, 2], [4, 6], [8]]
    assert first["parts"][3:] == [[[0, 1], [4, 5]], list(range(8))]
    assert first["same"] == [True] * 3


def test_one_process_reads_the_loader_itself() -> None:
    loader = DataLoader(TensorDataset(torch.arange(4)), 2)
    assert shard_loader(loader) is loader and shard_loader(None) is None
