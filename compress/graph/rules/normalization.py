"""Rules of norms, softmax, reductions, pooling and resizing: operators that combine positions of some dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..atoms import Atoms, BatchNormOutput, Mark, NormInput, TracedTensor
from .registry import RULES, OperatorCall, broadcast, freeze_dims, one_or_list, rule

BATCH_NORMS = (
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training _batch_norm_with_update "
    "_batch_norm_no_update cudnn_batch_norm miopen_batch_norm"
)


@rule(*BATCH_NORMS.split())
def batch_norm(atoms: Atoms, call: OperatorCall) -> TracedTensor:
    """Join channels with the norm's parameters and statistics."""
    x, weight = call["input"], call["weight"]
    if call["training"]:  # statistics over everything but the channel
        freeze_dims(atoms, x, [d for d in range(len(x.shape)) if d != 1], "is averaged over by a batch norm")
    vectors = [call[name] for name in ("weight", "bias", "running_mean", "running_var")]
    x = _selected_input(atoms, x, vectors)
    if x.atom_ids[1] is not None and not any(vectors):
        atoms.add_size_hint(x.shape[1], x.atom_ids[1])  # without tensors, only an attribute of the module has the width
    out = broadcast(atoms, [x, *_along_channels(vectors, len(x.shape))], x.shape)
    if isinstance(weight, TracedTensor) and weight.is_parameter:
        out.batch_norm = None if call["training"] else BatchNormOutput(weight.name, "")
        out.scales_with_rows = x.scales_with_rows and isinstance(call["bias"], TracedTensor)  # weight and bias scale
        out.keeps_zeros = isinstance(call["bias"], TracedTensor)  # gates of the norm's weight and bias are zero, too
        for vector in vectors[:2] if x.scales_with_rows else ():
            atoms.mark(vector and vector.atom_ids[0], Mark.BATCH_AFFINE)
    return out


def _selected_input(atoms: Atoms, x: TracedTensor, vectors: Sequence[TracedTensor | None]) -> TracedTensor:
    """Give the channels that a norm may select atoms of their own; `resolve_selections_` joins the others again."""
    given, module = x.atom_ids[1], atoms.current_module
    own = next((v for v in vectors if v is not None and v.is_parameter), None)
    if own is None or given is None or module is None:
        return x
    if module in atoms.selectable_norms | atoms.selective_norms:
        atoms.mark(own.atom_ids[0], Mark.WRITTEN)  # the group of what it selects has the name of the norm
    if module not in atoms.selectable_norms:
        return x
    selected = atoms.new(x.shape[1])
    atoms.norm_inputs.append(NormInput(module, own.name, given, selected))
    atom_ids = [selected if d == 1 else ids for d, ids in enumerate(x.atom_ids)]
    return replace(x, atom_ids=atom_ids, scales_with_rows=False, keeps_zeros=False)


def _along_channels(vectors: Sequence[TracedTensor | None], rank: int) -> list[TracedTensor]:
    """Shape vectors with one number per channel so that they broadcast against a tensor of this rank."""
    num_spatial = rank - 2
    return [
        TracedTensor((v.shape[0], *[1] * num_spatial), [v.atom_ids[0], *[None] * num_spatial], is_constant=True)
        for v in vectors
        if v
    ]


@rule("native_group_norm")
def group_norm(atoms: Atoms, call: OperatorCall) -> TracedTensor:
    """Join channels that share statistics; freeze all of them if there is one group only."""
    x, groups = call["input"], call["group"]
    if groups == 1:
        atoms.freeze(x.atom_ids[1], f"is mixed by a group norm over all {x.shape[1]} channels")
    elif (channels := x.atom_ids[1]) is not None:
        by_group = channels.reshape(groups, -1)
        atoms.join(np.broadcast_to(by_group[:, :1], by_group.shape), by_group)
        atoms.add_size_hint(groups, by_group[:, 0])
        atoms.add_size_hint(x.shape[1], channels)
    return broadcast(atoms, [x, *_along_channels([call["weight"], call["bias"]], len(x.shape))], x.shape)


