"""find_groups: trace a model, build its groups, select those of the target, and verify them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compress.errors import TraceError
from compress.graph import (
    AttentionMode,
    Groups,
    attention_modes,
    build_groups,
    explain_refused_gates_,
    gate_before_activation_,
    included_modules,
    select_groups_,
    split_by_head_,
    trace_model,
)
from compress.modules import CallInputs, as_call_inputs, first_examples, has_no_images, prepare_example_input
from compress.recipe import Target

from .verify import verify_branches, verify_groups


def find_groups(model: nn.Module, example_inputs: Any, target: Target | None = None) -> Groups:
    """Return the groups of `model` that can be cut exactly.

    Costs are those of a single example, or of the whole input if its first dimension is not the batch (sequence first).
    Groups are verified on two examples if there are two.

    Args:
        model: the dense model.
        example_inputs: what the model is called with: a tensor, a tuple of arguments, a dict of named arguments, or a
            list that is the only argument.
        target: which kinds of dimensions to look for; the default is channels and residual streams.

    Raises:
        TraceError: the model does not run on the example inputs.
        ValueError: a name in `target` matches nothing.
        TypeError: `model` is not a module, or `target` is not a Target.
    """
    for argument, value, kind, expected in (
        ("model", model, nn.Module, "torch.nn.Module"),
        ("target", target, Target | None, "compress.recipe.Target"),
    ):
        if not isinstance(value, kind):
            got = f"the class {value.__name__}" if isinstance(value, type) else f"{type(value).__name__} {value!r:.60}"
            raise TypeError(f"{argument}: expected a {expected}; got {got}")
    with torch.inference_mode(False):
        inputs = pytree.tree_map(prepare_example_input, as_call_inputs(example_inputs))
        return _find_groups(model, inputs, target or Target(residual=True))


def _find_groups(model: nn.Module, inputs: CallInputs, target: Target) -> Groups:
    modes = attention_modes(target)

    num_passes = 0

    def trace(inputs: CallInputs, whole_heads: bool, eval_only: bool = False) -> Groups:
        nonlocal num_passes
        args, kwargs = inputs
        traced = trace_model(
            model,
            args,
            kwargs,
            target.one_path,
            included_modules(model, target),
            whole_heads=whole_heads,
            separate_qkv=bool({AttentionMode.QK, AttentionMode.V} & modes),
            selection=target.selection,
            eval_only=eval_only,
        )
        num_passes += traced.num_passes
        return build_groups(model, traced)

    traced_inputs = first_examples(inputs)
    has_batch = traced_inputs is not inputs and any(
        len(t) > 1 for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor)
    )
    two_examples = first_examples(inputs, 2) if has_batch else None
    whole_heads = AttentionMode.HEADS in modes
    try:
        groups = trace(traced_inputs, whole_heads)
        if two_examples is not None and has_no_images(inputs):
            macs_of_two = _dense_macs(trace(two_examples, whole_heads, eval_only=True))
            if macs_of_two != 2 * _dense_macs(groups):
                raise TraceError("the first dimension is not the batch")
    except TraceError:  # the model may not run on a single example
        traced_inputs, two_examples = inputs, None
        groups = trace(inputs, whole_heads)
    select_groups_(groups, model, target)
    if AttentionMode.PER_HEAD in modes:
        tensors = [*model.named_parameters(), *model.named_buffers()]
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors}
        split_by_head_(groups, trace(traced_inputs, whole_heads=True, eval_only=True), shapes)
    moved = gate_before_activation_(groups) if target.mlp == "before_activation" else []
    groups.num_passes = num_passes
    verify_groups(model, groups, two_examples, reserved_passes=2 if target.branches else 0)
    if target.branches:
        verify_branches(model, groups)
    explain_refused_gates_(groups, moved)
    return groups


def _dense_macs(groups: Groups) -> int:
    return int(groups.cost.macs(groups.cost.widths))
