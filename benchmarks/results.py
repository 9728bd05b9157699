"""Where results are kept, and what they were measured with."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path(__file__).resolve().parent / "results"


def console() -> Console:
    """Wide enough for the tables when the output goes to a file."""
    return Console() if Console().is_terminal else Console(width=180)


def environment() -> dict[str, Any]:
    versions = {name: metadata.version(name) for name in ("torch", "torchvision", "timm", "torch-pruning")}
    asked = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "date": date.today().isoformat(),
        "revision": asked.stdout.strip() or "unknown",
        **versions,
    }


def save(name: str, content: dict[str, Any]) -> Path:
    """Write results/NAME.json."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    path.write_text(
        json.dumps({"environment": environment()} | {k: v for k, v in content.items() if k != "environment"}, indent=1)
        + "\n"
    )
    return path


def markdown(name: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Path:
    """Write results/NAME.md, a table."""
    lines = ["| " + " | ".join(row) + " |" for row in (columns, ["---"] * len(columns), *rows)]
    path = FOLDER / f"{name}.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def load(name: str) -> dict[str, Any]:
    """What results/NAME.json holds, or nothing."""
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}
