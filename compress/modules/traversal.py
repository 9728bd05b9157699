"""Modules and tensors of a model by name: `named_modules()` and the like as dicts, many times as fast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class TensorEntry(NamedTuple):
    """A parameter or buffer and the table of the module that holds it; assign `table[key]` to replace it."""

    table: dict[str, Any]
    key: str
    tensor: Tensor


def modules_of(model: nn.Module, aliases: bool = False) -> dict[str, nn.Module]:
    """Return all modules by name, in the order of `named_modules()`, without scripted ones (`torch.jit`).

    A module that is registered twice has its first name only, or with `aliases` all of its names.
    """
    return _walk(model, aliases)[0]


def scripted_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost scripted modules (`torch.jit`) by name; their code and tensors cannot be changed."""
    return _walk(model, aliases=False)[1]


def _walk(model: nn.Module, aliases: bool) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Return modules by name, and scripted modules by name."""
    modules: dict[str, nn.Module] = {}
    scripted: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def visit(module: nn.Module, path: str) -> None:
        if id(module) in seen and not aliases:
            return
        seen.add(id(module))
        if isinstance(module, torch.jit.ScriptModule):
            scripted[path] = module
            return
        modules[path] = module
        for name, child in module._modules.items():
            if child is not None:
                visit(child, f"{path}.{name}" if path else name)

    visit(model, "")
    return modules, scripted


def tensors_of(model: nn.Module, aliases: bool = False) -> dict[str, Tensor]:
    """Return all parameters, then all buffers, by their first name, or with `aliases` by all of their names."""
    tensors: dict[str, Tensor] = {}
    modules, seen = modules_of(model, aliases), set[int]()
    for parameters in (True, False):
        for path, module in modules.items():
            for name, tensor in (module._parameters if parameters else module._buffers).items():
                if tensor is not None and (aliases or id(tensor) not in seen):
                    seen.add(id(tensor))
                    tensors[f"{path}.{name}" if path else name] = tensor
    return tensors


def tensor_entries(model: nn.Module) -> Iterator[TensorEntry]:
    """Yield every parameter and buffer with its table, module by module; tied tensors as often as they are held."""
    for module in modules_of(model).values():
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    yield TensorEntry(table, key, tensor)


def enclosing_modules(names: Iterable[str]) -> set[str]:
    """Return the names of all modules that contain these tensors or modules."""
    enclosing: set[str] = set()
    for name in names:
        while (name := name.rpartition(".")[0]) and name not in enclosing:
            enclosing.add(name)
    return enclosing
