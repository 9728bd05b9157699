"""Hugging Face's Trainer for a pruned model: distillation from the dense one, checkpoints of the pruned widths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer

from compress.errors import NotReady
from compress.modules import make_teacher
from compress.recipe import Distill
from compress.surgery import Plan, save_model

from .config_file import write_config
from .model_task import task_of_model


class DistillationTrainer(Trainer):
    """Train a pruned model as `transformers.Trainer` does, with the distance from a teacher added to the loss.

    Each checkpoint, and what `save_model` writes, is a directory that `compress.hf.load` reads. Training goes on with
    `resume_from_checkpoint` as usual; the widths are those of the pruned model.

    Args:
        model: the pruned model, such as `pruned.model`.
        args: as of `transformers.Trainer`, like all further keyword arguments.
        plan: its plan, such as `pruned.plan`, or `compress.Plan.load("out/plan.json")`.
        teacher: the dense model; None trains without distillation.
        distill: weight and temperature; default: those of the task, as in `compress.prune`.

    Raises:
        NotReady: the settings do not go together.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: Any = None,
        *,
        plan: Plan,
        teacher: nn.Module | None = None,
        distill: Distill | None = None,
        **options: Any,
    ) -> None:
        if distill is not None and distill.features:
            raise NotReady("distill.features: DistillationTrainer compares outputs only; leave features out")
        super().__init__(model, args, **options)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise NotReady(
                "args: checkpoints of sharded models would not hold the pruned widths; leave fsdp and deepspeed out, "
                "or fine-tune with compress.prune, which can shard"
            )
        self.teacher = None if teacher is None else make_teacher(teacher, self.args.device, False)
        self._task = task_of_model(model)
        self.plan, self.distill = plan, distill or Distill(weight=self._task.distill_weight or 0.0)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the loss of the model plus the weighted distance from the teacher; in evaluation, the loss alone."""
        loss, outputs = super().compute_loss(model, dict(inputs), True, num_items_in_batch)
        if self.teacher is not None and model.training:
            with torch.no_grad(), self.accelerator.autocast():
                teacher_outputs = self._task.teach(self.teacher, inputs)
            distance = self._task.distil(outputs, teacher_outputs, self.distill.temperature)
            if self.model_accepts_loss_kwargs and num_items_in_batch is not None:
                distance = distance / self.current_gradient_accumulation_steps  # as the loss is already
            loss = loss + self.distill.weight * distance
        return (loss, outputs) if return_outputs else loss

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write plan, weights and config in place of `save_pretrained`, which knows the dense widths only."""
        if not self.args.should_save:
            return
        folder = Path(output_dir or self.args.output_dir or ".")
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        save_model(model, self.plan, folder)
        write_config(model, self.plan, folder)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
