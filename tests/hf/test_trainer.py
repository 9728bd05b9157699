"""Hugging Face's Trainer goes on with a pruned model: distillation, checkpoints, resume."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import compress
from compress.recipe import Distill
from helpers.hugging_face import Samples, batches, build, inputs_of, same_outputs, transformers


@pytest.fixture(scope="module")
def pruned() -> Any:
    """The compact model and its plan."""
    model = build("segformer")
    groups = compress.find_groups(model, inputs_of(batches("segformer", 1)[0]))
    plan = compress.Plan.build(model, groups, {group.name: range(group.width // 2) for group in groups})
    return plan.apply_(copy.deepcopy(model)), plan


def trainer(pruned: Any, folder: Path, model: Any = None, **options: Any) -> Any:
    """A trainer that makes four steps and writes a checkpoint after the second."""
    quiet = {"report_to": [], "logging_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    steps = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-3}
    settings = {key: options.pop(key) for key in ("gradient_accumulation_steps",) if key in options}
    arguments = transformers.TrainingArguments(str(folder), **quiet, **steps, **settings)
    data = Samples(batches("segformer"))
    student = copy.deepcopy(pruned[0]) if model is None else model
    return compress.hf.DistillationTrainer(student, arguments, plan=pruned[1], train_dataset=data, **options)


def test_training_goes_on_from_a_checkpoint_with_the_pruned_widths(pruned: Any, tmp_path: Path) -> None:
    teacher = build("segformer")
    whole = trainer(pruned, tmp_path / "run", teacher=teacher)
    whole.train()
    assert not torch.equal(whole.model.decode_head.linear_fuse.weight, pruned[0].decode_head.linear_fuse.weight)
    middle = compress.hf.load(tmp_path / "run" / "checkpoint-2")
    resumed = trainer(pruned, tmp_path / "resumed", middle, teacher=teacher)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    (batch,) = batches("segformer", 1)
    resumed.save_model(tmp_path / "last")
    for model in (resumed.model.eval(), compress.hf.load(tmp_path / "run" / "checkpoint-4")):
        assert same_outputs(model, whole.model.eval(), batch)
    assert same_outputs(compress.hf.load(tmp_path / "last"), whole.model, batch)
    assert same_outputs(teacher, build("segformer"), batch)


@pytest.mark.parametrize("steps", [1, 2])
def test_loss_is_that_of_the_model_plus_the_weighted_distance(steps: int, pruned: Any, tmp_path: Path) -> None:
    """With accumulation, a batch adds its share to the mean of a step: here one of two batches of the same size."""
    teacher, (batch,) = build("segformer"), batches("segformer", 1)
    distill = Distill(weight=3.0, temperature=2.0)
    run = trainer(pruned, tmp_path, teacher=teacher, distill=distill, gradient_accumulation_steps=steps)
    run.current_gradient_accumulation_steps = steps
    model = run.model
    for module in model.modules():  # without dropout
        module.training = False
    with torch.no_grad():
        loss, logits = model(**batch).loss, model(**inputs_of(batch)).logits
        taught = teacher(**inputs_of(batch)).logits
        assert torch.allclose(run.compute_loss(model, batch), loss)  # an evaluation
        model.training = True
        distance = compress.distillation(logits.movedim(1, -1), taught.movedim(1, -1), 2.0)
        assert torch.allclose(run.compute_loss(model, batch), loss + 3 * distance)
        pixels = steps * int((batch["labels"] != 255).sum())  # of the whole step
        share = run.compute_loss(model, batch, num_items_in_batch=torch.tensor(pixels))
        expected = model(**batch, num_items_in_batch=torch.tensor(pixels)).loss + 3 * distance / steps
        assert torch.allclose(share, expected)


def test_without_a_teacher_the_loss_is_that_of_the_model(pruned: Any, tmp_path: Path) -> None:
    run, (batch,) = trainer(pruned, tmp_path), batches("segformer", 1)
    model = run.model
    for module in model.modules():
        module.training = module is model
    assert torch.equal(run.compute_loss(model, batch), model(**batch).loss)


def test_features_are_refused(pruned: Any, tmp_path: Path) -> None:
    with pytest.raises(compress.NotReady, match=r"distill\.features: DistillationTrainer compares outputs only"):
        trainer(pruned, tmp_path, distill=Distill(features=("segformer",)))


def test_sharded_training_is_refused(pruned: Any, tmp_path: Path) -> None:
    class Sharding(compress.hf.DistillationTrainer):
        """A trainer as FSDP makes it, which one process alone cannot start."""

        is_fsdp_enabled = property(lambda self: hasattr(self, "state"), lambda self, value: None)

    arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    with pytest.raises(compress.NotReady, match=r"leave fsdp and deepspeed out, or fine-tune with compress\.prune"):
        Sharding(pruned[0], arguments, plan=pruned[1])
