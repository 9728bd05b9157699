"""Checkpoints: one file with every tensor and every fact that a run needs to go on. Written whole or not at all."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn, optim

from .digest import digest
from .files import write_whole

NAME, BEFORE = "checkpoint.safetensors", "checkpoint.before.safetensors"


@dataclass
class State:
    """What a training has to remember between two steps."""

    modules: Mapping[str, nn.Module]
    optimizers: Sequence[optim.Optimizer] = ()
    extra: Callable[[], dict[str, Tensor]] = dict
    facts: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        found = {f"{key}/{n}": t for key, m in self.modules.items() for n, t in tensors_of(m).items()}
        found |= {f"extra/{name}": tensor for name, tensor in self.extra().items()}
        for k, optimizer in enumerate(self.optimizers):
            for i, values in optimizer.state_dict()["state"].items():
                found |= {f"optimizer{k}/{i}/{n}": v for n, v in values.items() if isinstance(v, Tensor)}
        return found

    def sound(self) -> bool:
        """Whether every weight is a finite number: what went wrong is not to replace what was right."""
        return all(bool(p.isfinite().all()) for m in self.modules.values() for p in m.parameters())

    @torch.no_grad()
    def restore_(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Put everything back as it was."""
        self.facts.update(facts)
        for key, module in self.modules.items():
            put_(module, below(tensors, f"{key}/"))
        for name, tensor in self.extra().items():
            tensor.copy_(tensors[f"extra/{name}"])
        for k, optimizer in enumerate(self.optimizers):
            state: dict[int, dict[str, Tensor]] = {}
            for path, tensor in below(tensors, f"optimizer{k}/").items():
                number, _, name = path.partition("/")
                state.setdefault(int(number), {})[name] = tensor
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


class Store:
    """The last two checkpoints of a working directory."""

    def __init__(self, folder: Path) -> None:
        self.path, self.before = folder / NAME, folder / BEFORE

    @property
    def empty(self) -> bool:
        return not self.path.exists() and not self.before.exists()

    def save(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Write the newest whole, beside the one before: at every moment one of them can be read."""
        dense = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        seen: set[int] = set()
        for name, t in dense.items():  # tied tensors: the file wants each to have its own memory
            where = t.untyped_storage().data_ptr()
            dense[name] = t.clone() if where in seen else t
            seen.add(where)
        text = json.dumps(facts)
        write_whole(self.path, save(dense, {"facts": text, "hash": digest(dense, text)}), before=self.before)

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The newest, or the one before where that one is damaged; None where there is none.

        Raises:
            ValueError: neither can be read.
        """
        errors = []
        for path in (self.path, self.before):
            if path.exists():
                try:
                    return _read(path)
                except (SafetensorError, KeyError, TypeError, ValueError, OSError, RuntimeError) as error:
                    errors.append(f"{path}: not a checkpoint ({error})")
        if errors:
            raise ValueError("; ".join(errors) + "; start anew in another workdir")
        return None

    def clear(self) -> None:
        for path in (self.path, self.before):
            path.unlink(missing_ok=True)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with safe_open(path, "pt") as file:
        text, seal = file.metadata()["facts"], file.metadata()["hash"]
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if digest(tensors, text) != seal:
        raise ValueError("its content is not what was written")
    return tensors, json.loads(text)


def random_state() -> dict[str, Any]:
    """The state of every generator that code in this process may draw from, as plain data."""
    version, numbers, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().tolist(),
        "cuda": [state.tolist() for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if state["cuda"]:
        torch.cuda.set_rng_state_all([torch.tensor(s, dtype=torch.uint8) for s in state["cuda"]])


@contextmanager
def own_randomness(seed: int | None = None) -> Iterator[None]:
    """Random numbers drawn inside leave those outside as they were."""
    before = random_state()
    try:
        if seed is not None:
            seed_all(seed)
        yield
    finally:
        set_random_state(before)


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those whose names begin so, without it."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers that a module's state has; what else a module adds to it is its own business."""
    return {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}


@torch.no_grad()
def put_(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give a module these numbers, in place."""
    for name, tensor in tensors_of(module).items():
        tensor.copy_(values[name])
