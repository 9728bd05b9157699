"""Rules of operators that act on each position alone, with broadcasting."""

from __future__ import annotations

from collections.abc import Sequence

from ..atoms import Atoms, BatchNormOutput, Mark, TracedTensor
from .registry import OperatorCall, alias, broadcast, rule

UNCHANGED = (
    "alias clone contiguous detach dropout feature_dropout alpha_dropout to _to_copy lift_fresh lift_fresh_copy "
    "type_as float half double bfloat16 positive cpu cuda identity view_of"
)


@rule(*UNCHANGED.split())
def unchanged(atoms: Atoms, call: OperatorCall) -> TracedTensor:
    """Pass the input on."""
    return alias(call.input)


@rule("new_zeros", "new_ones", "new_full", "new_empty")
def new_tensor(atoms: Atoms, call: OperatorCall) -> TracedTensor:
    """Create a tensor that takes only its type and device from another."""
    return TracedTensor.fixed(call.shape, is_constant=True)


@rule("relu", "hardtanh")
def rectify(atoms: Atoms, call: OperatorCall) -> TracedTensor:
    """Rectify: a batch norm before it stays known, and a ReLU keeps positive factors."""
    x = call.input
    out = TracedTensor(
        x.shape,
        list(x.atom_ids),
        is_constant=x.is_constant,
        scales_with_rows=x.scales_with_rows and call.op == "relu",
        keeps_zeros=x.is_zero_with_rows and (call.op == "relu" or call["min_val"] <= 0 <= call["max_val"]),
    )
    if len(x.shape) > 2:
        atoms.mark(out.atom_ids[-1], Mark.TOKENS)
    is_relu6 = call["min_val"] == 0 and call["max_val"] == 6
    if x.batch_norm and not x.batch_norm.activation and (call.op == "relu" or is_relu6):
        out.batch_norm = BatchNormOutput(x.batch_norm.weight, "relu" if call.op == "relu" else "relu6")
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


_ZERO_AT_ZERO = (
    "native_dropout neg abs square sqrt sign sgn sin tan tanh erf expm1 log1p hardswish silu gelu elu selu celu relu6 "
    "leaky_relu rrelu _prelu_kernel softsign mish hardshrink softshrink round floor ceil trunc nan_to_num"
)
ZERO_AT_ZERO = frozenset(_ZERO_AT_ZERO.split())
SUMS = ("add", "sub", "subtract")
PRODUCTS = ("mul", "multiply")
QUOTIENTS = ("div", "divide", "true_divide")


@rule(*ELEMENTWISE.split())
def elementwise(atoms: Atoms, call: OperatorCall) -> TracedTensor:
    """Join the positions that broadcasting brings together."""
    tensors = call.tensors()
    out = broadcast(atoms, tensors, call.shape)
    out.contracted = next((t.contracted for t in tensors if t.contracted is not None), None)
    out.scales_with_rows = _scales_with_rows(atoms, call, tensors)
    out.keeps_zeros = _keeps_zeros(call, tensors, out)
    if call.op == "add" and sum(not t.is_constant for t in tensors) > 1:
        for atom_ids in out.atom_ids:
            atoms.mark(atom_ids, Mark.ADDED)
    if len(call.shape) > 2:
        atoms.mark(out.atom_ids[-1], Mark.TOKENS)
    return out


def _scales_with_rows(atoms: Atoms, call: OperatorCall, tensors: Sequence[TracedTensor]) -> bool:
    """Return whether a factor on the rows that wrote one of the tensors is still a factor on the result."""
    scaling = [t for t in tensors if t.scales_with_rows]
    if call.op in ("native_dropout", "neg"):
        return bool(scaling)
    if call.op in SUMS:
        only_tensors = isinstance(call["other"], TracedTensor)
        return bool(scaling) and only_tensors and all(t.scales_with_rows or _is_bias(t, scaling[0]) for t in tensors)
    if call.op not in (*PRODUCTS, *QUOTIENTS):
        return False
    if sum(t.is_zero_with_rows for t in tensors) == 1:
        for tensor in tensors:
            if tensor.is_parameter:  # it multiplies rows that carry the score already, so it must not carry it again
                for atom_ids in tensor.atom_ids:
                    atoms.mark(atom_ids, Mark.FACTOR)
                    atoms.mark(atom_ids, Mark.AFFINE)
    return len(scaling) == 1 and (call.op in PRODUCTS or scaling[0] is call["self"])


def _keeps_zeros(call: OperatorCall, tensors: Sequence[TracedTensor], out: TracedTensor) -> bool:
    """Return whether the result is zero where the rows and biases that wrote one of the tensors are zero."""
    zero = [t for t in tensors if t.is_zero_with_rows]
    if call.op in ZERO_AT_ZERO:
        return bool(zero)
    if call.op in SUMS:
        only_tensors = isinstance(call["other"], TracedTensor)
        return bool(zero) and only_tensors and all(t.is_zero_with_rows or _is_bias(t, zero[0]) for t in tensors)
    if call.op in PRODUCTS:
        return any(_has_all_atoms_of(t, out) for t in zero)
    if call.op in QUOTIENTS:
        return any(t is call["self"] and _has_all_atoms_of(t, out) for t in zero)
    return False


def _has_all_atoms_of(tensor: TracedTensor, out: TracedTensor) -> bool:
    """Return whether a tensor has positions of its own along each dimension of the result that can be cut."""
    dims = [d - len(out.shape) for d, atom_ids in enumerate(out.atom_ids) if atom_ids is not None]
    return all(-d <= len(tensor.shape) and tensor.atom_ids[d] is not None for d in dims)


def _is_bias(tensor: TracedTensor, written: TracedTensor) -> bool:
    """Return whether a tensor is a parameter with a number for each row that wrote the other, gated with these rows."""
    dims = [d - len(written.shape) for d, atom_ids in enumerate(written.atom_ids) if atom_ids is not None]
    return tensor.is_parameter and all(-d <= len(tensor.shape) and tensor.atom_ids[d] is not None for d in dims)
