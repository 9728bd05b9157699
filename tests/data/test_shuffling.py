"""Loaders in order are shuffled; all others stay as they are."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from compress.data import reproducible_reading, seed_loader, shuffled_loader

DATA = TensorDataset(torch.arange(100))


def test_first_batch_is_a_random_part_of_all_data_the_same_each_time() -> None:
    loader = shuffled_loader(DataLoader(DATA, 10, drop_last=True, collate_fn=lambda rows: [int(r[0]) for r in rows]))
    batches = []
    for _ in range(2):
        with reproducible_reading(loader):
            seed_loader(loader, 7, 0)
            batches.append([*loader])
    assert batches[0] == batches[1]
    assert max(batches[0][0]) > 50  # not the first ten
    assert sorted(i for batch in batches[0] for i in batch) == [*range(100)]


def test_loader_with_an_order_of_its_own_stays() -> None:
    for loader in (
        DataLoader(DATA, 10, shuffle=True),
        DataLoader(DATA, 10, sampler=RandomSampler(DATA)),
        DataLoader(DATA, batch_size=None),
        [torch.zeros(3)],
    ):
        assert shuffled_loader(loader) is loader
