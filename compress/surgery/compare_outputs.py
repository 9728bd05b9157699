"""Run the masked reference and the sliced model on the traced inputs and compare their outputs."""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compress.graph import Groups, TracedPart
from compress.modules import module_mode, modules_of, shared_copy, tensors_in

from .double_precision import double_precision
from .masking import kept_input_columns, masked_reference, rescale_factor
from .perturbation import replace_tensors_
from .plan import Plan
from .slicing import rescale_, slice_

NO_OUTPUT_NOTE = (
    "the model returns no tensors on the example inputs: the pruned model was verified to run, not to compute the same"
)
INTEGER_OUTPUT_NOTE = (
    "the model returns only integers, which hide small differences: let it return the values they are computed from"
)
ROUNDING_NOTE = (
    "the outputs of the whole model depend on rounding, as those of detectors with equal scores do: its parts were "
    "verified, and the pruned model was verified to run, not to compute the same"
)
NUDGE, NUM_NUDGES = 1e-12, 4  # relative changes of the inputs, to see whether outputs depend on rounding
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
HUGE = 1e30  # code masks positions with larger values, such as the lowest float of a dtype; they count as infinite
LEAST_PART = 1e-3  # the scale of a part of a tensor is at least this fraction of the scale of the whole


@dataclass(frozen=True)
class RunFailure:
    """The model does not run."""

    reason: str
    module: str = ""  # the innermost module at work, if known
    part: TracedPart | None = None  # what was run; None if the model cannot be sliced
    is_of_reference: bool = False  # the masked reference does not run


@dataclass(frozen=True)
class OutputDifference:
    """The outputs of the masked reference and the sliced model differ."""

    reason: str
    part: TracedPart | None = None


class NoFiniteOutput(OutputDifference):
    """No output is finite, so outputs cannot be compared, whatever is cut."""


Problem: TypeAlias = RunFailure | OutputDifference


@torch.no_grad()
def compare_masked_and_sliced(
    model: nn.Module,
    groups: Groups,
    plan: Plan,
    dtype: torch.dtype | None,
    parts: Sequence[TracedPart] | None = None,
) -> Problem | None:
    """Return how the outputs of the sliced model and the masked reference differ, or None if they agree.

    Forward passes of the whole model are counted in `groups.num_passes`.

    Args:
        model: a shared copy of the dense model, perturbed; it is unchanged afterwards.
        groups: its groups; a note is added if the model returns only integers, or no tensors.
        plan: the cut to verify.
        dtype: the precision to run in; None for that of the model.
        parts: what to run; default: the traced parts that the plan cuts.
    """
    if parts is None:
        parts = parts_to_run(groups, plan)
    try:
        sliced = sliced_copy(model, groups, plan, dtype)
    except Exception as error:  # the code of a module does not accept the new value of an attribute
        return RunFailure(f"the model cannot be sliced: {type(error).__name__}: {' '.join(str(error).split())[:160]}")
    compared: list[tuple[TracedPart, list[Tensor], list[Tensor]]] = []
    with masked_reference(model, groups, plan, dtype):
        for part in parts:  # one after the other, so that a failure takes no more passes than necessary
            try:  # the sliced model runs first: it is cheap and may fail
                groups.num_passes += not part.name
                outputs = run_part(sliced, part, dtype)
            except Exception as error:  # from the model's own code, at a width it was not written for
                return replace(run_failure(error, sliced), part=part)
            try:
                groups.num_passes += not part.name
                expected = run_part(model, part, dtype)
            except Exception as error:
                reason = f"the masked reference does not run: {type(error).__name__}: {str(error)[:160]}"
                return RunFailure(reason, part=part, is_of_reference=True)
            compared.append((part, expected, outputs))
            if _has_finite_floats(expected) and (difference := describe_difference(expected, outputs)) is not None:
                return OutputDifference(difference, part)
    nonempty = [t for _, expected, _ in compared for t in expected if t.numel()]
    has_floats = any(t.is_floating_point() or t.is_complex() for t in nonempty)
    if has_floats and not _has_finite_floats(nonempty):
        return NoFiniteOutput("no output on the example inputs is finite, so nothing can be verified: look for NaN")
    if not has_floats and (note := INTEGER_OUTPUT_NOTE if nonempty else NO_OUTPUT_NOTE) not in groups.notes:
        groups.notes.append(note)
    for part, expected, outputs in compared:
        if not _has_finite_floats(expected) and (difference := describe_difference(expected, outputs)) is not None:
            return OutputDifference(difference, part)
    return None


