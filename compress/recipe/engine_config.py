"""Settings of the training engine: precision, gradient accumulation, compilation, trackers."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import Field

from .fields import StrictModel

Precision = Literal["float32", "bf16", "fp16"]


class EngineConfig(StrictModel):
    """Settings of every training of the run: search and fine-tuning."""

    precision: Precision | None = Field(
        None, description="mixed precision (default: as set by `accelerate launch`, else float32)"
    )
    accumulate: int | None = Field(
        None, ge=1, description="batches per optimizer step (default: as set by `accelerate launch`, else 1)"
    )
    compile: bool | str = Field(
        False,
        description="fine-tune with torch.compile (true, or the name of a backend): worthwhile in long runs on GPUs",
    )
    channels_last: bool = Field(
        False, description="channels-last memory format: faster convolutions on GPUs and many CPUs"
    )
    sync_batchnorm: bool = Field(
        False, description="batch norm statistics over all processes; else each process uses its own batches"
    )
    shard_teacher: bool = Field(
        False, description="shard the teacher, too, if the launcher shards fine-tuning (FSDP); else each process has it"
    )
    track: tuple[str, ...] = Field(
        (), description="tensorboard, wandb, mlflow and other trackers that accelerate supports", strict=False
    )

    @property
    def effective_precision(self) -> Precision:
        """Precision of the run: that of the recipe, or else as set by `accelerate launch`."""
        from_launcher = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        return self.precision or (
            "bf16" if from_launcher == "bf16" else "fp16" if from_launcher == "fp16" else "float32"
        )

    @property
    def batches_per_step(self) -> int:
        """Batches per optimizer step: as in the recipe, or else as set by `accelerate launch`."""
        return self.accumulate or max(1, int(os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1") or 1))