@rule("native_layer_norm", "_fused_rms_norm")
def layer_norm(atoms: Atoms, call: OperatorCall) -> TracedTensor:
    """Join the normed dimension with the norm's parameters; freeze it unless the module has a compact form."""
    x = call["input"]
    affine = [t for t in (call["weight"], call["bias"]) if isinstance(t, TracedTensor)]
    normed_dims = range(len(x.shape) - len(call["normalized_shape"]), len(x.shape))
    can_be_cut = (
        atoms.current_module in atoms.compact_when_cut and len(normed_dims) == 1 and all(t.is_parameter for t in affine)
    )
    if not can_be_cut:
        norm = "a layer norm" if "layer" in call.op else "an RMS norm"
        freeze_dims(atoms, x, normed_dims, f"is mixed by {norm}")
    out = broadcast(atoms, [x, *affine], x.shape)
    if can_be_cut:  # with input, weight and bias at zero, the output is zero
        atoms.mark(x.atom_ids[-1], Mark.LAYER_NORMED)
        out.scales_with_rows, out.keeps_zeros = x.scales_with_rows, x.is_zero_with_rows
        for tensor in affine:
            atoms.mark(tensor.atom_ids[-1], Mark.AFFINE)
    return out


@rule("_softmax", "_safe_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp", "flip", "roll")
def mix_along(atoms: Atoms, call: OperatorCall) -> TracedTensor:
    """Freeze the dimensions whose positions are mixed."""
    x = call.input
    dims = call["dim"] if call["dim"] is not None else call["dims"]
    dims = range(len(x.shape)) if dims is None else [dims] if isinstance(dims, int) else dims
    freeze_dims(atoms, x, dims, f"is mixed by `{call.op}`")
    return TracedTensor(x.shape, list(x.atom_ids), is_constant=x.is_constant, contracted=x.contracted)


REDUCTIONS = (
    "mean sum amax amin max min argmax argmin var std var_mean std_mean prod all any norm linalg_vector_norm "
    "logsumexp median"
)
ZERO_OF_ZEROS = ("mean", "sum", "amax", "amin", "var", "std", "norm", "linalg_vector_norm")


@rule(*REDUCTIONS.split())
def reduce(atoms: Atoms, call: OperatorCall) -> TracedTensor | list[TracedTensor]:
    """Freeze the reduced dimensions, except for sums and norms of vectors, to which zeros add nothing."""
    tensors = call.tensors()
    if len(tensors) > 1:  # max(a, b) of two tensors
        return broadcast(atoms, tensors, call.shape)
    x, dims = call.input, call["dim"]
    if dims is None or dims == []:
        dims = range(len(x.shape))
    dims = {d % max(len(x.shape), 1) for d in ([dims] if isinstance(dims, int) else dims)}
    if call.op in ("linalg_vector_norm", "sum") and x.is_zero_with_rows:
        for d in dims:
            atoms.mark(x.atom_ids[d], Mark.CONTRACTED)
            atoms.mark(x.atom_ids[d], Mark.VECTOR_NORMED)
    else:
        freeze_dims(atoms, x, sorted(dims), f"is summed over by `{call.op}`")
    outputs = []
    for shape in call.shapes:
        keepdim = len(shape) == len(x.shape)
        atom_ids = [None if d in dims else ids for d, ids in enumerate(x.atom_ids) if d not in dims or keepdim]
        keeps_zeros = x.is_zero_with_rows and call.op in ZERO_OF_ZEROS
        outputs.append(TracedTensor(shape, atom_ids, is_constant=x.is_constant, keeps_zeros=keeps_zeros))
    return one_or_list(outputs)


POOLS = (
    "max_pool avg_pool adaptive_avg_pool adaptive_max_pool _adaptive_avg_pool fractional_max_pool upsample_nearest "
    "_upsample_nearest_exact upsample_bilinear upsample_linear upsample_bicubic upsample_trilinear "
    "_upsample_bilinear_aa _upsample_bicubic_aa grid_sampler_ reflection_pad replication_pad max_pool_with_indices"
)


def pool(atoms: Atoms, call: OperatorCall) -> TracedTensor | list[TracedTensor]:
    """Freeze the spatial dimensions, which are pooled, resized or padded, and leave the channels alone."""
    x = call.input
    num_spatial = int(next(c for c in call.op if c.isdigit()))
    freeze_dims(atoms, x, range(len(x.shape) - num_spatial, len(x.shape)), f"is resized by `{call.op}`")
    return one_or_list(
        [
            TracedTensor(
                shape,
                [*x.atom_ids[:-num_spatial], *[None] * num_spatial],
                is_constant=x.is_constant,
                keeps_zeros=x.is_zero_with_rows,
            )
            for shape in call.shapes
        ]
    )


for _name in POOLS.split():
    for _dims in "123":  # max_pool_with_indices -> max_pool2d_with_indices
        _pool, _with, _rest = _name.partition("_with")
        RULES[f"{_pool}{_dims}d{_with}{_rest}"] = pool
