"""One plain forward pass, watched: who is called with what, and from inside which modules each parameter is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from .follow import first_names

Call = tuple[tuple[Any, ...], Mapping[str, Any]]


class TraceError(ValueError):
    """The model does not run on the example inputs."""


@dataclass
class Record:
    calls: dict[str, list[Call]] = field(default_factory=dict)  # module -> its calls
    inside: dict[str, set[str]] = field(default_factory=dict)  # parameter -> modules at work at every use of it
    macs: int = 0

    def closed(self, name: str) -> bool:
        """Whether all parameters below this module are used from inside it alone."""
        return all(name in around for used, around in self.inside.items() if used.startswith(f"{name}."))


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, seen: Record, names: dict[int, str], entered: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen, self.names, self.entered = seen, names, entered

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for arg in [*args, *(kwargs or {}).values()]:
            for tensor in arg if isinstance(arg, (list, tuple)) else [arg]:
                if isinstance(tensor, Tensor) and (name := self.names.get(id(tensor))):
                    self.seen.inside[name] = self.seen.inside.get(name, set(self.entered)) & set(self.entered)
        return func(*args, **(kwargs or {}))


def record(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Record:
    """
    Raises:
        TraceError: the model does not run on these inputs; the message says where it stops.
    """
    seen = Record()
    entered: list[str] = []

    def enter(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            entered.append(name)
            seen.calls.setdefault(name, []).append((inputs, named))

        return hook

    def leave(*_: Any) -> None:
        entered.pop()

    hooks = [m.register_forward_pre_hook(enter(n), with_kwargs=True) for n, m in model.named_modules()]
    hooks += [m.register_forward_hook(leave) for m in model.modules()]
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), counter, _Watch(seen, first_names(model), entered):
            model(*args, **kwargs)
    except Exception as error:
        where = entered[-1] if entered and entered[-1] else "the model"
        raise TraceError(
            f"example_inputs: the model does not run on {_describe((args, kwargs))}: it stops in {where} with "
            f"{type(error).__name__}: {' '.join(str(error).split())[:200]}. Pass what the model is called with: "
            "a tensor, a tuple of arguments or a dict of named ones, with a leading batch dimension."
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    seen.macs = counter.get_total_flops() // 2
    return seen


def _describe(inputs: Any) -> str:
    """Shapes instead of tensors."""
    args, kwargs = pytree.tree_map(lambda t: f"{t.dtype}{list(t.shape)}" if isinstance(t, torch.Tensor) else t, inputs)
    return ", ".join([*map(str, args), *[f"{k}={v}" for k, v in kwargs.items()]]) or "no arguments"
