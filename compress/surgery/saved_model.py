"""Save and load a pruned model: plan.json and model.safetensors, with hashes that tie them together."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from compress.errors import NotReady, PlanError
from compress.modules import unwrap_model
from compress.storage import (
    decode_extra_states,
    encode_extra_states,
    extra_state_problems,
    extra_states,
    find_saved,
    hash_tensors,
    is_extra_state,
    set_extra_states_,
    write_atomic,
)

from .branches import is_kept_tensor
from .operations import with_operations
from .plan import Plan
from .plan_validation import check_plan, list_problems
from .slicing import slice_

PLAN_FILE, WEIGHTS_FILE = "plan.json", "model.safetensors"
StoredState = tuple[dict[str, torch.Tensor], dict[str, object]]  # tensors, and extra states of modules


def save_model(model: nn.Module, plan: Plan, directory: Path) -> None:
    """Write the plan, the weights and the extra state of a sliced model; each file is written atomically.

    Raises:
        ValueError: extra state of a module cannot be saved; nothing is written.
    """
    if problems := extra_state_problems(model):
        raise ValueError(list_problems(problems))
    state = _state_to_save(model) | _contiguous(encode_extra_states(extra_states(model)))
    plan.save(directory / PLAN_FILE)
    # The hashes detect damaged files and a plan of another model. One metadata entry, because entries have no order.
    hashes = f"{plan.digest()} {hash_tensors(state)}"
    write_atomic(directory / WEIGHTS_FILE, save(state, {"hashes": hashes}))


def load(model: nn.Module, directory: str | Path) -> nn.Module:
    """Slice a dense model to the saved shape, in place, and load the saved weights. No code is loaded from disk.

    Extra state of modules (`get_extra_state`) is loaded too.

    Args:
        model: the dense model that was pruned, e.g. newly constructed.
        directory: where `Pruned.save` wrote.

    Raises:
        NotReady: `model` is not a model, or a wrapper holds its parameters.
        PlanError: the directory is damaged or was saved from another model; the model is unchanged.
        FileNotFoundError: the directory has no saved model.
    """
    wrapped, model = model, unwrap_model(model)
    if isinstance(wrapped, nn.parallel.DistributedDataParallel):
        raise NotReady("model: DistributedDataParallel keeps references to the dense parameters; load first, then wrap")
    plan, (stored, states) = _read_directory(model, Path(directory))
    slice_(model, plan, uninitialized=stored)
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name in stored:
                tensor.copy_(stored[name])
    set_extra_states_(model, states)
    return wrapped


def _read_directory(model: nn.Module, directory: Path) -> tuple[Plan, StoredState]:
    """Read plan and weights; read them again if a save replaced the directory in between."""
    while True:
        folder = find_saved(directory)
        before = _inode(folder)
        try:
            for name in (PLAN_FILE, WEIGHTS_FILE):
                if not (folder / name).exists():
                    raise FileNotFoundError(f"{folder}: expected a directory written by save(); it has no {name}")
            plan = Plan.load(folder / PLAN_FILE)
            return plan, _read_checked_weights(model, plan, folder / WEIGHTS_FILE)
        except (PlanError, OSError):
            if _inode(find_saved(directory)) == before:
                raise


def _inode(folder: Path) -> tuple[int, int] | None:
    """Return the identity of a directory, which is another after a save; None if there is no directory."""
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _state_to_save(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict as safetensors can store it: contiguous, without shared memory, tied tensors once."""
    state: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    storages: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in seen and not is_extra_state(name):
            value = tensor.detach().contiguous()
            storage = value.untyped_storage().data_ptr()
            state[name] = value.clone() if storage in storages else value  # views of the same memory
            storages.add(storage)
        seen.add(id(tensor))
    return state


def _contiguous(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of tensors that share no memory."""
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}


def _read_checked_weights(model: nn.Module, plan: Plan, path: Path) -> StoredState:
    """Return the stored tensors and extra states if they are undamaged and fit the model as the plan slices it.

    Raises:
        PlanError: the file is damaged, or belongs to another plan or model.
    """
    try:
        model = with_operations(model, plan)
        check_plan(plan, model)
    except PlanError as error:
        raise PlanError(f"{path.with_name(PLAN_FILE)}: {error}") from None
    try:
        with safe_open(path, "pt") as file:
            hashes = (file.metadata() or {}).get("hashes", "").split()
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise PlanError(f"{path}: not a safetensors file, or a damaged one ({error})") from error
    if len(hashes) != 2:
        raise PlanError(f"{path}: expected the hashes of plan and weights that save() writes; got none. Save it again")
    if hashes[1] != hash_tensors(stored):
        raise PlanError(f"{path}: damaged: its weights are not those that were saved. Restore a copy, or prune again")
    if hashes[0] != plan.digest():
        raise PlanError(f"{path}: was saved with another plan than {path.with_name(PLAN_FILE)}")
    try:
        states = decode_extra_states(stored, next((p.device for p in model.parameters()), None))
    except ValueError as error:
        raise PlanError(f"{path}: {error}") from error
    stored = {name: tensor for name, tensor in stored.items() if not is_extra_state(name)}
    dense = _state_to_save(model)
    expected = {
        name: plan.shape_of(name, tensor.shape)
        for name, tensor in dense.items()
        if is_kept_tensor(name, plan.removed_modules)
    }
    expected |= {f"{module}.bias": (size,) for module, size in plan.biases.items()}
    problems = [f"{name}: missing from the file" for name in expected if name not in stored]
    problems += [f"{name}: not in the model" for name in stored if name not in expected]
    with_state = {name for name in extra_states(model) if is_kept_tensor(name, plan.removed_modules)}
    problems += [f"{name}: missing from the file" for name in sorted(with_state - set(states))]
    problems += [f"{name}: not in the model" for name in sorted(set(states) - with_state)]
    problems += [
        f"{name}: the file has shape {list(stored[name].shape)}, the model would have {list(shape)}"
        for name, shape in expected.items()
        if name in stored and tuple(stored[name].shape) != tuple(shape)
    ]
    problems += [
        f"{name}: the file has {stored[name].dtype}, the model {tensor.dtype}; convert the model before loading"
        for name, tensor in dense.items()
        if name in stored and stored[name].dtype != tensor.dtype
    ]
    if problems:
        raise PlanError(f"{path} was saved from another model:\n  {list_problems(problems)}")
    return stored, states
