"""Working directories: each belongs to one run, which is identified by its recipe, model and data in run.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from compress.recipe import Recipe
from compress.storage import LOCK_FILE, hash_tensors, is_temporary_file, read_json, state_tensors, write_atomic
from compress.training import Task

IDENTITY_FILE = "run.json"


@dataclass(frozen=True)
class DataSizes:
    """Number of batches (None if unknown) and of the processes that share them; a run may go on with others."""

    train: int | None
    val: int | None
    processes: int


@dataclass(frozen=True)
class RunIdentity:
    """Everything that determines the result of a run."""

    recipe: dict[str, Any]  # without the settings that do not change the network
    model: dict[str, str]  # tensor -> type, shape and hash
    data: DataSizes | None = None  # not known before the data is checked
    teacher: dict[str, str] | None = None  # like `model`; None if the model is its own teacher
    task: dict[str, Any] | None = None  # type and settings; not known before the data is checked

    @classmethod
    def of(cls, model: nn.Module, recipe: Recipe, teacher: nn.Module | None = None) -> RunIdentity:
        """Return the identity of a run, without its data."""
        excluded: dict[str, Any] = {"engine": {"track"}, "export": True}
        if not recipe.budget.is_measured and not recipe.search.measures_latency:
            excluded["timing"] = True
        if recipe.is_automatic:
            excluded["search"] = True  # follows from the data
        return cls(
            recipe.model_dump(mode="json", exclude_none=True, exclude=excluded),
            model_fingerprint(model),
            teacher=None if teacher is None else model_fingerprint(teacher),
        )

    def with_data(self, data: DataSizes, task: Task) -> RunIdentity:
        """Return the identity with the sizes of the data, and the settings of the task."""
        return replace(self, data=data, task={"type": task.type_name} | task.describe())

    def to_dict(self) -> dict[str, Any]:
        """Return the content of run.json."""
        identity: dict[str, Any] = {"recipe": self.recipe, "model": self.model}
        if self.teacher is not None:
            identity["teacher"] = self.teacher
        if self.task is not None:
            identity["task"] = self.task
        return identity if self.data is None else identity | {"data": asdict(self.data)}

    def digest(self) -> str:
        """Return a hash that ties checkpoints to this run."""
        return hash_tensors({}, json.dumps(self.to_dict(), sort_keys=True))

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """Return the differences from the content of a run.json, one line each; parts that only one has are ignored."""
        current = self.to_dict()
        shared = [key for key in saved if key in current]
        if "data" in shared:
            current["data"] = _without_process_count(saved["data"], current["data"])
        lines = [line for key in shared for line in _differences(saved[key], current[key], key)]
        if ("teacher" in saved) != ("teacher" in current):
            was, is_now = ("another model" if "teacher" in side else "the model itself" for side in (saved, current))
            lines.append(f"teacher: was {was}, is {is_now}")
        return lines


def check_workdir(folder: Path, identity: RunIdentity, resume: bool) -> None:
    """Check that a run may use a working directory: a new one, or its own if it is resumed.

    Raises:
        FileExistsError: the directory is not empty and not resumed, or belongs to another run.
        ValueError: its run.json cannot be read.
    """
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder}: expected a directory; got a file")
    files = _own_files(folder) if folder.exists() else []
    if files in ([], [IDENTITY_FILE]):  # new, or of a run that stopped before it had anything to save
        return
    if IDENTITY_FILE not in files:
        problem = "nothing to resume" if resume else "expected an empty or missing directory"
        raise FileExistsError(f"{folder}: {problem}; it holds other files ({files[0]}): choose another")
    try:
        saved = read_json(folder / IDENTITY_FILE)
        differences = identity.differences(saved)
        if not {"recipe", "model"} <= saved.keys():
            raise TypeError("recipe and model are missing")
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / IDENTITY_FILE}: damaged ({error}); start again in another workdir") from error
    if differences:
        raise FileExistsError(
            f"{folder}: choose another workdir; this one belongs to another run:\n  " + "\n  ".join(differences)
        )
    if not resume:
        raise FileExistsError(
            f"{folder}: expected an empty or missing directory; it holds a run: continue it with resume=True "
            "(--resume), or choose another"
        )


def identify_run(
    folder: Path, model: nn.Module, recipe: Recipe, teacher: nn.Module | None, resume: bool
) -> RunIdentity:
    """Return the identity of a run, without its data, for which a working directory was checked.

    Raises:
        FileExistsError: the directory is not empty and not resumed, or belongs to another run.
        ValueError: its run.json cannot be read.
    """
    identity = RunIdentity.of(model, recipe, teacher)
    check_workdir(folder, identity, resume)
    return identity


def claim_workdir(folder: Path, identity: RunIdentity, resume: bool) -> str:
    """Check a working directory against the complete identity, write run.json and return the identity's hash.

    Raises:
        FileExistsError: the directory belongs to another run.
        ValueError: its run.json cannot be read.
    """
    check_workdir(folder, identity, resume)
    saved = _saved_data(folder)
    if saved is not None:  # the run goes on, perhaps with another number of processes
        identity = replace(identity, data=DataSizes(**saved))
    write_atomic(folder / IDENTITY_FILE, json.dumps(identity.to_dict(), indent=1).encode())
    return identity.digest()


def processes_of_run(folder: Path) -> int | None:
    """Return the number of processes that the run in a checked directory was started with; None if there is none."""
    saved = _saved_data(folder)
    return None if saved is None else int(saved["processes"])


def export_differences(saved_export: Any, recipe: Recipe) -> list[str]:
    """Return how the recipe's export differs from that of a finished run; nothing if the recipe has none."""
    export = recipe.model_dump(mode="json", exclude_none=True).get("export")
    return list(_differences(saved_export, export, "export")) if export is not None else []


