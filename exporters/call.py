"""A model as a function of tensors in a row: how it is called, what its inputs and outputs are named, other batches."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compress.discover import _first, as_call
from compress.shell import shell

TENSOR = object()  # where a tensor stands among the values of a call
BATCHES = (1, 2, 7)


class ExportError(ValueError):
    """A model that cannot be exported as asked; the message says where and what to do."""


@dataclass
class Call:
    """What a model is called with: the tensors in a row, and what stands around them."""

    names: list[str]
    leaves: list[Tensor]
    values: list[Any]  # of the whole call, with a mark where tensors stand
    spec: Any
    batch: int | None  # its size, where it is plain which dimension it is: the first of all tensors

    @classmethod
    def of(cls, model: nn.Module, example_inputs: Any) -> Call:
        """
        Raises:
            ExportError: there is no tensor among the inputs.
            TypeError: `example_inputs` is none of the forms that a model can be called with.
        """
        call = as_call(example_inputs)
        args, kwargs = call
        pairs, spec = pytree.tree_flatten_with_path((args, kwargs))
        leaves = [value.detach().cpu() for _, value in pairs if isinstance(value, Tensor)]
        if not leaves:
            raise ExportError("example_inputs: expected at least one tensor; got none")
        named = _parameters(model, len(args))
        paths: list[Any] = [path for path, value in pairs if isinstance(value, Tensor)]
        names = [_joined(named[p[1].idx] if p[0].idx == 0 else p[1].key, p[2:]) for p in paths]
        values = [TENSOR if isinstance(value, Tensor) else value for _, value in pairs]
        batch = leaves[0].shape[0] if _first(call) is not call else None
        return cls(_unique(names), leaves, values, spec, batch)

    def inputs(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments and named arguments, with these tensors."""
        rest = iter(leaves)
        filled = [next(rest) if value is TENSOR else value for value in self.values]
        made: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(filled, self.spec)
        return made

    def flat(self, inputs: Any) -> list[Tensor]:
        """The tensors of another call.

        Raises:
            ExportError: it is not of the example's form.
        """
        values, spec = pytree.tree_flatten(as_call(inputs))
        leaves = [value.detach().cpu() for value in values if isinstance(value, Tensor)]
        if spec != self.spec or [t.dtype for t in leaves] != [t.dtype for t in self.leaves]:
            raise ExportError(f"samples: expected inputs like the example's, {_said(self.leaves)}; got {_said(leaves)}")
        return leaves


class Flat(nn.Module):
    """A model in eval mode that takes tensors in a row and gives tensors in a row, in single precision."""

    def __init__(self, model: nn.Module, call: Call, half: bool = False) -> None:
        super().__init__()
        self.model = still(model, half)
        self.call, self.half_precision = call, half

    def forward(self, *leaves: Tensor) -> list[Tensor]:
        if self.half_precision:
            leaves = tuple(t.half() if t.is_floating_point() else t for t in leaves)
        args, kwargs = self.call.inputs(leaves)
        outputs = [t for t in pytree.tree_leaves(self.model(*args, **kwargs)) if isinstance(t, Tensor)]
        return [t.float() if t.dtype == torch.float16 else t for t in outputs] if self.half_precision else outputs

    @torch.no_grad()
    def outputs(self) -> list[str]:
        """The names of the outputs, from a run on the example.

        Raises:
            ExportError: the model does not run on it, or gives no tensor.
        """
        args, kwargs = self.call.inputs([t.clone() for t in self.call.leaves])
        try:
            result = self.model(*args, **kwargs)
        except Exception as error:
            raise ExportError(
                f"example_inputs: the model does not run on {_said(self.call.leaves)}: {type(error).__name__}: {error}"
            ) from error
        pairs = [(p, v) for p, v in pytree.tree_flatten_with_path(result)[0] if isinstance(v, Tensor)]
        if not pairs:
            raise ExportError(
                f"the model returns {type(result).__name__}, in which there is no tensor to be seen: wrap it in a "
                "module that returns tensors, in tuples, lists or dicts"
            )
        first = [_joined(*_head(path)) for path, _ in pairs]
        return _unique([f"output_{n}" if n[0].isdigit() else n for n in first], taken=self.call.names)


