"""Record one ordinary forward pass: the inputs of every module, and which modules use which parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from compress.errors import TraceError
from compress.modules import CallInputs, guarded_parameters, modules_of

from .traced_parameters import TensorNames


@dataclass
class CallRecord:
    """Calls of modules and uses of parameters in one forward pass."""

    calls: dict[str, list[CallInputs]] = field(default_factory=dict)  # module -> inputs of each of its calls
    users: dict[str, set[str]] = field(default_factory=dict)  # parameter -> modules that were active at each use
    macs: int = 0

    def is_self_contained(self, name: str) -> bool:
        """Return whether all parameters below this module are used from inside of it only."""
        return all(name in modules for parameter, modules in self.users.items() if parameter.startswith(f"{name}."))


class _ParameterUseRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, record: CallRecord, names: TensorNames, module_stack: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record, self.names, self.module_stack = record, names, module_stack

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        active, users = set(self.module_stack), self.record.users
        for arg in [*args, *(kwargs or {}).values()]:
            for tensor in arg if isinstance(arg, (list, tuple)) else [arg]:
                if isinstance(tensor, Tensor) and (name := self.names.get(tensor)):
                    users[name] = users.get(name, active) & active
        return func(*args, **(kwargs or {}))


def record_calls(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallRecord:
    """Run the model once and record its calls.

    Raises:
        TraceError: The model does not run on these inputs; the message says where it stops.
    """
    record = CallRecord()
    module_stack: list[str] = []

    def enter(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            module_stack.append(name)
            record.calls.setdefault(name, []).append((args, kwargs))

        return hook

    def leave(*_: Any) -> None:
        module_stack.pop()

    modules = modules_of(model)
    hooks = [m.register_forward_pre_hook(enter(n), with_kwargs=True) for n, m in modules.items()]
    hooks += [m.register_forward_hook(leave) for m in modules.values()]
    from torch.utils.flop_counter import FlopCounterMode  # it imports triton

    counter = FlopCounterMode(display=False)
    try:
        with (
            torch.no_grad(),
            guarded_parameters(model),
            counter,
            _ParameterUseRecorder(record, TensorNames(model), module_stack),
        ):
            model(*args, **kwargs)
    except Exception as error:
        where = module_stack[-1] if module_stack and module_stack[-1] else "the model"
        raise TraceError(
            f"example_inputs: the model does not run on {_describe((args, kwargs))}: it stops in {where} with "
            f"{type(error).__name__}: {' '.join(str(error).split())[:200]}. Pass what the model is called with: "
            "a tensor, a tuple of arguments or a dict of named ones, with a leading batch dimension."
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    record.macs = counter.get_total_flops() // 2
    return record


def _describe(inputs: CallInputs) -> str:
    """Describe arguments, with dtypes and shapes in place of tensors."""
    args, kwargs = pytree.tree_map(lambda t: f"{t.dtype}{list(t.shape)}" if isinstance(t, torch.Tensor) else t, inputs)
    return ", ".join([*map(str, args), *[f"{k}={v}" for k, v in kwargs.items()]]) or "no arguments"
