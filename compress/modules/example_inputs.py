"""Example inputs: the arguments that a model is called with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from compress.errors import TraceError

CallInputs = tuple[tuple[Any, ...], Mapping[str, Any]]  # positional and keyword arguments


def as_call_inputs(example_inputs: Any) -> CallInputs:
    """Return example inputs as positional and keyword arguments.

    Raises:
        TypeError: `example_inputs` is not a tensor, tuple, dict or list.
    """
    if isinstance(example_inputs, (Tensor, list)):
        return (example_inputs,), {}
    if isinstance(example_inputs, tuple):
        return example_inputs, {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    raise TypeError(
        "example_inputs: expected a tensor, a tuple of arguments, a dict of named arguments or a list of images; "
        f"got {type(example_inputs).__name__}"
    )


def clone_tensors(values: Any) -> Any:
    """Return nested values with all tensors cloned, because the code of a model may write to its inputs."""
    return pytree.tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, values)


def prepare_example_input(value: Any) -> Any:
    """Return an example input on which a zeroed and a wrongly sliced network differ.

    Constant images, such as `torch.zeros`, become random; inference tensors are cloned; the rest is returned as it is.

    Raises:
        TraceError: A tensor holds no example.
    """
    if not isinstance(value, Tensor):
        return value
    if value.ndim > 1 and not len(value):
        raise TraceError(f"example_inputs: expected at least one example; got shape {list(value.shape)}")
    if value.ndim > 2 and value.is_floating_point() and bool((value == value.flatten()[0]).all()):
        return torch.rand(value.shape, generator=torch.Generator().manual_seed(0)).to(value)
    return value.clone() if value.is_inference() else value


def has_no_images(inputs: CallInputs) -> bool:
    """Return whether all tensors have fewer than four dimensions, so that the first may be the sequence."""
    return all(t.ndim < 4 for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor))


def first_examples(inputs: CallInputs, count: int = 1) -> CallInputs:
    """Return the first examples of a batch, or `inputs` itself if it is not clear which dimension is the batch."""

    def holds_tensor_list(value: Any) -> bool:  # a list of images is a batch without a batch dimension
        if isinstance(value, (tuple, Mapping)):
            return any(map(holds_tensor_list, value.values() if isinstance(value, Mapping) else value))
        return not isinstance(value, Tensor) and any(isinstance(t, Tensor) for t in pytree.tree_leaves(value))

    values = [*inputs[0], *inputs[1].values()]
    has_tensor_list = any(map(holds_tensor_list, values))
    tensors = [t for t in pytree.tree_leaves(values) if isinstance(t, Tensor)]
    sizes = {t.shape[0] if t.ndim > 1 else None for t in tensors}
    if has_tensor_list or len(sizes) != 1 or None in sizes or sizes == {0}:
        return inputs
    with torch.no_grad():
        first: CallInputs = pytree.tree_map(lambda v: v[:count] if isinstance(v, Tensor) else v, inputs)
        return first
