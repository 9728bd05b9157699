"""The two halves of the data share no sample, for every kind of loader."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import compress
from compress.data.split_halves import split_into_halves


def test_halves_share_no_sample_and_keep_the_loaders_settings() -> None:
    data = TensorDataset(torch.arange(101))
    loader = DataLoader(
        data, 8, shuffle=True, drop_last=True, collate_fn=lambda items: torch.stack([i[0] for i in items])
    )
    both: Any = split_into_halves(loader, seed=3)
    seen = [torch.cat([pair[side] for pair in both]).tolist() for side in (0, 1)]
    assert not set(seen[0]) & set(seen[1])
    assert len(both) == 6
    assert {len(batch) for pair in both for batch in pair} == {8}
    assert seen[0] != sorted(seen[0])
    again = [i for a, _ in split_into_halves(loader, seed=3) for i in a.tolist()]
    assert not set(again) & set(seen[1]), "the same seed splits alike"


def test_streams_give_their_batches_in_turn() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(7))

    assert list(split_into_halves([1, 2, 3, 4, 5], 0)) == [(1, 2), (3, 4)]
    assert [(int(a), int(b)) for a, b in split_into_halves(DataLoader(Stream(), None), 0)] == [(0, 1), (2, 3), (4, 5)]
    assert list(split_into_halves(iter([1, 2, 3]), 0)) == [(1, 2)]


@pytest.mark.parametrize(
    ("loader", "match"),
    [
        ([1], "expected at least two batches to split into halves; the loader gives 1"),
        (
            DataLoader(TensorDataset(torch.arange(1))),
            "expected at least 2 samples to split into halves; the dataset has 1",
        ),
        (DataLoader(TensorDataset(torch.arange(9)), 8, drop_last=True), "expected at least 16 samples"),
    ],
)
def test_data_too_small_to_split_are_refused(loader: Any, match: str) -> None:
    with pytest.raises(compress.BatchError, match=match):
        split_into_halves(loader, 0)
