"""Protect parameters that a model's own code writes to: copies that share them must not change the original.

Some forward passes change weights: `nn.Embedding(max_norm=...)` rescales its rows, and code such as
`self.fc.weight.data.clamp_(-1, 1)` clips them. Few models do this, so parameters are shared until a first run of the
code, under a `ParameterGuard`, shows a write. The guard undoes it, and later shared copies have such parameters for
themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from .nested_tensors import tensors_in
from .traversal import tensors_of

_WRITTEN: Any = WeakTensorKeyDictionary()  # parameters that code was seen to write to, for as long as they live


def is_written(parameter: Tensor) -> bool:
    """Return whether a guard saw code write to this parameter."""
    return bool(_WRITTEN) and parameter in _WRITTEN


def has_written_parameters(model: nn.Module) -> bool:
    """Return whether a guard saw code write to a parameter of this model."""
    return any(is_written(tensor) for tensor in tensors_of(model).values())


class ParameterGuard:
    """Keep the parameters of models bit-identical while their code runs, and remember which ones it wrote to.

    Use it as a context; call `before_operator` ahead of each operator, or use `guarded_parameters`, which does.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        parameters = {id(t): t for m in models for t in tensors_of(m).values() if isinstance(t, nn.Parameter)}
        # An alias keeps the memory of a parameter whose `data` is replaced.
        self._aliases = [(p, p.detach()) for p in parameters.values() if not p.is_inference()]
        self._aliases_by_memory: dict[int, list[Tensor]] = {}
        for _, alias in self._aliases:
            if (memory := _memory_of(alias)) is not None:
                self._aliases_by_memory.setdefault(memory, []).append(alias)
        self._saved: dict[int, list[Tensor]] = {}  # memory -> values before the first write

    def before_operator(self, func: Any, args: Any, kwargs: Any) -> None:
        """Save the parameters that an operator is about to write to."""
        for position, name in _written_arguments(func):
            for tensor in tensors_in(args[position] if position < len(args) else kwargs.get(name)):
                memory = _memory_of(tensor)
                if memory in self._aliases_by_memory and memory not in self._saved:
                    self._saved[memory] = [alias.clone() for alias in self._aliases_by_memory[memory]]

    def __enter__(self) -> ParameterGuard:
        return self

    @torch.no_grad()
    def __exit__(self, *_: object) -> None:
        for memory, values in self._saved.items():
            for alias, value in zip(self._aliases_by_memory[memory], values, strict=True):
                alias.copy_(value)
        for parameter, alias in self._aliases:
            is_replaced = _memory_of(parameter) != _memory_of(alias)
            if is_replaced:
                parameter.data = alias
            if is_replaced or _memory_of(alias) in self._saved:
                _WRITTEN[parameter] = True


class _GuardMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Show every operator to a guard."""

    def __init__(self, guard: ParameterGuard) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.guard = guard

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.guard.before_operator(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@contextmanager
def guarded_parameters(*models: nn.Module) -> Iterator[None]:
    """Run code that must not change the parameters of these models; see `ParameterGuard`."""
    with ParameterGuard(models) as guard, _GuardMode(guard):
        yield


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return position and name of the arguments that an operator writes to."""
    return tuple((i, a.name) for i, a in enumerate(func._schema.arguments) if a.is_write)


def _memory_of(tensor: Tensor) -> int | None:
    """Return an identifier of a tensor's memory, which its views share; None if it has no memory of its own."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse and some quantized tensors
        return None
