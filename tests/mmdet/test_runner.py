"""Fine-tuning on the Runner: the weights that are kept, the device, data without images."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import compress
import compress.mmdet
from compress.mmdet.runner import FineTuneMonitor, evaluate_on_runner
from compress.recipe import Finetune
from compress.training.task import Task

# isort: split
from mmengine.config import Config


@pytest.mark.parametrize(
    ("scores", "kept"), [((0.5, 0.9, 0.7), 2), ((0.9, 0.9, 0.7), 2), ((math.nan, 0.1, 0.0), 2), ((0.0, 0.0, 0.0), 3)]
)
def test_the_best_weights_are_kept_and_of_equals_the_last(scores: tuple[float, ...], kept: int) -> None:
    model, engine = (
        torch.nn.Linear(1, 1),
        SimpleNamespace(run_state=SimpleNamespace(kept_step=None), record=lambda *_: None),
    )
    work: Any = SimpleNamespace(config=Finetune(epochs=1), engine=engine, student=model, total=3)
    watch, runner = FineTuneMonitor(work), SimpleNamespace(model=model, iter=0, train_dataloader=[0], hooks=[])
    for score in scores:
        runner.iter += 1
        torch.nn.init.constant_(model.weight, runner.iter)
        watch.after_val_epoch(runner, {"mAP": score})
    watch.load_final_weights_(runner)
    assert model.weight.item() == kept and engine.run_state.kept_step == {"step": kept, "of": 3}


def test_a_detection_is_a_task_and_wants_the_runners_device(cfg: Config) -> None:
    task = compress.mmdet.task(cfg)
    assert isinstance(task, Task)
    with pytest.raises(ValueError, match=r"device: mmengine's Runner uses (cpu|cuda); the model is on meta"):
        evaluate_on_runner(cfg, torch.nn.Linear(1, 1, device="meta"), task.val, 0)


@pytest.mark.parametrize("lost", ["images", "annotations"])
def test_a_dataset_without_images_is_refused(cfg: Config, lost: str, tmp_path: Path) -> None:
    notes = json.loads(Path(cfg.train_dataloader.dataset.data_root, "boxes.json").read_text())
    (tmp_path / "boxes.json").write_text(json.dumps(notes | {lost: []}))
    with pytest.raises(ValueError, match=r"train_dataloader.dataset: expected images with boxes; found none"):
        compress.mmdet.task(cfg, {"train_dataloader.dataset.data_root": f"{tmp_path}/"})


def test_the_config_in_a_checkpoint_is_not_executed(cfg: Config, tmp_path: Path) -> None:
    """mmengine reads `meta.config` of a checkpoint as a Python config when it resumes."""
    task, recipe = compress.mmdet.task(cfg), {"budget": {"dims": "70%"}, "finetune": {"epochs": 2}}
    detector = compress.mmdet.build(cfg)
    trap = tmp_path / "executed"

    class Stop(Exception):
        pass

    def stop(folder: Path) -> None:
        raise Stop

    task.save = stop  # type: ignore[method-assign]  # the fine-tuning is finished, the run is not
    with pytest.raises(Stop):
        compress.prune(detector, recipe, task=task, workdir=tmp_path / "out", quiet=True)
    (path,) = (tmp_path / "out" / "finetune").glob("*.pth")
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["meta"]["config"] = f"__import__('pathlib').Path({str(trap)!r}).touch()\n"
    torch.save(checkpoint, path)
    with pytest.raises(Stop):
        compress.prune(detector, recipe, task=task, workdir=tmp_path / "out", quiet=True, resume=True)
    assert not trap.exists()
