"""Numbers and values as tables and messages show them."""

from __future__ import annotations

import pytest
import torch

from compress.formatting import (
    describe_value,
    format_count,
    format_metric,
    format_percent,
    format_time,
    printable,
    text_bar,
)


@pytest.mark.parametrize(
    ("fraction", "text"), [(0.5, "50%"), (0.123456, "12.35%"), (1.0, "100%"), (1e-5, "0.001%"), (0, "0%")]
)
def test_percentages_are_rounded_up_to_four_digits(fraction: float, text: str) -> None:
    assert format_percent(fraction) == text
    assert float(text[:-1]) / 100 >= fraction


def test_accuracies_are_in_percent_and_other_metrics_are_not() -> None:
    assert [format_metric("accuracy", 0.91234), format_metric("loss", 0.91234)] == ["91.23 %", "0.9123"]


@pytest.mark.parametrize(
    ("value", "spread", "text"),
    [
        (0.6641, 0.14, "0.66 ± 0.14"),
        (38.4219, 0.612, "38.42 ± 0.61"),
        (1234.5, 123.0, "1234 ± 123"),
        (0.6641, None, "0.6641"),
        (0.6641, float("nan"), "0.6641 ± nan"),
    ],
)
def test_times_have_the_digits_that_their_spread_leaves(value: float, spread: float | None, text: str) -> None:
    assert format_time(value, spread) == text


def test_counts_have_three_digits_and_a_unit() -> None:
    numbers = [12, 999, 1000, 1_234_567, 2.5e9, 4.4e12]
    assert [format_count(n) for n in numbers] == ["12", "999", "1k", "1.23M", "2.5G", "4400G"]


def test_bars_are_as_long_as_the_fraction() -> None:
    assert [text_bar(f, 4).count("█") for f in (0, 0.25, 0.5, 1)] == [0, 1, 2, 4]
    assert {len(text_bar(f)) for f in (0, 0.3, 1)} == {8}


def test_values_are_described_by_type_and_shape() -> None:
    batch = (torch.zeros(2, 3), {"labels": torch.zeros(2), "names": ["a", "b"]}, [])
    assert describe_value(batch) == (
        "a tuple of tensor[2, 3], a dict of 'labels': tensor[2], 'names': a list of str, str, a list of nothing"
    )


def test_control_characters_are_escaped_and_lines_are_kept() -> None:
    assert printable("a\tb\nc") == "a\tb\nc"
    assert printable("\x1b[31m \r \x7f \x9b \u202e \udcff") == r"\x1b[31m \r \x7f \x9b \u202e \udcff"
    assert printable("Überschuss 層 ±") == "Überschuss 層 ±"
