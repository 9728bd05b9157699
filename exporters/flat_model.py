"""A model as a function from a list of tensors to a list of tensors, with names for its inputs and outputs."""

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

from compress.modules import as_call_inputs, first_examples, shared_copy

from .errors import ExportError

TENSOR = object()  # placeholder for a tensor among the values of a call
BATCH_SIZES_TRIED = (1, 2, 7)


@dataclass
class CallSignature:
    """The call of a model: its input tensors in order, and the structure of arguments around them."""

    names: list[str]
    tensors: list[Tensor]  # of the example call
    values: list[Any]  # all leaves of the call, with TENSOR in place of each tensor
    spec: pytree.TreeSpec
    batch_size: int | None  # None if the tensors do not all have the batch as first dimension

    @classmethod
    def from_example(cls, model: nn.Module, example_inputs: Any) -> CallSignature:
        """Derive names and structure from example inputs.

        Raises:
            ExportError: there is no tensor among the inputs.
            TypeError: `example_inputs` is none of the forms that a model can be called with.
        """
        call = as_call_inputs(example_inputs)
        args, kwargs = call
        leaves, spec = pytree.tree_flatten_with_path((args, kwargs))
        tensors = [value.detach().cpu() for _, value in leaves if isinstance(value, Tensor)]
        if not tensors:
            raise ExportError("example_inputs: expected at least one tensor; got none")
        arg_names = _argument_names(model, len(args))
        paths: list[Any] = [path for path, value in leaves if isinstance(value, Tensor)]
        names = [_join_path(arg_names[p[1].idx] if p[0].idx == 0 else p[1].key, p[2:]) for p in paths]
        values = [TENSOR if isinstance(value, Tensor) else value for _, value in leaves]
        batch_size = tensors[0].shape[0] if first_examples(call) is not call else None
        return cls(_make_unique(names), tensors, values, spec, batch_size)

    def arguments(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (args, kwargs) of a call with these tensors."""
        remaining = iter(tensors)
        leaves = [next(remaining) if value is TENSOR else value for value in self.values]
        arguments: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(leaves, self.spec)
        return arguments

    def tensors_of_call(self, inputs: Any) -> list[Tensor]:
        """Return the tensors of another call with the same structure.

        Raises:
            ExportError: its structure or dtypes differ from those of the example.
        """
        values, spec = pytree.tree_flatten(as_call_inputs(inputs))
        tensors = [value.detach().cpu() for value in values if isinstance(value, Tensor)]
        if spec != self.spec or [t.dtype for t in tensors] != [t.dtype for t in self.tensors]:
            raise ExportError(
                f"samples: expected inputs like the example's, {_describe_tensors(self.tensors)}; got "
                f"{_describe_tensors(tensors)}"
            )
        return tensors


class FlatModel(nn.Module):
    """An eval-mode copy of a model that maps a list of tensors to a list of tensors.

    With `half` the model computes in half precision; inputs and outputs stay in single precision.
    """

    def __init__(self, model: nn.Module, signature: CallSignature, half: bool = False) -> None:
        super().__init__()
        self.model = eval_copy(model, half)
        self.signature, self.half_precision = signature, half

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        if self.half_precision:
            tensors = tuple(t.half() if t.is_floating_point() else t for t in tensors)
        args, kwargs = self.signature.arguments(tensors)
        outputs = [t for t in pytree.tree_leaves(self.model(*args, **kwargs)) if isinstance(t, Tensor)]
        return [t.float() if t.dtype == torch.float16 else t for t in outputs] if self.half_precision else outputs

    @torch.no_grad()
    def output_names(self) -> list[str]:
        """Run the model on the example and return a name for each output tensor.

        Raises:
            ExportError: the model does not run on the example, or returns no tensor.
        """
        args, kwargs = self.signature.arguments([t.clone() for t in self.signature.tensors])
        try:
            result = self.model(*args, **kwargs)
        except Exception as error:
            raise ExportError(
                f"example_inputs: the model does not run on {_describe_tensors(self.signature.tensors)}: "
                f"{type(error).__name__}: {error}"
            ) from error
        paths = [path for path, value in pytree.tree_flatten_with_path(result)[0] if isinstance(value, Tensor)]
        if not paths:
            raise ExportError(
                f"the model returns {type(result).__name__}, which contains no tensor that pytree finds: wrap the "
                "model in a module that returns tensors, in tuples, lists or dicts"
            )
        names = [_join_path(*_split_first_key(path)) for path in paths]
        names = [f"output_{name}" if name[0].isdigit() else name for name in names]
        return _make_unique(names, reserved=self.signature.names)


def eval_copy(model: nn.Module, half: bool = False) -> nn.Module:
    """Return a copy in eval mode on the CPU; it shares the parameters if they are on the CPU and `half` is false.

    Raises:
        ExportError: a parameter or buffer is floating point but not float32.
    """
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    if not_float32 := [name for name, t in tensors.items() if t.is_floating_point() and t.dtype != torch.float32]:
        raise ExportError(
            f"{not_float32[0]}: expected float32; got {tensors[not_float32[0]].dtype}. Export model.float(), with "
            "half=True for a file in half precision"
        )
    can_share = not half and all(t.device.type == "cpu" for t in tensors.values())
    copied = shared_copy(model) if can_share else copy.deepcopy(model).cpu()
    for module in copied.modules():  # not copied.eval(): some libraries override it
        module.training = False
    return copied.half() if half else copied


def input_variants(
    signature: CallSignature, dynamic_batch: bool, sizes: Sequence[tuple[int, int]] = ()
) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield (description, tensors): the example and random inputs like it, at several batch sizes if dynamic.

    Args:
        sizes: further heights and widths to try for inputs with four dimensions.
    """
    generator = torch.Generator().manual_seed(0)
    for batch_size in BATCH_SIZES_TRIED if dynamic_batch else (signature.batch_size,):
        for size in (None, *sizes):
            example = [_resize(t, batch_size if dynamic_batch else None, size) for t in signature.tensors]
            shape = "" if batch_size is None else f" in a batch of {batch_size}"
            shape += f" of {size[0]}x{size[1]}" if size else ""
            yield f"example{shape}", example
            yield f"random input{shape}", [_random_like(t, generator) for t in example]


def _resize(t: Tensor, batch_size: int | None, size: tuple[int, int] | None) -> Tensor:
    """Repeat or drop rows to get the batch size; interpolate images to another height and width."""
    if batch_size is not None:
        t = t[torch.arange(batch_size) % len(t)]
    if size is not None and t.ndim == 4:
        t = nn.functional.interpolate(t, size, mode="bilinear", align_corners=False)
    return t


def _random_like(t: Tensor, generator: torch.Generator) -> Tensor:
    """Draw normal numbers with the tensor's mean and deviation; for integers, draw from the tensor's entries."""
    if t.is_floating_point():
        std = t.std() if t.numel() > 1 else torch.ones(())
        return (t.mean() + (std if float(std) > 0 else 1.0) * torch.randn(t.shape, generator=generator)).to(t.dtype)
    return t.flatten()[torch.randint(t.numel(), t.shape, generator=generator)] if t.numel() else t


def _argument_names(model: nn.Module, count: int) -> list[str]:
    """Return the names of the first `count` arguments of the model's forward."""
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


def _split_first_key(path: Any) -> tuple[str, Any]:
    """Split the path of an output into its first name and the remaining keys."""
    if not path:
        return "output", ()
    key = path[0]
    return str(getattr(key, "key", getattr(key, "name", f"output_{getattr(key, 'idx', 0)}"))), path[1:]


def _join_path(name: Any, path: Any) -> str:
    keys = [str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path]
    return re.sub(r"\W+", "_", "_".join([str(name), *keys])).strip("_") or "output"


def _make_unique(names: list[str], reserved: Sequence[str] = ()) -> list[str]:
    used, unique = set(reserved), []
    for name in names:
        count, candidate = 0, name
        while candidate in used:
            count, candidate = count + 1, f"{name}_{count + 1}"
        used.add(candidate)
        unique.append(candidate)
    return unique


def _describe_tensors(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors) or "no tensor"
