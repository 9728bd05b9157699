"""NVIDIA ModelOpt's FastNAS, with the settings of its ResNet-20 notebook but for a finer divisor of widths.

It sorts channels by their norm, measures how much the accuracy drops for every width of every layer with batch norms
measured anew, and searches the widths by bisection on that drop. It trains nothing. ModelOpt is not installed along
with this project (`pip install nvidia-modelopt`); without it there are no rows.
"""

from __future__ import annotations

import contextlib
import io
import time
import warnings
from importlib.util import find_spec
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from compress.engine import Engine
from compress.task import Classification, Task

DIVISOR = 4  # of widths
CALIBRATE, SCORE = 10, 10  # training batches for batch norms, and others of them whose accuracy is the score
METHODS = ("modelopt fastnas",) if find_spec("modelopt") else ()


def prune(
    name: str, model: nn.Module, left: float, task: Task, steps: int, engine: Engine
) -> tuple[nn.Module, dict[str, Any]]:
    """The best network that FastNAS finds within the budget, and what was spent, in batches and seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import modelopt.torch.prune as mtp
    start = time.perf_counter()
    batches = [engine.move(batch) for batch in islice(iter(task.train or ()), CALIBRATE + SCORE)]
    held = TensorDataset(*(torch.cat(parts) for parts in zip(*batches[CALIBRATE:], strict=True)))
    scored = Classification(None, DataLoader(held, 320))
    config = mtp.fastnas.FastNASConfig()
    config["nn.Conv2d"]["*"]["channel_divisor"] = DIVISOR
    config["nn.BatchNorm2d"]["*"]["feature_divisor"] = DIVISOR
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        small, _ = mtp.prune(
            model=model.to(memory_format=torch.contiguous_format),  # it takes no other
            mode=[("fastnas", config)],
            constraints={"flops": f"{100 * left}%"},
            dummy_input=torch.randn(1, 3, 32, 32),
            config={
                "data_loader": batches[:CALIBRATE],
                "score_func": lambda candidate: engine.evaluate(scored, candidate)["accuracy"],
                "collect_func": lambda batch: batch[0],
            },
        )
    read = CALIBRATE + SCORE
    small.to(memory_format=torch.channels_last)
    return small, {"batches": read, "search": time.perf_counter() - start, "slice": 0.0}
