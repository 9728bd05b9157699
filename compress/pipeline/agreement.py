"""Agreement of a cut network with the dense one, for runs that have no validation data."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compress.data import batch_size_of
from compress.distributed import all_reduce_sum
from compress.errors import BatchError
from compress.modules import as_call_inputs, module_mode
from compress.storage import isolated_random_state
from compress.training import Regression, logits_of

from .run import Run

AGREEMENT = "agreement"
FEWEST_EXAMPLES = 16  # example inputs; the agreement on fewer says nothing


def add_agreement_(run: Run) -> None:
    """Add the agreement with the dense network to the report of a run that has no other metric, if it has a class.

    It is the fraction of the calibration data, training inputs or, if they are at least `FEWEST_EXAMPLES`, example
    inputs with the same best class.
    """
    report = run.report
    if report is None or report.pruned.metrics or isinstance(run.task, Regression):
        return
    agreement = _measure_agreement(run)
    if agreement is not None:
        report.dense.metrics[AGREEMENT] = 1.0
        report.pruned.metrics[AGREEMENT] = agreement


@torch.no_grad()
def _measure_agreement(run: Run) -> float | None:
    """Return the fraction of inputs with the same best class; None if there are few, or the outputs are not logits."""
    sums: Tensor | None = None
    has_batches = run.calibration.given is not None or run.calibration.train is not None
    if not has_batches and (batch_size_of(run.example_inputs) or 0) < FEWEST_EXAMPLES:
        return None
    batches = run.calibration.read() if has_batches else [run.example_inputs]
    networks = (run.dense, run.compact)
    with module_mode(run.dense, training=False), module_mode(run.compact, training=False), isolated_random_state():
        for batch in batches:
            try:
                dense, compact = (
                    logits_of(run.calibration.forward(m, batch) if has_batches else _call(m, batch)) for m in networks
                )
            except BatchError:
                return None
            same = (dense.argmax(-1) == compact.argmax(-1)).double()
            counts = torch.stack([same.sum(), torch.ones_like(same).sum()])
            sums = counts if sums is None else sums + counts
    same_count, count = all_reduce_sum(sums, 2).tolist()
    return same_count / count if count else None


def _call(model: nn.Module, example_inputs: object) -> object:
    args, kwargs = as_call_inputs(example_inputs)
    return model(*args, **kwargs)
