"""The modules and tensors of a model by name, in the order of torch's own generators and many times as fast."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


def modules_of(model: nn.Module, aliases: bool = False) -> dict[str, nn.Module]:
    """As `named_modules()`: a module that is held twice goes by its first name, or with `aliases` by each."""
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def visit(module: nn.Module, path: str) -> None:
        if id(module) in seen and not aliases:
            return
        seen.add(id(module))
        found[path] = module
        for name, child in module._modules.items():
            if child is not None:
                visit(child, f"{path}.{name}" if path else name)

    visit(model, "")
    return found


def tensors_of(model: nn.Module, aliases: bool = False) -> dict[str, Tensor]:
    """All parameters, then all buffers, each under its first name, or with `aliases` under each."""
    found: dict[str, Tensor] = {}
    modules, seen = modules_of(model, aliases), set[int]()
    for parameters in (True, False):
        for path, module in modules.items():
            for name, tensor in (module._parameters if parameters else module._buffers).items():
                if tensor is not None and (aliases or id(tensor) not in seen):
                    seen.add(id(tensor))
                    found[f"{path}.{name}" if path else name] = tensor
    return found


def within(names: Iterable[str]) -> set[str]:
    """The modules that these tensors or modules lie in."""
    found: set[str] = set()
    for name in names:
        while (name := name.rpartition(".")[0]) and name not in found:
            found.add(name)
    return found
