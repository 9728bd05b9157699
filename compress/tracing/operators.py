"""What each ATen operator does to the dimensions of its tensors. An operator without a rule is a barrier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .atoms import Atoms, Labels, Value


@dataclass
class Call:
    """One operator of the graph: its arguments by name, with `Value`s for tensors, and the shapes it returns."""

    op: str
    args: dict[str, Any]
    shapes: list[tuple[int, ...]]

    def __getitem__(self, name: str) -> Any:
        return self.args.get(name)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shapes[0]

    @property
    def input(self) -> Value:
        return next(v for v in self.args.values() if isinstance(v, Value))

    def values(self) -> list[Value]:
        found: list[Value] = []
        for arg in self.args.values():
            found += [v for v in (arg if isinstance(arg, (list, tuple)) else [arg]) if isinstance(v, Value)]
        return found


Rule = Callable[[Atoms, Call], "Value | list[Value]"]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return add


def barrier(atoms: Atoms, call: Call, reason: str = "") -> list[Value]:
    """Freeze all that goes in; what comes out has fixed dimensions."""
    values = call.values()
    for value in values:
        for labels in value.labels:
            atoms.freeze(labels, reason or f"passes through `{call.op}`, which is not known to act channel by channel")
    constant = all(v.constant for v in values)
    return [Value.fixed(shape, constant) for shape in call.shapes]


def freeze_dims(atoms: Atoms, value: Value, dims: Sequence[int], reason: str) -> None:
    for d in dims:
        atoms.freeze(value.labels[d], reason)


def merge(atoms: Atoms, values: Sequence[Value], shape: tuple[int, ...]) -> Value:
    """Broadcast: positions that meet are joined; one that meets a fixed position is frozen."""
    out: list[Labels | None] = [None] * len(shape)
    for d in range(1, len(shape) + 1):
        here = [v for v in values if len(v.shape) >= d and v.shape[-d] == shape[-d] > 1]
        meeting = [v.labels[-d] for v in here if -d not in v.broad or all(-d in w.broad for w in here)]
        known = [labels for labels in meeting if labels is not None]
        for other in known[1:]:
            atoms.join(known[0], other)
        fixed = len(known) < len(meeting)
        if known and fixed:
            atoms.freeze(known[0], "meets a tensor of fixed size")
        out[-d] = known[0] if known and not fixed else None
    for value in values:
        if value.weight and len(values) > 1:
            for labels in value.labels:
                atoms.mark(labels, "written")
    return Value(shape, out, constant=all(v.constant for v in values))


def same(value: Value) -> Value:
    """The same numbers under another name: still a weight, still with a known mean."""
    return replace(value, labels=list(value.labels), broad=frozenset())


@rule(
    *[
        "alias",
        "clone",
        "contiguous",
        "detach",
        "dropout",
        "feature_dropout",
        "alpha_dropout",
        "to",
        "_to_copy",
        "lift_fresh",
        "lift_fresh_copy",
    ],
    *["type_as", "float", "half", "double", "bfloat16", "positive", "cpu", "cuda", "identity", "view_of"],
)
def unchanged(atoms: Atoms, call: Call) -> Value:
    return same(call.input)


@rule("new_zeros", "new_ones", "new_full", "new_empty")
def made(atoms: Atoms, call: Call) -> Value:
    """A fresh tensor that takes only its type from another."""
    return Value.fixed(call.shape, constant=True)


@rule("relu", "hardtanh")
def rectify(atoms: Atoms, call: Call) -> Value:
    value = call.input
    out = Value(value.shape, list(value.labels), constant=value.constant, rows=value.rows and call.op == "relu")
    if len(value.shape) > 2:
        atoms.mark(out.labels[-1], "tokens")
    if value.norm and not value.norm[1] and (call.op == "relu" or (call["min_val"] == 0 and call["max_val"] == 6)):
        out.norm = (value.norm[0], "relu" if call.op == "relu" else "relu6")
    return out


ELEMENTWISE = (
    "_prelu_kernel native_dropout add sub rsub subtract mul multiply div divide true_divide floor_divide pow square "
    "sqrt rsqrt exp expm1 log log1p abs neg sign sgn reciprocal sin cos tan tanh sigmoid hardsigmoid hardswish silu "
    "gelu elu selu celu relu6 leaky_relu rrelu softplus softsign mish log_sigmoid hardshrink softshrink threshold "
    "clamp clamp_min clamp_max clip maximum minimum where eq ne lt le gt ge logical_and logical_or logical_not "
    "bitwise_and bitwise_or bitwise_not __and__ __or__ erf round floor ceil trunc fmod remainder addcmul addcdiv lerp "
    "masked_fill isnan isinf isfinite nan_to_num zeros_like ones_like full_like empty_like rand_like randn_like "
    "bernoulli copy copysign atan2 sinc special_expit fill zero logaddexp xlogy heaviside"
)


@rule(*ELEMENTWISE.split())
def elementwise(atoms: Atoms, call: Call) -> Value:
    values = call.values()
    out = merge(atoms, values, call.shape)
    out.product = next((v.product for v in values if v.product is not None), None)
    out.rows = _still_rows(atoms, call, values)
    if call.op == "add" and sum(not v.constant for v in values) > 1:
        for labels in out.labels:
            atoms.mark(labels, "added")
    if len(call.shape) > 2:
        atoms.mark(out.labels[-1], "tokens")
    return out


def _still_rows(atoms: Atoms, call: Call, values: Sequence[Value]) -> bool:
    """Whether a factor on the rows that wrote one of the values is still one on the result."""
    wrote = [v for v in values if v.rows]
    if call.op in ("native_dropout", "neg"):
        return bool(wrote)
    if call.op in ("add", "sub"):
        return len(wrote) == len(values)
    if len(wrote) != 1 or call.op not in ("mul", "multiply", "div", "divide", "true_divide"):
        return False
    for value in values:
        if value.weight:  # a factor itself: where a score stands it is not wanted twice
            for labels in value.labels:
                atoms.mark(labels, "factor")
                atoms.mark(labels, "affine")
    return call.op in ("mul", "multiply") or wrote[0] is call["self"]


BATCH_NORMS = (
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training _batch_norm_with_update "
    "_batch_norm_no_update cudnn_batch_norm miopen_batch_norm"
)


@rule(*BATCH_NORMS.split())
def batch_norm(atoms: Atoms, call: Call) -> Value:
    x, weight = call["input"], call["weight"]
    if call["training"]:  # statistics over everything but the channel
        freeze_dims(atoms, x, [d for d in range(len(x.shape)) if d != 1], "is averaged over by a batch norm")
    affine = [call[name] for name in ("weight", "bias", "running_mean", "running_var")]
    if x.labels[1] is not None and not any(affine):
        atoms.hint(x.shape[1], x.labels[1])  # only the module's own number tells its width
    out = merge(atoms, [x, *_along_channels(affine, len(x.shape))], x.shape)
    if isinstance(weight, Value) and weight.weight:
        out.norm = None if call["training"] else (weight.name, "")
        out.rows = x.rows and isinstance(call["bias"], Value)  # weight and bias zero: zero out
    return out


def _along_channels(vectors: Sequence[Value | None], rank: int) -> list[Value]:
    """Vectors with one number per channel, shaped to broadcast against a tensor of this rank."""
    rest = rank - 2
    return [Value((v.shape[0], *[1] * rest), [v.labels[0], *[None] * rest], constant=True) for v in vectors if v]


@rule("native_group_norm")
def group_norm(atoms: Atoms, call: Call) -> Value:
    """Channels that share statistics go together; where all of them do, nothing can go."""
    x, groups = call["input"], call["group"]
    if groups == 1:
        atoms.freeze(x.labels[1], f"is mixed by a group norm over all {x.shape[1]} channels")
    elif (channels := x.labels[1]) is not None:
        together = channels.reshape(groups, -1)
        atoms.join(np.broadcast_to(together[:, :1], together.shape), together)
        atoms.hint(groups, together[:, 0])
        atoms.hint(x.shape[1], channels)
    return merge(atoms, [x, *_along_channels([call["weight"], call["bias"]], len(x.shape))], x.shape)


@rule("native_layer_norm", "_fused_rms_norm")
def layer_norm(atoms: Atoms, call: Call) -> Value:
    x = call["input"]
    affine = [v for v in (call["weight"], call["bias"]) if isinstance(v, Value)]
    over = range(len(x.shape) - len(call["normalized_shape"]), len(x.shape))
    kept = atoms.where in atoms.later and len(over) == 1 and all(v.weight for v in affine)
    if not kept:
        freeze_dims(atoms, x, over, "is mixed by a layer norm" if "layer" in call.op else "is mixed by an RMS norm")
    out = merge(atoms, [x, *affine], x.shape)
    if kept:  # zero in, and weight and bias zero: zero out
        atoms.mark(x.labels[-1], "normed")
        out.rows = x.rows
        for value in affine:
            atoms.mark(value.labels[-1], "affine")
    return out


@rule("_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp", "flip", "roll")
def mix_along(atoms: Atoms, call: Call) -> Value:
    x = call.input
    dims = call["dim"] if call["dim"] is not None else call["dims"]
    dims = range(len(x.shape)) if dims is None else [dims] if isinstance(dims, int) else dims
    freeze_dims(atoms, x, dims, f"is mixed by `{call.op}`")
    return Value(x.shape, list(x.labels), constant=x.constant, product=x.product)


REDUCTIONS = (
    "mean sum amax amin max min argmax argmin var std var_mean std_mean prod all any norm linalg_vector_norm "
    "logsumexp median"
)


@rule(*REDUCTIONS.split())
def reduce(atoms: Atoms, call: Call) -> Value | list[Value]:
    values = call.values()
    if len(values) > 1:  # max(a, b) of two tensors
        return merge(atoms, values, call.shape)
    x, dims = call.input, call["dim"]
    if dims is None or dims == []:
        dims = range(len(x.shape))
    dims = {d % max(len(x.shape), 1) for d in ([dims] if isinstance(dims, int) else dims)}
    if call.op == "linalg_vector_norm" and x.rows:  # what is zero adds nothing to a norm
        for d in dims:
            atoms.mark(x.labels[d], "product")
            atoms.mark(x.labels[d], "bent")
    else:
        freeze_dims(atoms, x, sorted(dims), f"is summed over by `{call.op}`")
    out = [
        Value(
            shape,
            [
                None if d in dims else x.labels[d]
                for d in range(len(x.shape))
                if d not in dims or len(shape) == len(x.shape)
            ],
            constant=x.constant,
        )
        for shape in call.shapes
    ]
    return out[0] if len(out) == 1 else out


POOLS = (
    "max_pool avg_pool adaptive_avg_pool adaptive_max_pool _adaptive_avg_pool fractional_max_pool upsample_nearest "
    "_upsample_nearest_exact upsample_bilinear upsample_linear upsample_bicubic upsample_trilinear "
    "_upsample_bilinear_aa _upsample_bicubic_aa grid_sampler_ reflection_pad replication_pad max_pool_with_indices"
)


def pool(atoms: Atoms, call: Call) -> Value | list[Value]:
    """Pooling, resizing and padding with own values act on the last dimensions and leave the channels alone."""
    x = call.input
    spatial = int(next(c for c in call.op if c.isdigit()))
    freeze_dims(atoms, x, range(len(x.shape) - spatial, len(x.shape)), f"is resized by `{call.op}`")
    out = [Value(s, [*x.labels[:-spatial], *[None] * spatial], constant=x.constant) for s in call.shapes]
    return out[0] if len(out) == 1 else out


for _name in POOLS.split():
    for _dims in "123":
        _kind, _with, _rest = _name.partition("_with")
        RULES[f"{_kind}{_dims}d{_with}{_rest}"] = pool
