"""Compare the outputs of the masked reference and the sliced model on the traced inputs."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compress.graph import Groups, TracedPart
from compress.modules import module_mode, modules_of, shared_copy, tensor_entries, tensors_in

from .masking import kept_input_columns, masked_reference, rescale_factor
from .plan import Plan
from .slicing import rescale_, slice_

NO_OUTPUT_NOTE = (
    "the model returns no tensors on the example inputs: the pruned model was verified to run, not to compute the same"
)
INTEGER_OUTPUT_NOTE = (
    "the model returns only integers, which hide small differences: let it return the values they are computed from"
)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}


@dataclass(frozen=True)
class RunFailure:
    """The model does not run."""

    reason: str
    module: str = ""  # the innermost module at work, if known


@dataclass(frozen=True)
class OutputDifference:
    """The outputs of the masked reference and the sliced model differ."""

    reason: str


class NoFiniteOutput(OutputDifference):
    """The outputs cannot be compared, whatever is cut."""


Problem: TypeAlias = RunFailure | OutputDifference


@torch.no_grad()
def compare_masked_and_sliced(
    model: nn.Module, groups: Groups, plan: Plan, dtype: torch.dtype | None
) -> Problem | None:
    """Return how the outputs of the sliced model and the masked reference differ, or None if they agree.

    Both run on shared copies with constant tensors randomized.

    Args:
        model: the dense model, which is not changed.
        groups: its groups; a note is added if the outputs say little.
        plan: the cut to verify.
        dtype: the precision to run in; None for that of the model.
    """
    model = shared_copy(model)
    _replace_tensors_(model, _constant_vector_randomizer())
    # The sliced model runs first: it is cheap and may fail.
    sliced_outputs = run_sliced(model, groups, plan, dtype)
    if isinstance(sliced_outputs, RunFailure):
        return sliced_outputs
    _cast_(model, dtype)
    with masked_reference(model, groups, plan):
        try:
            expected_outputs = [_run(model, part, dtype) for part in _parts_to_run(groups, plan)]
        except Exception as error:
            return RunFailure(f"the masked reference does not run: {type(error).__name__}: {str(error)[:160]}")
    nonempty = [t for outputs in expected_outputs for t in outputs if t.numel()]
    floats = [t for t in nonempty if t.is_floating_point() or t.is_complex()]
    if floats and not any(bool(t.isfinite().any()) for t in floats):
        return NoFiniteOutput("no output on the example inputs is finite, so nothing can be verified: look for NaN")
    if not floats and (note := INTEGER_OUTPUT_NOTE if nonempty else NO_OUTPUT_NOTE) not in groups.notes:
        groups.notes.append(note)
    for expected, sliced in zip(expected_outputs, sliced_outputs, strict=True):
        if len(expected) != len(sliced):
            return OutputDifference(f"zeroed and sliced outputs differ: {len(expected)} tensors became {len(sliced)}")
        for a, b in zip(expected, sliced, strict=True):
            if a.shape != b.shape:
                shapes = f"{list(a.shape)} became {list(b.shape)}"
                return OutputDifference(f"zeroed and sliced outputs differ in shape: {shapes}")
            if (difference := _relative_difference(a, b)) > TOLERANCE.get(a.dtype.to_real(), 3e-2):
                return OutputDifference(f"zeroed and sliced outputs differ by {difference:.1e} of their range")
    return None


@torch.no_grad()
def run_sliced(
    model: nn.Module, groups: Groups, plan: Plan, dtype: torch.dtype | None
) -> list[list[Tensor]] | RunFailure:
    """Slice a shared copy of the model and run it, with kept input columns rescaled as in the masked reference."""
    model = shared_copy(model)
    columns = kept_input_columns(model, groups, plan)
    # Cast after slicing: the sliced tensors are small.
    modules = modules_of(_cast_(slice_(model, replace(plan, scales=[])), dtype))
    rescale_(model, plan)
    for path, kept in columns.items():
        if path in modules and (weight := modules[path]._parameters.get("weight")) is not None:
            weight.mul_(rescale_factor(plan.shapes[f"{path}.weight"][1], kept))
    try:
        return [_run(model, part, dtype) for part in _parts_to_run(groups, plan)]
    except Exception as error:  # from the model's own code, at a width it was not written for
        module = _failing_module(error, model)
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        return RunFailure(f"the code of {module or 'the model'} does not run at another width: {text}", module)


def _parts_to_run(groups: Groups, plan: Plan) -> list[TracedPart]:
    """Return the traced parts that the plan cuts."""
    return [p for p in groups.parts if not p.name or any(t.startswith(f"{p.name}.") for t in plan.slices)]


def _relative_difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference relative to the largest absolute value; NaN only equals NaN."""
    if not a.numel():
        return 0.0
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if not a.is_floating_point():
        return float((a != b).any())
    if not a.isnan().equal(b.isnan()):
        return math.inf
    scale = a.nan_to_num().abs().max() + 1e-30
    return float(((a - b).nan_to_num().abs() / scale).max())


def model_runs(model: nn.Module, parts: Sequence[TracedPart]) -> bool:
    """Return whether the uncut model runs on the inputs of these parts."""
    model = shared_copy(model)
    try:
        return bool([_run(model, part, None) for part in parts])
    except Exception:  # from the model's own code
        return False


def _replace_tensors_(model: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace the float tensors of a shared copy by `change(tensor)`; the original model keeps its own."""
    new: dict[int, Tensor] = {}
    for table, key, tensor in tensor_entries(model):
        if not tensor.is_floating_point():
            continue
        if id(tensor) not in new:
            value = change(tensor)
            wrap = isinstance(tensor, nn.Parameter) and value is not tensor
            new[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if wrap else value
        table[key] = new[id(tensor)]


def _cast_(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Cast the float tensors of a shared copy; None leaves them as they are."""
    if dtype is not None:
        _replace_tensors_(model, lambda value: value.detach().to(dtype))
    return model


def _constant_vector_randomizer() -> Callable[[Tensor], Tensor]:
    """Return a function that randomizes constant tensors: norms or layer scales at zero or one would hide an error."""
    generator = torch.Generator().manual_seed(0)

    def randomize(value: Tensor) -> Tensor:
        if not 1 < value.numel() <= 2**17:
            return value
        flat = value.detach().flatten()
        if bool(flat[0] == flat[-1]) and bool((flat == flat[0]).all()):
            return (0.5 + torch.rand(value.shape, generator=generator)).to(value)
        return value

    return randomize


def _failing_module(error: Exception, model: nn.Module) -> str:
    """Return the innermost module whose code raised the error, or an empty string."""
    names = {id(module): name for name, module in model.named_modules()}
    frames = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    active = [names[id(module)] for module in frames if id(module) in names]
    return active[-1] if active else ""


def _run(model: nn.Module, part: TracedPart, dtype: torch.dtype | None) -> list[Tensor]:
    """Return the output tensors of a traced part on its inputs, with a fixed random seed."""

    def cast(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        return t.to(dtype) if dtype is not None and t.is_floating_point() else t.clone()

    module = model.get_submodule(part.name)
    args, kwargs = pytree.tree_map(cast, (part.args, dict(part.kwargs)))
    with torch.no_grad(), module_mode(module, part.training), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed_all(0)
        return tensors_in(module(*args, **kwargs))
