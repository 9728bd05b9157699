"""The gate: a file computes what the model computes, leaf by leaf, or it is not written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .call import ExportError, Flat
from .runtime import Runner

TOLERANCE, HALF_TOLERANCE = 1e-4, 1e-2  # of an output's largest number
LEAST = 1e-9  # what counts as a difference at all: less is left where large numbers cancel


class ParityError(ExportError):
    """A file that computes something else than the model."""


@dataclass(frozen=True)
class Difference:
    """How far one output is off on one input."""

    inputs: str
    output: str
    abs: float
    rel: float  # to the largest number of the model's output

    def within(self, tolerance: float) -> bool:
        return self.rel <= tolerance or self.abs <= LEAST


@torch.no_grad()
def differences(
    flat: Flat, runner: Runner, outputs: Sequence[str], batches: Iterable[tuple[str, list[Tensor]]]
) -> list[tuple[Difference, list[Tensor]]]:
    """How far the file is off the model, for every output on every input, and that input.

    Raises:
        ExportError: the model itself does not run on one of them.
        ParityError: the outputs are not even of the same number, shape or type.
    """
    found = []
    for name, leaves in batches:
        try:
            expected = flat(*[t.clone() for t in leaves])
        except Exception as error:
            sized = any(t.shape[2:] != known.shape[2:] for t, known in zip(leaves, flat.call.leaves, strict=True))
            option = "images of one size, leave dynamic_size (--any-size) out"
            option = option if sized else "batches of one size, say dynamic_batch=False (--static)"
            raise ExportError(
                f"the model does not run on the {name}: {type(error).__name__}: {error}. If it is for {option}"
            ) from error
        got = runner.run(leaves)
        if len(expected) != len(got):
            raise ParityError(f"expected {len(expected)} outputs, {', '.join(outputs)}; the file has {len(got)}")
        for output, right, here in zip(outputs, expected, got, strict=True):
            if right.shape != here.shape or right.dtype != here.dtype:
                raise ParityError(
                    f"output {output} on {name}: expected {right.dtype}{list(right.shape)}, as the model gives; the "
                    f"file gives {here.dtype}{list(here.shape)}"
                )
            found.append((Difference(name, output, *apart(right, here)), leaves))
    return found


def apart(right: Tensor, here: Tensor) -> tuple[float, float]:
    """The largest difference of two tensors, and the same relative to the largest number of the first."""
    if not right.numel():
        return 0.0, 0.0
    a, b = right.double(), here.double()
    same = (a == b) | (a.isnan() & b.isnan())
    off = float(torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf).max())
    finite = a[a.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    return off, off / largest if largest else off


def gate(
    flat: Flat,
    runner: Runner,
    outputs: Sequence[str],
    batches: Iterable[tuple[str, list[Tensor]]],
    tolerance: float,
    locate: Any,
) -> list[Difference]:
    """Every difference, all within the tolerance.

    `locate(leaves, output)` says in words at which node of the file the difference begins.

    Raises:
        ParityError: one is not; the worst output is named, and where its difference begins.
    """
    found = differences(flat, runner, outputs, batches)
    bad = [(d, leaves) for d, leaves in found if not d.within(tolerance)]
    if bad:
        worst, leaves = max(bad, key=lambda pair: pair[0].rel)
        names = sorted({d.output for d, _ in bad})
        others = f" (and {', '.join(n for n in names if n != worst.output)})" if len(names) > 1 else ""
        raise ParityError(
            f"output {worst.output}{others}: the file is {worst.abs:.2g} off the model on the {worst.inputs}, "
            f"{worst.rel:.2g} of its largest number; at most {tolerance:g} is let through. "
            f"{locate(leaves, worst.output)}"
        )
    return [d for d, _ in found]