def _has_finite_floats(tensors: Sequence[Tensor]) -> bool:
    """Return whether one of the tensors holds a finite float."""
    floats = [t for t in tensors if t.is_floating_point() or t.is_complex()]
    return any(bool(t.isfinite().any()) for t in floats)


def sliced_copy(model: nn.Module, groups: Groups, plan: Plan, dtype: torch.dtype | None) -> nn.Module:
    """Slice a shared copy of the model, with kept input columns rescaled as in the masked reference."""
    model = shared_copy(model)
    columns = kept_input_columns(model, groups, plan)
    slice_(model, replace(plan, scales=[]))
    if dtype is not None:  # after slicing: the sliced tensors are small
        replace_tensors_(model, lambda value: value.detach().to(dtype))
    rescale_(model, plan)
    modules = modules_of(model)
    for path, kept in columns.items():
        if path in modules and (weight := modules[path]._parameters.get("weight")) is not None:
            with torch.no_grad():
                weight.mul_(rescale_factor(plan.shapes[f"{path}.weight"][1], kept))
    return model


def run_failure(error: Exception, model: nn.Module) -> RunFailure:
    """Describe an error of the model's own code."""
    module = _failing_module(error, model)
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return RunFailure(f"the code of {module or 'the model'} does not run at another width: {text}", module)


def parts_to_run(groups: Groups, plan: Plan) -> list[TracedPart]:
    """Return the traced parts that the plan cuts."""
    return [p for p in groups.parts if not p.name or any(t.startswith(f"{p.name}.") for t in plan.slices)]


def describe_difference(expected: Sequence[Tensor], sliced: Sequence[Tensor]) -> str | None:
    """Return how outputs differ, or None if they agree up to rounding."""
    if len(expected) != len(sliced):
        return f"zeroed and sliced outputs differ: {len(expected)} tensors became {len(sliced)}"
    for a, b in zip(expected, sliced, strict=True):
        if a.shape != b.shape:
            return f"zeroed and sliced outputs differ in shape: {list(a.shape)} became {list(b.shape)}"
        if (difference := relative_difference(a, b)) > TOLERANCE.get(a.dtype.to_real(), 3e-2):
            return f"zeroed and sliced outputs differ by {difference:.1e} of their range"
    return None