def model_fingerprint(model: nn.Module) -> dict[str, str]:
    """Return type, shape and a hash of the values of every tensor."""
    return {
        name: f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)} {hash_tensors({'': t})[:16]}"
        for name, t in state_tensors(model).items()
    }


def _own_files(folder: Path) -> list[str]:
    """Return the names of the files other than the lock and unfinished writes, sorted."""
    return sorted(p.name for p in folder.iterdir() if p.name != LOCK_FILE and not is_temporary_file(p))


def _saved_data(folder: Path) -> dict[str, Any] | None:
    """Return the sizes in the run.json of a checked directory; None if nothing was saved in it yet."""
    if _own_files(folder) in ([], [IDENTITY_FILE]):
        return None
    data: dict[str, Any] | None = read_json(folder / IDENTITY_FILE).get("data")
    return data


def _without_process_count(saved: Any, current: dict[str, Any]) -> dict[str, Any]:
    """Return sizes that equal the saved ones if nothing but the number of processes changed.

    Loaders that shard the data themselves round up, so that their batches differ by less than one for each process.

    Raises:
        TypeError: the saved sizes are not those of a run.
    """
    if not isinstance(saved, dict) or saved.keys() != current.keys():
        raise TypeError(f"data: expected {', '.join(current)}")
    processes, sizes = (saved["processes"], current["processes"]), (saved["train"], current["train"])
    if type(processes[0]) is not int or processes[0] < 1:
        raise TypeError(f"data.processes: expected 1 or more; got {processes[0]!r}")
    same = {**current, "processes": saved["processes"]}
    known = all(type(size) is int for size in sizes)
    if processes[0] != processes[1] and known and abs(sizes[0] - sizes[1]) < max(processes):
        same["train"] = saved["train"]
    return same


def _differences(old: Any, new: Any, path: str) -> Iterator[str]:
    if path in ("model", "teacher"):
        yield from _model_differences(old, new, path)
    elif isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new:
        yield f"{path.removeprefix('recipe.')}: was {old!r}, is {new!r}"


def _model_differences(old: Any, new: dict[str, str], role: str) -> Iterator[str]:
    """Yield tensors that were removed, added or reshaped; if there are none, those with other values."""
    if not isinstance(old, dict) or not all(isinstance(fingerprint, str) for fingerprint in old.values()):
        yield f"the {role} has other weights, or is another"
        return
    old_shapes, new_shapes = ({name: f.rpartition(" ")[0] for name, f in side.items()} for side in (old, new))
    removed, added = [name for name in old if name not in new], [name for name in new if name not in old]
    reshaped = [name for name in old if name in new and new_shapes[name] != old_shapes[name]]
    if removed:
        yield f"the {role}: no longer has {removed[0]}, {old_shapes[removed[0]]}{_and_more(removed)}"
    if added:
        yield f"the {role}: now has {added[0]}, {new_shapes[added[0]]}{_and_more(added)}"
    if reshaped:
        first = reshaped[0]
        yield f"the {role}: {first} was {old_shapes[first]}, is {new_shapes[first]}{_and_more(reshaped)}"
    changed = [name for name in old if new.get(name) != old[name]]
    if changed and not (removed or added or reshaped):
        yield f"the {role}: has the same shapes but other values, first in {changed[0]}{_and_more(changed)}"


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
