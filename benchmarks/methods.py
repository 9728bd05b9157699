"""Methods side by side, some seeds each: the options, the rows that are still to be measured, the mean over seeds."""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from statistics import mean, stdev
from typing import Any

from . import data

Row = dict[str, Any]
Job = tuple[str, int, argparse.Namespace]  # method, seed, options


def options_of(description: str | None, workers: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    data.add_option(parser)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=workers)
    parser.add_argument("--only", default="", help="methods whose name has this in it")
    parser.add_argument("--validate", action="store_true", help="measure on training images, to choose settings")
    return parser


def rows_of(
    one: Callable[[Job], Row], methods: Iterable[str], options: argparse.Namespace, known: list[Row]
) -> Iterator[Row]:
    """What is not yet known, as it comes."""
    done = {(row["method"], row["seed"]) for row in known}
    names = [name for name in methods if options.only in name]
    jobs = [(name, seed, options) for seed, name in product(range(options.seeds), names) if (name, seed) not in done]
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        yield from pool.imap_unordered(one, jobs)


def percents(values: list[float]) -> str:
    """The mean and, of several, the standard deviation."""
    spread = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * mean(values):.1f}{spread}"


def spent(rows: list[Row]) -> str:
    """Seconds of search and fine-tuning, on average."""
    return f"{mean(row['seconds'].get('search', 0) + row['seconds'].get('finetune', 0) for row in rows):.0f}"
