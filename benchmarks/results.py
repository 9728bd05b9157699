"""Where results are kept, and what they were measured with."""

from __future__ import annotations

import json
import os
import platform
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
    return {"python": platform.python_version(), "cores": os.cpu_count(), **versions}


def save(name: str, content: dict[str, Any]) -> Path:
    """Write results/NAME.json."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps({"environment": environment()} | content, indent=1) + "\n")
    return path


def load(name: str) -> dict[str, Any]:
    """What results/NAME.json holds, or nothing."""
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}