def relative_difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference, relative to the scale of the part of the tensor where it is.

    NaN, infinities and huge values, with which code masks positions, must be the same in both, and set no scale.
    """
    if not a.numel():
        return 0.0
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if not a.is_floating_point():
        return float((a != b).any())
    # The limit grows with the median: if most values are large, as after many layers, they do not stand for infinity.
    huge = max(HUGE, HUGE * float(a.nan_to_num(0, 0, 0).abs().median()))
    is_special = ~(a.abs() < huge)
    if not is_special.equal(~(b.abs() < huge)):
        return math.inf
    if bool(is_special.any()):
        tolerance = TOLERANCE.get(a.dtype, 3e-2)
        if not torch.allclose(a[is_special], b[is_special], rtol=tolerance, equal_nan=True):
            return math.inf
        a, b = a.masked_fill(is_special, 0), b.masked_fill(is_special, 0)
    return float(((a - b).abs() / _scale_of_parts(a)).max())


def _scale_of_parts(tensor: Tensor) -> Tensor:
    """Return the scale of each position: the largest absolute value in the part of the tensor that it belongs to.

    The part is all positions with the same index in dimension 1 (the channel), or in the last dimension, whichever has
    the smaller scale. So coordinates in pixels and scores in one tensor have scales of their own. In less than double
    precision, rounding errors of large parts reach small ones, so the whole tensor has one scale.
    """
    magnitude = tensor.abs()
    scale = magnitude.max()
    if tensor.ndim > 1 and tensor.dtype is torch.float64:
        by_dim = [
            magnitude.amax([d for d in range(tensor.ndim) if d != kept], keepdim=True) for kept in (1, -1 % tensor.ndim)
        ]
        scale = torch.minimum(*by_dim).clamp_min(scale * LEAST_PART)
    return scale + 1e-30


def depends_on_rounding(model: nn.Module, groups: Groups, plan: Plan, part: TracedPart) -> bool:
    """Return whether the masked reference gives other outputs on inputs that differ by as little as rounding does.

    Code that sorts boxes and drops those below a threshold may do so where scores are equal, or close to it.
    """
    with masked_reference(model, groups, plan, torch.float64):
        expected = run_part(model, part, torch.float64)
        nudged = (run_part(model, _nudge(part, seed), torch.float64) for seed in range(NUM_NUDGES))
        return any(describe_difference(expected, outputs) is not None for outputs in nudged)


def _nudge(part: TracedPart, seed: int) -> TracedPart:
    """Return a traced part whose inputs differ by as little as rounding errors in double precision add up to."""
    generator = torch.Generator().manual_seed(seed)

    def nudge(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.device)
        return value.double() * (1 + NUDGE * noise)

    args, kwargs = pytree.tree_map(nudge, (tuple(part.args), dict(part.kwargs)))
    return replace(part, args=args, kwargs=kwargs)


def model_runs(model: nn.Module, parts: Sequence[TracedPart], dtype: torch.dtype | None) -> bool:
    """Return whether the uncut model runs on the inputs of these parts in this precision."""
    model = shared_copy(model)
    try:
        if dtype is not None:
            replace_tensors_(model, lambda value: value.detach().to(dtype))
        return bool([run_part(model, part, dtype) for part in parts])
    except Exception:  # from the model's own code
        return False


def _failing_module(error: Exception, model: nn.Module) -> str:
    """Return the innermost module whose code raised the error, or an empty string."""
    names = {id(module): name for name, module in model.named_modules()}
    frames = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    active = [names[id(module)] for module in frames if id(module) in names]
    return active[-1] if active else ""


def run_part(model: nn.Module, part: TracedPart, dtype: torch.dtype | None) -> list[Tensor]:
    """Return the output tensors of a traced part on its inputs."""
    return run_module(model.get_submodule(part.name), part.args, part.kwargs, part.training, dtype)


def run_module(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], training: bool, dtype: torch.dtype | None
) -> list[Tensor]:
    """Return the output tensors of a module, with a fixed random seed; inputs are cast or cloned."""
    cast_args, cast_kwargs = pytree.tree_map(lambda value: cast_input(value, dtype), (tuple(args), dict(kwargs)))
    with module_mode(module, training), fixed_conditions(dtype):
        return tensors_in(module(*cast_args, **cast_kwargs))


@contextlib.contextmanager
def fixed_conditions(dtype: torch.dtype | None) -> Iterator[None]:
    """Run without gradients, with a fixed random seed, and entirely in double precision if `dtype` is float64."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.default_generator.manual_seed(0)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed_all(0)
        if dtype is torch.float64:
            stack.enter_context(double_precision())
        yield


def cast_input(value: Any, dtype: torch.dtype | None) -> Any:
    """Return a copy of a tensor, in this precision if it holds floats; return any other value itself."""
    if not isinstance(value, Tensor):
        return value
    return value.to(dtype if value.is_floating_point() else None, copy=True)
