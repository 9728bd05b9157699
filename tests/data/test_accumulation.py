"""Several batches, or pairs of batches, are read for one step."""

from __future__ import annotations

import pytest

from compress.data.accumulation import accumulate_batches
from compress.data.micro_batches import AccumulatedBatch
from compress.data.split_halves import PairedLoader


def test_batches_are_grouped_in_order_and_the_last_group_may_be_short() -> None:
    loader = [1, 2, 3, 4, 5]
    assert accumulate_batches(loader, 1, pairs=False) is loader
    grouped = accumulate_batches(loader, 2, pairs=False)
    expected = [AccumulatedBatch([1, 2]), AccumulatedBatch([3, 4]), AccumulatedBatch([5])]
    assert len(grouped) == 3  # type: ignore[arg-type]
    assert [*grouped] == [*grouped] == expected
    assert [*accumulate_batches(iter(loader), 2, pairs=False)] == expected


def test_pairs_are_grouped_side_by_side() -> None:
    pairs = accumulate_batches(PairedLoader([1, 2, 3], [10, 20, 30]), 2, pairs=True)
    assert [*pairs] == [
        (AccumulatedBatch([1, 2]), AccumulatedBatch([10, 20])),
        (AccumulatedBatch([3]), AccumulatedBatch([30])),
    ]


def test_a_stream_without_length_has_none_when_grouped() -> None:
    class Stream:
        def __iter__(self) -> object:
            return iter(range(4))

    with pytest.raises(TypeError, match="no length"):
        len(accumulate_batches(Stream(), 2, pairs=False))  # type: ignore[arg-type]
