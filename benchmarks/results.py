"""Where results are kept, what they were measured with, and how they are shown: JSON, a table, a page."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path(__file__).resolve().parent / "results"
QUICK = "_quick"  # ends the names of files that a quick run writes, which git ignores


@dataclass
class Sheet:
    """A table: cells are text as Markdown has it."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""

    def markdown(self) -> str:
        lines = [_line(row) for row in (self.columns, ["---"] * len(self.columns), *self.rows)]
        return "\n".join([f"{self.title}\n"] * bool(self.title) + lines) + "\n"

    def __rich__(self) -> Table:
        table = Table(*self.columns, title=self.title or None, title_justify="left")
        for row in self.rows:
            table.add_row(*(cell.replace("**", "") for cell in row))
        return table


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def options_of(description: str | None, data: bool = False) -> argparse.ArgumentParser:
    """A parser with `--quick`, and with `--data` if it is asked for."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about a minute: whether it runs, not what it finds")
    if data:
        from .data import add_option

        add_option(parser)
    return parser


def console() -> Console:
    """Wide enough for the tables when the output goes to a file."""
    return Console() if Console().is_terminal else Console(width=180)


def environment() -> dict[str, Any]:
    """What is measured on."""
    versions = {name: metadata.version(name) for name in ("torch", "torchvision", "timm", "torch-pruning")}
    asked = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "processor": _processor(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load": [round(value, 2) for value in os.getloadavg()],  # of others, too
        "date": date.today().isoformat(),
        "revision": asked.stdout.strip() or "unknown",
        **versions,
    }


def _processor() -> str:
    """The processor's name, as far as the machine tells it."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text(encoding="utf-8").splitlines() if told.exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return " ".join((named or [platform.processor() or platform.machine()])[0].split())


def named(name: str, quick: bool) -> str:
    """The name of the files: a quick run has its own, so that it never overwrites a full one's."""
    return name + QUICK * quick


def save(name: str, content: dict[str, Any]) -> Path:
    """Write results/NAME.json, with what it was measured on."""
    about = environment() | ({"quick": True} if name.endswith(QUICK) else {}) | _seeds(content)
    text = json.dumps({"environment": about} | {k: v for k, v in content.items() if k != "environment"}, indent=1)
    return write(f"{name}.json", text + "\n")


def _seeds(content: dict[str, Any]) -> dict[str, Any]:
    """The seeds that are named in the rows or in the settings."""
    rows = [row for key in ("rows", "cuts") for row in content.get(key, ()) if isinstance(row, dict)]
    found = {row["seed"] for row in rows if "seed" in row}
    found |= {part["seed"] for part in (content, content.get("settings", {})) if "seed" in part}
    return {"seeds": sorted(found)} if found else {}


def write(name: str, text: str) -> Path:
    """At once or not at all."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / name
    part = path.with_name(f".{name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
    return path


def markdown(name: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Path:
    """Write results/NAME.md, a table."""
    return write(f"{name}.md", Sheet(columns, list(rows)).markdown())


def show(name: str, sheets: Sequence[Sheet]) -> None:
    """Print the tables, and write results/NAME.md."""
    for sheet in sheets:
        console().print(sheet)
    write(f"{name}.md", "\n".join(sheet.markdown() for sheet in sheets))


def load(name: str) -> dict[str, Any]:
    """What results/NAME.json holds, or nothing."""
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
