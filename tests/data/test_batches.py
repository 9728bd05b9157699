"""Loaders of every kind are read for as many steps as are due."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import compress
from compress.data.batches import BatchPosition, derive_seed, iterate_batches, resume_limits
from compress.data.split_halves import split_into_halves
from compress.errors import BatchError
from compress.storage import RandomState, get_random_state, isolated_random_state
from helpers.digit_batches import EndlessDataset, digit_batches
from helpers.digits import FOUR_STEPS, dense


@pytest.mark.parametrize("length", ["2 epochs", 0.5])
def test_epochs_of_a_stream_without_length_are_counted(length: Any) -> None:
    loader = DataLoader(EndlessDataset(digit_batches()), batch_size=None)
    recipe = {**FOUR_STEPS, "search": {"method": "netslim", "epochs": length}, "finetune": None}
    pruned = compress.prune(dense(), recipe, train=loader, quiet=True)
    assert pruned.report.history[-1]["step"] == (8 if length == "2 epochs" else 2)


def test_generator_is_read_as_far_as_the_steps_go() -> None:
    pairs = digit_batches() * 3
    pruned = compress.prune(dense(), FOUR_STEPS, train=iter(pairs), quiet=True)
    assert [r["step"] for r in pruned.report.history][-1] == 4
    with pytest.raises(
        BatchError, match=r"finetune: expected 1 more batches; the iterator ended.* Give a loader that starts again"
    ):
        compress.prune(dense(), FOUR_STEPS, train=iter(pairs[:7]), quiet=True)
    with pytest.raises(
        BatchError, match=r'read only once and has no length; give a DataLoader, or a length such as "500 steps"'
    ):
        compress.prune(dense(), {**FOUR_STEPS, "finetune": {"epochs": 1}}, train=iter(pairs), quiet=True)


def test_a_resumed_reader_continues_with_the_same_batches_and_random_numbers() -> None:
    def read(count: int, *resume: Any) -> list[tuple[BatchPosition, list[int], float, list[RandomState]]]:
        loader = DataLoader(torch.arange(10), batch_size=3, shuffle=True)
        seen = []
        for position, batch in iterate_batches(loader, 7, "stage", count, *resume):
            draw = float(torch.rand(()))
            seen.append((position, batch.tolist(), draw, [get_random_state()]))
        return seen

    with isolated_random_state():
        through = read(11)
        assert [(p.epoch, p.batches_read) for p, *_ in through] == [(i // 4, i % 4 + 1) for i in range(11)]
        for epoch in range(2):
            assert sorted(i for p, b, *_ in through if p.epoch == epoch for i in b) == list(range(10))
        assert through[0][1] != through[4][1], "every epoch has its own order"
        for stop in (1, 4, 6):
            position, _, _, states = through[stop - 1]
            assert [entry[:3] for entry in read(11 - stop, position, states)] == [entry[:3] for entry in through[stop:]]


def test_seeds_of_purposes_differ_and_are_fixed() -> None:
    seeds = {derive_seed(s, name, epoch) for s in range(3) for name in ("search", "finetune") for epoch in range(3)}
    assert len(seeds) == 18 and derive_seed(0, "search", 0) == derive_seed(0, "search", 0)


class Drawing(torch.utils.data.Dataset[Any]):
    """Draws a random number for each sample, in the worker."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> float:
        return float(torch.rand((), dtype=torch.float64))


class Wrapper:
    """A loader around a loader, as libraries have them."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


@pytest.mark.parametrize("wrap", [lambda loader: loader, Wrapper, lambda loader: split_into_halves(Wrapper(loader), 0)])
def test_a_reader_of_persistent_workers_continues_with_the_same_draws(wrap: Any) -> None:
    loader = DataLoader(Drawing(), 1, num_workers=1, persistent_workers=True)
    warm = [float(batch) for batch in loader]  # the user's own epoch, whose workers live on

    def read(count: int, *resume: Any) -> list[tuple[BatchPosition, Any]]:
        return list(iterate_batches(wrap(loader), 7, "stage", count, *resume))

    with isolated_random_state():
        through = read(6)
        states = [get_random_state()]
        assert read(6) == through
        assert read(3, through[2][0], states) == through[3:]
    assert len({str(batch) for _, batch in through}) == 6, "every epoch has its own draws"
    assert loader.persistent_workers
    assert [float(batch) for batch in loader] != warm


def test_workers_that_cannot_be_seeded_are_named() -> None:
    from timm.data.loader import MultiEpochsDataLoader

    assert resume_limits(DataLoader(Drawing(), 1, num_workers=1, persistent_workers=True), "train") == []
    assert resume_limits([1, 2], "train") == resume_limits(None, "train") == []
    loader: Any = MultiEpochsDataLoader(Drawing(), 1, num_workers=1)
    next(iter(loader))  # starts the workers, as the checks before a run do
    (limit,) = resume_limits(loader, "train")
    assert limit.startswith("train: the workers of MultiEpochsDataLoader live on from epoch to epoch")
