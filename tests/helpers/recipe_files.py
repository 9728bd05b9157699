"""Recipes as files."""

from __future__ import annotations

from pathlib import Path


def write_recipe(folder: Path, text: str) -> Path:
    """Write `recipe.yaml` to a folder and return its path."""
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path
