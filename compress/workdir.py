"""A working directory belongs to one run: one recipe, one model, data of one length."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from .checkpoint import Store, tensors_of
from .digest import digest
from .files import write_whole
from .lock import LOCK
from .recipe import Recipe
from .validate import read

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
        said = recipe.model_dump(mode="json", exclude_none=True, exclude=_after(recipe))
        identity = {"recipe": said, "model": fingerprint(model)}
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder}: expected a directory, found a file")
    for left in folder.glob(f".{Store(folder).path.name}.*") if folder.exists() else ():
        left.unlink()  # of a checkpoint that was being written
    held = sorted(p.name for p in folder.iterdir() if p.name != LOCK) if folder.exists() else []
    if held in ([], [IDENTITY]):  # a run that stopped before it had anything to keep
        return identity
    if IDENTITY not in held:
        what = "expected an empty or missing directory" if not resume else "nothing to resume"
        raise FileExistsError(f"{folder}: {what}; it holds other files ({held[0]}): choose another")
    try:
        before = read(folder / IDENTITY)
        pairs = [(key, before[key], identity[key]) for key in before if key in identity]
        if not {"recipe", "model"} <= before.keys():
            raise TypeError("recipe and model are missing")
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / IDENTITY}: damaged ({error}); start anew in another workdir") from error
    differences = [line for key, old, new in pairs for line in _differences(old, new, key)]
    if differences:
        what = "choose another workdir; this one belongs to another run"
        raise FileExistsError(f"{folder}: {what}:\n  " + "\n  ".join(differences))
    if not resume:
        raise FileExistsError(
            f"{folder}: expected an empty or missing directory; it holds a run: go on with resume=True (--resume), or "
            "choose another"
        )
    return identity


def _after(recipe: Recipe) -> dict[str, Any]:
    """What does not change the network: a run may go on with another."""
    timed = "latency" in (recipe.budget.unit, getattr(recipe.search, "penalty", None))
    return {"engine": {"track"}, "export": True} | ({} if timed else {"timing": True})


def other_export(before: Any, recipe: Recipe) -> list[str]:
    """What a finished run's export had that the recipe has otherwise."""
    now = recipe.model_dump(mode="json", exclude_none=True).get("export")
    return list(_differences(before, now, "export")) if now is not None else []


def own_workdir(folder: Path, model: nn.Module, recipe: Recipe, resume: bool, identity: dict[str, Any]) -> str:
    """Check once more, now that all is known about the run, and write down whose directory it is; returns its hash."""
    check_workdir(folder, model, recipe, resume, identity)
    write_whole(folder / IDENTITY, json.dumps(identity, indent=1).encode())
    return digest({}, json.dumps(identity, sort_keys=True))


def fingerprint(model: nn.Module) -> dict[str, str]:
    """Every tensor's type and shape, and a hash of its numbers."""
    return {
        name: f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)} {digest({'': t})[:16]}"
        for name, t in tensors_of(model).items()
    }


def _differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    if path == "model":
        yield from _other_model(old, new)
    elif isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new:
        yield f"{path.removeprefix('recipe.')}: was {old!r}, is {new!r}"


def _other_model(old: Any, new: dict[str, str]) -> Iterator[str]:
    """Which tensors are gone, new, or of another shape; if none are, which have other numbers."""
    if not isinstance(old, dict) or not all(isinstance(facts, str) for facts in old.values()):
        yield "the model has other weights, or is another"
        return
    shape = {name: facts.rpartition(" ")[0] for name, facts in old.items()}
    gone, more = [name for name in old if name not in new], [name for name in new if name not in old]
    other = [name for name in old if name in new and new[name].rpartition(" ")[0] != shape[name]]
    if gone:
        yield f"the model: had {gone[0]}, {shape[gone[0]]}{_and_more(gone)}, and has not"
    if more:
        yield f"the model: has {more[0]}, {new[more[0]].rpartition(' ')[0]}{_and_more(more)}, and had not"
    if other:
        now = new[other[0]].rpartition(" ")[0]
        yield f"the model: {other[0]} was {shape[other[0]]}, is {now}{_and_more(other)}"
    numbers = [name for name in old if new.get(name) != old[name]]
    if numbers and not (gone or more or other):
        yield f"the model: has the same shapes and other numbers, first in {numbers[0]}{_and_more(numbers)}"


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
