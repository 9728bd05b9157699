"""Store benchmark results as JSON with the environment they were measured in, and show them as tables."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path(__file__).resolve().parent / "results"
QUICK_SUFFIX = "_quick"  # of the result files of quick runs, which git ignores


@dataclass
class ResultTable:
    """Table with Markdown text in its cells."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""

    def markdown(self) -> str:
        """Return the title and the table as Markdown."""
        lines = [_line(row) for row in (self.columns, ["---"] * len(self.columns), *self.rows)]
        return "\n".join([f"{self.title}\n"] * bool(self.title) + lines) + "\n"

    def __rich__(self) -> Table:
        table = Table(*self.columns, title=self.title or None, title_justify="left")
        for row in self.rows:
            table.add_row(*(cell.replace("**", "") for cell in row))
        return table


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def make_parser(description: str | None, data: bool = False) -> argparse.ArgumentParser:
    """Return a parser with `--quick` and, if `data`, `--data`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about one minute; checks that the benchmark works")
    if data:
        from .data import add_data_option

        add_data_option(parser)
    return parser


def console() -> Console:
    """Return a console that is wide enough for the tables when the output goes to a file."""
    return Console() if Console().is_terminal else Console(width=180)


def environment() -> dict[str, Any]:
    """Return the machine, its load, the date, the revision and the versions of the libraries."""
    versions = {name: metadata.version(name) for name in ("torch", "torchvision", "timm", "torch-pruning")}
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "processor": _processor(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load": [round(value, 2) for value in os.getloadavg()],  # includes other processes
        "date": date.today().isoformat(),
        "revision": revision.stdout.strip() or "unknown",
        **versions,
    }


def _processor() -> str:
    """Return the name of the processor, or its architecture if the name is unknown."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    model_names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return " ".join((model_names or [platform.processor() or platform.machine()])[0].split())


def result_name(name: str, quick: bool) -> str:
    """Return the name of the result files; quick runs have their own, so they never overwrite full results."""
    return name + QUICK_SUFFIX * quick


def save(name: str, content: dict[str, Any]) -> Path:
    """Write results/NAME.json together with the environment."""
    measured_on = environment() | ({"quick": True} if name.endswith(QUICK_SUFFIX) else {}) | _seeds(content)
    text = json.dumps({"environment": measured_on} | {k: v for k, v in content.items() if k != "environment"}, indent=1)
    return write(f"{name}.json", text + "\n")


def _seeds(content: dict[str, Any]) -> dict[str, Any]:
    """Return the seeds found in the rows or in the settings."""
    rows = [row for key in ("rows", "cuts") for row in content.get(key, ()) if isinstance(row, dict)]
    seeds = {row["seed"] for row in rows if "seed" in row}
    seeds |= {settings["seed"] for settings in (content, content.get("settings", {})) if "seed" in settings}
    return {"seeds": sorted(seeds)} if seeds else {}


def write(name: str, text: str) -> Path:
    """Write a file to results/ atomically."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / name
    temporary = path.with_name(f".{name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
    return path


def publish(name: str, tables: Sequence[ResultTable]) -> None:
    """Print the tables and write them to results/NAME.md."""
    for table in tables:
        console().print(table)
    write(f"{name}.md", "\n".join(table.markdown() for table in tables))


def load(name: str) -> dict[str, Any]:
    """Return the content of results/NAME.json, or an empty dict if there is no such file."""
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
