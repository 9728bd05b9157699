"""Compare methods over several seeds: command line options, parallel trials, statistics over seeds."""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from statistics import mean, stdev
from typing import Any, NamedTuple

from . import data

TrialRow = dict[str, Any]  # the JSON row of a trial, with at least "method" and "seed"


class Trial(NamedTuple):
    """One method with one seed."""

    method: str
    seed: int
    options: argparse.Namespace


@dataclass(frozen=True)
class PruningCost:
    """Training batches read and seconds spent before fine-tuning."""

    batches: int
    search_seconds: float
    slice_seconds: float


def make_parser(description: str | None, workers: int) -> argparse.ArgumentParser:
    """Return a parser with the options that all method comparisons share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    data.add_data_option(parser)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--workers", type=int, default=workers, help="number of parallel processes")
    parser.add_argument("--only", default="", help="run only methods whose name contains this text")
    parser.add_argument("--validate", action="store_true", help="measure on held-out training images")
    return parser


def run_missing_trials(
    run_trial: Callable[[Trial], TrialRow], methods: Iterable[str], options: argparse.Namespace, known: list[TrialRow]
) -> Iterator[TrialRow]:
    """Run the trials that have no row in `known`; yield each new row as soon as it is measured."""
    known_trials = {(row["method"], row["seed"]) for row in known}
    names = [name for name in methods if options.only in name]
    trials = [
        Trial(name, seed, options)
        for seed, name in product(range(options.seeds), names)
        if (name, seed) not in known_trials
    ]
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        yield from pool.imap_unordered(run_trial, trials)


def format_percent(values: list[float]) -> str:
    """Format the mean in percent and, if there are several values, their standard deviation."""
    spread = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * mean(values):.1f}{spread}"


def mean_seconds(rows: list[TrialRow]) -> str:
    """Format the mean seconds of search and fine-tuning."""
    return f"{mean(row['seconds'].get('search', 0) + row['seconds'].get('finetune', 0) for row in rows):.0f}"
