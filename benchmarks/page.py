"""Write docs/results.md from the JSON files in results/ and the remarks in remarks/.

    python -m benchmarks.page [--check]

The `tables` function of each benchmark builds its tables from the JSON of its last full run; they are also written to
results/NAME.md. `--check` only reports whether the page is up to date.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any, Protocol, cast

from . import results

NAMES = [
    *("accuracy", "vs_scratch", "cifar", "transformer", "ranking", "compensate"),
    *("repair", "repair_steps", "coverage", "sweep"),
    *(
        "surgery",
        "scale",
        "search_cost",
        "score_costs",
        "cells",
        "engine",
        "communication",
        "kill",
        "default",
        "deploy",
        "detectors",
        "detector_pruning",
        "yolo",
        "lenet",
    ),
    *("preresnet", "learned_ratio"),
]
PAGE, REMARKS = results.ROOT / "docs" / "results.md", results.FOLDER.parent / "remarks"
INTRO = """# Results

Each section belongs to a script in `benchmarks/` and shows what it measures, the command, the environment and the
tables. The results are in `benchmarks/results/`, as JSON and as Markdown tables. `python -m benchmarks.page` generates
this page from the JSON files, and a test checks that it is up to date. `make bench` runs short versions of all
benchmarks, which only show that they work.

"""
MAX_OPEN_ROWS = 25  # longer tables are collapsed


class Benchmark(Protocol):
    """Interface of the benchmark modules in `NAMES`."""

    __doc__: str | None

    def tables(self, content: dict[str, Any]) -> list[results.ResultTable]:
        """Build the tables from the content of results/NAME.json."""


def import_benchmark(name: str) -> Benchmark:
    """Import the module of a benchmark."""
    return cast(Benchmark, importlib.import_module(f"benchmarks.{name}"))


def render_section(name: str) -> str:
    """Return the section of a benchmark, or an empty string if it has no results."""
    content = results.load(name)
    if not content:
        return ""
    benchmark = import_benchmark(name)
    headline, _, rest = (benchmark.__doc__ or "").strip().partition("\n")
    command = next(line.strip() for line in rest.splitlines() if line.strip().startswith("python -m")).split(" [")[0]
    parts = [f"## {name}", headline, f"`{command}`", describe_measurement(content["environment"])]
    remarks = REMARKS / f"{name}.md"
    parts += [remarks.read_text(encoding="utf-8").strip()] if remarks.exists() else []
    parts += [render_table(table) for table in benchmark.tables(content)]
    if (results.FOLDER / f"{name}.png").exists():
        parts.append(f"![{headline}](../benchmarks/results/{name}.png)")
    return "\n\n".join(part.strip() for part in parts) + "\n"


def render_table(table: results.ResultTable) -> str:
    """Return the table as Markdown; a long table is collapsed."""
    if len(table.rows) <= MAX_OPEN_ROWS:
        return table.markdown()
    rows = results.ResultTable(table.columns, table.rows).markdown()
    title = f"{table.title}\n\n" if table.title else ""
    return f"{title}<details><summary>All {len(table.rows)} rows</summary>\n\n{rows}\n</details>"


def describe_measurement(environment: dict[str, Any]) -> str:
    """Describe when and on which machine a benchmark was run; older results lack some of the fields."""
    when = "on an unrecorded date"
    if "committed" in environment:
        when = f"on an unrecorded date, committed on {environment['committed']}"
    elif "date" in environment:
        when = f"on {environment['date']} at revision {environment['revision']}"
    processor = f" ({environment['processor']})" if "processor" in environment else ""
    memory = f", {environment['memory_gb']} GB" if "memory_gb" in environment else ""
    seeds = f"; seeds {', '.join(map(str, environment['seeds']))}" if "seeds" in environment else ""
    load = f"; load average {environment['load'][0]:g} at the end (all processes)" if "load" in environment else ""
    packages = ("python", "torch", "torchvision", "timm", "torch-pruning")
    versions = ", ".join(f"{package} {environment[package]}" for package in packages)
    return f"*Measured {when}: {environment['cores']} cores{processor}{memory}; {versions}{seeds}{load}.*"


def render_page() -> str:
    """Return the content of docs/results.md."""
    return INTRO + "\n".join(filter(None, map(render_section, NAMES)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="report whether the page is up to date; write nothing")
    options = parser.parse_args()
    if options.check:
        stale = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != render_page()
        print(f"{PAGE.relative_to(results.ROOT)}: {'stale; run python -m benchmarks.page' if stale else 'up to date'}")
        return int(stale)
    for name in NAMES:
        if content := results.load(name):
            tables = import_benchmark(name).tables(content)
            results.write(f"{name}.md", "\n".join(table.markdown() for table in tables))
    PAGE.write_text(render_page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(results.ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
