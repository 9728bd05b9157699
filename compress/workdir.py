"""A working directory belongs to one run: one recipe, one model, data of one length."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .checkpoint import Store, tensors_of
from .files import write_whole
from .recipe import Recipe

IDENTITY = "run.json"


def check_workdir(
    folder: Path, model: nn.Module, recipe: Recipe, resume: bool, identity: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What a working directory belongs to: one recipe, one model and data of one length.

    Raises:
        FileExistsError: it is not empty and not to be resumed, or belongs to another run.
        ValueError: what it says of its run cannot be read.
    """
    if identity is None:
        said = recipe.model_dump(mode="json", exclude_none=True, exclude={"engine": {"track"}})
        identity = {"recipe": said, "model": fingerprint(model)}
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder}: expected a directory, found a file")
    for left in folder.glob(f".{Store(folder).path.name}.*") if folder.exists() else ():
        left.unlink()  # of a checkpoint that was being written
    held = sorted(p.name for p in folder.iterdir()) if folder.exists() else []
    if held in ([], [IDENTITY]):  # a run that stopped before it had anything to keep
        return identity
    if IDENTITY not in held:
        what = "expected an empty or missing directory" if not resume else "nothing to resume"
        raise FileExistsError(f"{folder}: {what}; it holds other files ({held[0]}): choose another")
    if not resume:
        raise FileExistsError(
            f"{folder}: expected an empty or missing directory; it holds a run: go on with resume=True (--resume), or "
            "choose another"
        )
    try:
        before = json.loads((folder / IDENTITY).read_text())
        pairs = [(key, before[key], identity[key]) for key in before if key in identity]
        if not {"recipe", "model"} <= before.keys():
            raise TypeError("recipe and model are missing")
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / IDENTITY}: damaged ({error}); start anew in another workdir") from error
    differences = [line for key, old, new in pairs for line in _differences(old, new, key)]
    if differences:
        raise FileExistsError(f"{folder}: belongs to another run:\n  " + "\n  ".join(differences))
    return identity


def own_workdir(folder: Path, model: nn.Module, recipe: Recipe, resume: bool, identity: dict[str, Any]) -> None:
    """Check once more, now that all is known about the run, and write down whose directory it is."""
    check_workdir(folder, model, recipe, resume, identity)
    write_whole(folder / IDENTITY, json.dumps(identity, indent=1).encode())


def fingerprint(model: nn.Module) -> str:
    """A hash of every tensor's name, type and numbers."""
    total = hashlib.sha256()
    for name, tensor in tensors_of(model).items():
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        total.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new and path == "model":
        yield "the model has other weights, or is another"
    elif old != new:
        yield f"{path.removeprefix('recipe.')}: was {old!r}, is {new!r}"
