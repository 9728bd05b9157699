"""Compare the outputs of a file with those of the model; a file that differs is not written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import ExportError, ParityError
from .flat_model import FlatModel
from .runtime import OnnxRunner

TOLERANCE, HALF_TOLERANCE = 1e-4, 1e-2  # relative to an output's largest number
NEGLIGIBLE = 1e-9  # absolute differences up to this pass: rounding leaves them where large numbers cancel

NamedInputs = tuple[str, list[Tensor]]  # a description for messages, and the input tensors


@dataclass(frozen=True)
class Difference:
    """The difference between file and model in one output on one input."""

    inputs: str
    output: str
    abs: float
    rel: float  # relative to the largest number of the model's output

    def within(self, tolerance: float) -> bool:
        return self.rel <= tolerance or self.abs <= NEGLIGIBLE


@torch.no_grad()
def compare_outputs(
    flat_model: FlatModel, runner: OnnxRunner, output_names: Sequence[str], batches: Iterable[NamedInputs]
) -> list[tuple[Difference, list[Tensor]]]:
    """Run model and file on each input; return the difference of each output, with the input.

    Raises:
        ExportError: the model itself does not run on one of the inputs.
        ParityError: number, shape or dtype of the outputs differ.
    """
    differences = []
    for name, tensors in batches:
        expected = _run_model(flat_model, name, tensors)
        actual = runner.run(tensors)
        if len(expected) != len(actual):
            raise ParityError(
                f"expected {len(expected)} outputs, {', '.join(output_names)}; the file has {len(actual)}"
            )
        for output, model_value, file_value in zip(output_names, expected, actual, strict=True):
            if model_value.shape != file_value.shape or model_value.dtype != file_value.dtype:
                raise ParityError(
                    f"output {output} on {name}: the model returns {model_value.dtype}{list(model_value.shape)}, the "
                    f"file {file_value.dtype}{list(file_value.shape)}"
                )
            differences.append((Difference(name, output, *max_difference(model_value, file_value)), tensors))
    return differences


def _run_model(flat_model: FlatModel, name: str, tensors: list[Tensor]) -> list[Tensor]:
    try:
        outputs: list[Tensor] = flat_model(*[t.clone() for t in tensors])
    except Exception as error:
        example = flat_model.signature.tensors
        other_size = any(t.shape[2:] != known.shape[2:] for t, known in zip(tensors, example, strict=True))
        advice = (
            "images of one size, leave out dynamic_size (--any-size)"
            if other_size
            else "batches of one size, export with dynamic_batch=False (--static)"
        )
        raise ExportError(
            f"the model does not run on the {name}: {type(error).__name__}: {error}. If it only takes {advice}"
        ) from error
    return outputs


def max_difference(expected: Tensor, actual: Tensor) -> tuple[float, float]:
    """Return the largest absolute difference, and the same relative to the largest number of `expected`."""
    if not expected.numel():
        return 0.0, 0.0
    a, b = expected.double(), actual.double()
    equal = (a == b) | (a.isnan() & b.isnan())
    absolute = float(torch.where(equal, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf).max())
    finite = a[a.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    return absolute, absolute / largest if largest else absolute


def check_parity(
    flat_model: FlatModel,
    runner: OnnxRunner,
    output_names: Sequence[str],
    batches: Iterable[NamedInputs],
    tolerance: float,
    describe_origin: Callable[[list[Tensor], str], str],
) -> list[Difference]:
    """Compare file and model on all inputs; return the differences, all within the tolerance.

    Args:
        describe_origin: called with the input tensors and the output that differs most; returns a sentence about
            the first node of the file that differs.

    Raises:
        ExportError: the model itself does not run on one of the inputs.
        ParityError: an output differs by more; the message names the worst one and the first node that differs.
    """
    differences = compare_outputs(flat_model, runner, output_names, batches)
    too_large = [(d, tensors) for d, tensors in differences if not d.within(tolerance)]
    if too_large:
        worst, tensors = max(too_large, key=lambda pair: pair[0].rel)
        names = sorted({d.output for d, _ in too_large})
        others = f" (and {', '.join(n for n in names if n != worst.output)})" if len(names) > 1 else ""
        raise ParityError(
            f"output {worst.output}{others}: the file is {worst.abs:.2g} off the model on the {worst.inputs}, "
            f"{worst.rel:.2g} of its largest number; the tolerance is {tolerance:g}. "
            f"{describe_origin(tensors, worst.output)}"
        )
    return [d for d, _ in differences]
