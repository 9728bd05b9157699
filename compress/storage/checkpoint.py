"""Checkpoints: one safetensors file with all tensors and metadata that a stopped run needs to continue."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn, optim

from .extra_state import decode_extra_states, encode_extra_states, extra_states, is_extra_state, set_extra_states_
from .files import write_atomic
from .hashes import hash_tensors

CHECKPOINT_FILE, PREVIOUS_CHECKPOINT_FILE = "checkpoint.safetensors", "checkpoint.before.safetensors"


@dataclass
class TrainingState:
    """Everything that a training loop changes: modules, optimizers, further tensors, and JSON values."""

    modules: Mapping[str, nn.Module]
    optimizers: Sequence[optim.Optimizer] = ()
    extra_tensors: Callable[[], dict[str, Tensor]] = dict
    values: dict[str, Any] = field(default_factory=dict)
    extra_states: dict[str, Any] = field(default_factory=dict)  # of modules that are not among `modules`

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by their names in a checkpoint."""
        tensors = {f"{key}/{n}": t for key, m in self.modules.items() for n, t in training_tensors(m).items()}
        extra = self.extra_tensors() | encode_extra_states(self.extra_states)
        tensors |= {f"extra/{name}": tensor for name, tensor in extra.items()}
        for k, optimizer in enumerate(self.optimizers):
            for i, values in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer{k}/{i}/{n}": v for n, v in values.items() if isinstance(v, Tensor)}
        return tensors

    def is_finite(self) -> bool:
        """Return whether all weights are finite; a checkpoint with others would replace a usable one."""
        return all(bool(p.isfinite().all()) for m in self.modules.values() for p in m.parameters())

    @torch.no_grad()
    def restore_(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.values.update(values)
        for key, module in self.modules.items():
            load_training_tensors_(module, tensors_under(tensors, f"{key}/"))
            device = next((p.device for p in module.parameters()), torch.device("cpu"))
            self.extra_states.update(decode_extra_states(tensors_under(tensors, "extra/"), device))
        for name, tensor in self.extra_tensors().items():
            tensor.copy_(tensors[f"extra/{name}"])
        for k, optimizer in enumerate(self.optimizers):
            state: dict[int, dict[str, Tensor]] = {}
            for path, tensor in tensors_under(tensors, f"optimizer{k}/").items():
                number, _, name = path.partition("/")
                state.setdefault(int(number), {})[name] = tensor
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


class CheckpointStore:
    """The last two checkpoints of a working directory, the newest in `path`."""

    def __init__(self, workdir: Path) -> None:
        self.path, self.previous = workdir / CHECKPOINT_FILE, workdir / PREVIOUS_CHECKPOINT_FILE

    @property
    def is_empty(self) -> bool:
        """Return whether there is no checkpoint."""
        return not self.path.exists() and not self.previous.exists()

    def save(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        """Write a checkpoint and keep the previous one: at every moment one of the two is readable."""
        dense = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        addresses: set[int] = set()
        for name, t in dense.items():  # safetensors refuses tensors that share memory, as tied weights do
            address = t.untyped_storage().data_ptr()
            dense[name] = t.clone() if address in addresses else t
            addresses.add(address)
        text = json.dumps(metadata)
        write_atomic(self.path, save(dense, {"facts": text, "hash": hash_tensors(dense, text)}), previous=self.previous)

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return (tensors, metadata) of the newest readable checkpoint, or None if there is none.

        Raises:
            ValueError: there are checkpoints, and none is readable.
        """
        errors = []
        for path in (self.path, self.previous):
            if path.exists():
                try:
                    return _read(path)
                except (SafetensorError, KeyError, TypeError, ValueError, OSError, RuntimeError) as error:
                    errors.append(f"{path}: not a checkpoint ({error})")
        if errors:
            raise ValueError("; ".join(errors) + "; start again in another workdir")
        return None

    def delete(self) -> None:
        """Remove both checkpoints."""
        for path in (self.path, self.previous):
            path.unlink(missing_ok=True)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with safe_open(path, "pt") as file:
        text, expected_hash = file.metadata()["facts"], file.metadata()["hash"]
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if hash_tensors(tensors, text) != expected_hash:
        raise ValueError("its content does not match its hash")
    return tensors, json.loads(text)


def tensors_under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names start with a prefix, without the prefix."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def state_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of `module.state_dict()`, without extra state."""
    state = module.state_dict().items()
    return {name: value for name, value in state if isinstance(value, Tensor) and not is_extra_state(name)}


def training_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return everything that training can change in a module: also buffers that are not persistent, and extra state."""
    buffers = {name: owner._buffers[key] for name, (owner, key) in _non_persistent_buffers(module).items()}
    known = {name: buffer for name, buffer in buffers.items() if buffer is not None}
    return state_tensors(module) | known | encode_extra_states(extra_states(module))


@torch.no_grad()
def load_training_tensors_(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Restore the tensors of `training_tensors`."""
    load_tensors_(module, values)
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    for name, (owner, key) in _non_persistent_buffers(module).items():
        buffer, value = owner._buffers[key], values.get(name)
        if value is None:
            continue
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:  # a cache that code replaces
            owner._buffers[key] = value.to(device if buffer is None else buffer.device)
        elif not torch.equal(buffer.cpu(), value.cpu()):  # constants may share memory with themselves
            buffer.copy_(value)
    set_extra_states_(module, decode_extra_states(values, device))


def _non_persistent_buffers(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the owner and the key of each buffer that is not in the state dict, by name."""
    return {
        f"{path}.{key}" if path else key: (owner, key)
        for path, owner in module.named_modules()
        for key in sorted(owner._non_persistent_buffers_set)
        if key in owner._buffers
    }


@torch.no_grad()
def load_tensors_(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy values into the parameters and buffers of a module, by name."""
    for name, tensor in state_tensors(module).items():
        tensor.copy_(values[name])
