"""NVIDIA ModelOpt's FastNAS with the settings of its ResNet-20 notebook, except for a smaller width divisor.

FastNAS sorts channels by their norm, measures the drop in accuracy for every width of every layer with recalibrated
batch norms, and searches the widths by bisection on that drop. It trains nothing. ModelOpt is not a dependency of this
project (`pip install nvidia-modelopt`); without it, the benchmark has no FastNAS rows.
"""

from __future__ import annotations

import contextlib
import io
import time
import warnings
from importlib.util import find_spec
from itertools import islice

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from compress.training import Classification, Engine, Task

from .methods import PruningCost

DIVISOR = 4  # widths are multiples of it
CALIBRATION_BATCHES = 10  # training batches that recalibrate batch norms
SCORE_BATCHES = 10  # further training batches, whose accuracy is the score
METHODS = ("modelopt fastnas",) if find_spec("modelopt") else ()


def prune(
    name: str, model: nn.Module, fraction_left: float, task: Task, steps: int, engine: Engine
) -> tuple[nn.Module, PruningCost]:
    """Return the best network that FastNAS finds within the budget, and the cost of the search."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import modelopt.torch.prune as mtp
    start = time.perf_counter()
    batches = [engine.move(batch) for batch in islice(iter(task.train or ()), CALIBRATION_BATCHES + SCORE_BATCHES)]
    held_out = TensorDataset(*(torch.cat(parts) for parts in zip(*batches[CALIBRATION_BATCHES:], strict=True)))
    scoring_task = Classification(None, DataLoader(held_out, 320))
    config = mtp.fastnas.FastNASConfig()
    config["nn.Conv2d"]["*"]["channel_divisor"] = DIVISOR
    config["nn.BatchNorm2d"]["*"]["feature_divisor"] = DIVISOR
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        compact, _ = mtp.prune(
            model=model.to(memory_format=torch.contiguous_format),  # ModelOpt requires it
            mode=[("fastnas", config)],
            constraints={"flops": f"{100 * fraction_left}%"},
            dummy_input=torch.randn(1, 3, 32, 32),
            config={
                "data_loader": batches[:CALIBRATION_BATCHES],
                "score_func": lambda candidate: engine.evaluate(scoring_task, candidate)["accuracy"],
                "collect_func": lambda batch: batch[0],
            },
        )

    compact.to(memory_format=torch.channels_last)
    return compact, PruningCost(CALIBRATION_BATCHES + SCORE_BATCHES, time.perf_counter() - start, 0.0)