def still(model: nn.Module, half: bool = False) -> nn.Module:
    """A copy in eval mode, on the CPU, around the model's own parameters where they are there already.

    Raises:
        ExportError: it has numbers of another precision than single.
    """
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    if other := [name for name, t in tensors.items() if t.is_floating_point() and t.dtype != torch.float32]:
        raise ExportError(
            f"{other[0]}: expected float32; got {tensors[other[0]].dtype}. Export model.float(), and ask for half=True "
            "if the file is to have half precision"
        )
    here = not half and all(t.device.type == "cpu" for t in tensors.values())
    twin = shell(model) if here else copy.deepcopy(model).cpu()
    for module in twin.modules():  # one by one: the `eval` of some libraries does more, or less
        module.training = False
    return twin.half() if half else twin


def variants(
    call: Call, dynamic_batch: bool, sizes: Sequence[tuple[int, int]] = ()
) -> Iterator[tuple[str, list[Tensor]]]:
    """The example and random inputs like it, in batches of several sizes where the batch is dynamic."""
    random = torch.Generator().manual_seed(0)
    for batch in BATCHES if dynamic_batch else (call.batch,):
        for size in (None, *sizes):
            real = [_sized(t, batch if dynamic_batch else None, size) for t in call.leaves]
            about = "" if batch is None else f" in a batch of {batch}"
            about += f" of {size[0]}x{size[1]}" if size else ""
            yield f"example{about}", real
            yield f"random input{about}", [_like(t, random) for t in real]


def _sized(t: Tensor, batch: int | None, size: tuple[int, int] | None) -> Tensor:
    """The rows of a tensor over and over, in another height and width."""
    if batch is not None:
        t = t[torch.arange(batch) % len(t)]
    if size is not None and t.ndim == 4:
        t = nn.functional.interpolate(t, size, mode="bilinear", align_corners=False)
    return t


def _like(t: Tensor, random: torch.Generator) -> Tensor:
    """Random numbers of the tensor's mean and spread; where it holds no fractions, any of its entries."""
    if t.is_floating_point():
        spread = t.std() if t.numel() > 1 else torch.ones(())
        return (t.mean() + (spread if float(spread) > 0 else 1.0) * torch.randn(t.shape, generator=random)).to(t.dtype)
    return t.flatten()[torch.randint(t.numel(), t.shape, generator=random)] if t.numel() else t


def _parameters(model: nn.Module, count: int) -> list[str]:
    """The names of the first arguments of the model's forward."""
    names: list[str] = []
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    for p in parameters:
        if p.kind is p.VAR_POSITIONAL:
            return (names + [f"{p.name}_{i}" for i in range(count)])[:count]
        names.append(p.name)
    return (names + [f"input_{i}" for i in range(count)])[:count]


def _head(path: Any) -> tuple[str, Any]:
    """The name that an output begins with, and what follows."""
    if not path:
        return "output", ()
    key = path[0]
    return str(getattr(key, "key", getattr(key, "name", f"output_{getattr(key, 'idx', 0)}"))), path[1:]


def _joined(name: Any, path: Any) -> str:
    parts = [str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path]
    return re.sub(r"\W+", "_", "_".join([str(name), *parts])).strip("_") or "output"


def _unique(names: list[str], taken: Sequence[str] = ()) -> list[str]:
    used, result = set(taken), []
    for name in names:
        count, fresh = 0, name
        while fresh in used:
            count, fresh = count + 1, f"{name}_{count + 1}"
        used.add(fresh)
        result.append(fresh)
    return result


def _said(leaves: Sequence[Tensor]) -> str:
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in leaves) or "no tensor"
