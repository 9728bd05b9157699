"""The parts of the Runner's fine-tuning, each by itself: maps, schedules, checkpoints, processes."""

from __future__ import annotations

import copy
import json
import math
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from detectors import make_pictures, small_config

import compress
import compress.mmdet
from compress.compute import EngineConfig
from compress.mmdet.distill import channelwise, maps, taught
from compress.mmdet.schedule import settings
from compress.mmdet.tune import Watch, evaluate
from compress.recipe import Distill, Finetune
from compress.task import Task

# isort: split
from mmengine.config import Config
from mmengine.logging import HistoryBuffer


def test_channelwise_is_the_divergence_of_each_channels_map() -> None:
    random = torch.Generator().manual_seed(0)
    sizes = [(2, 3, 2, 3), (2, 3, 1, 2)]
    student, teacher = ([torch.randn(s, generator=random, dtype=torch.float64) for s in sizes] for _ in range(2))
    t, levels = 2.5, []
    for s, y in zip(student, teacher, strict=True):
        total = 0.0
        for n in range(2):
            for c in range(3):
                a, b = ([math.exp(v / t) for v in m[n, c].flatten().tolist()] for m in (s, y))
                total += sum(q / sum(b) * math.log(q / sum(b) / (p / sum(a))) for p, q in zip(a, b, strict=True))
        levels.append(t * t * total / 3 / 2)
    assert float(channelwise(student, teacher, t)) == pytest.approx(sum(levels) / 2, rel=1e-5)
    with pytest.raises(ValueError, match=r"distill: the dense detector's maps have shape \[2, 3, 2, 3\], the compact"):
        channelwise([student[0][:, :2]], [teacher[0]], t)


@pytest.fixture(scope="module")
def cfg(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return small_config(make_pictures(tmp_path_factory.mktemp("pictures"), count=4))


def test_a_taught_student_has_one_more_loss_and_afterwards_no_longer(cfg: Config) -> None:
    torch.manual_seed(0)
    teacher, task = compress.mmdet.build(cfg), compress.mmdet.task(cfg)
    teacher.eval()
    student: Any = copy.deepcopy(teacher)
    with torch.no_grad():
        student.neck.lateral_convs[0].conv.weight += 0.1 * torch.randn(32, 24, 1, 1)
    batch = next(iter(task.train))  # type: ignore[arg-type]
    data = task._data(batch)
    with maps(student, ["neck"]) as mine, maps(teacher, ["neck"]) as given:
        student.extract_feat(data["inputs"])
        teacher.extract_feat(data["inputs"])  # type: ignore[operator]
    with taught(student, teacher, compress.Plan({}, {}), Distill(temperature=1.0, weight=3.0)):
        losses = student(**data, mode="loss")
        assert student.parse_losses(losses)[0] > losses["loss_distil"] > 0
    torch.testing.assert_close(losses["loss_distil"], 3 * channelwise(mine, given))
    assert "loss_distil" not in student(**data, mode="loss")
    with taught(student, teacher, compress.Plan({}, {}), None):
        assert "loss_distil" not in student(**data, mode="loss")


def test_a_teachers_maps_are_compared_on_the_channels_that_are_left(cfg: Config) -> None:
    torch.manual_seed(0)
    detector: Any = compress.mmdet.build(cfg)
    detector.eval()
    name = "neck.fpn_convs.0.conv"
    shapes = {
        f"{name}.{leaf}": tuple(getattr(detector.neck.fpn_convs[0].conv, leaf).shape) for leaf in ("weight", "bias")
    }
    left = torch.arange(1, 32, 2).numpy()
    plan = compress.Plan({}, {}, slices={key: {0: left} for key in shapes}, shapes=shapes)
    student: Any = plan.apply_(copy.deepcopy(detector))
    from compress.mmdet.distill import Kept

    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad(), maps(student, ["neck"]) as mine, maps(detector, ["neck"]) as given:
        student.extract_feat(x)
        detector.extract_feat(x)
    kept = Kept(detector, plan, ["neck"]).of(given, mine, x)
    assert mine[0].shape[1] == 16
    assert torch.equal(kept[0], given[0][:, left])
    assert float(channelwise(mine, kept)) == pytest.approx(0.0, abs=1e-6)


def _settings(finetune: dict[str, Any], total: int, per_epoch: int = 10, **changes: Any) -> Config:
    base = {
        "train_cfg": {"type": "EpochBasedTrainLoop", "max_epochs": 12, "val_interval": 2},
        "param_scheduler": [
            {"type": "LinearLR", "start_factor": 0.1, "by_epoch": False, "begin": 0, "end": 60},
            {"type": "MultiStepLR", "begin": 0, "end": 12, "by_epoch": True, "milestones": [8, 11]},
        ],
        "optim_wrapper": {"type": "AmpOptimWrapper", "optimizer": {"type": "AdamW", "lr": 1e-4, "weight_decay": 0.05}},
        **changes,
    }
    return settings(Config(base), Finetune.model_validate(finetune), total, per_epoch)


def test_what_the_recipe_leaves_out_is_the_configs() -> None:
    found = _settings({"epochs": 12}, 120)
    assert found.train_cfg == {"type": "EpochBasedTrainLoop", "max_epochs": 12, "val_interval": 2}
    assert found.param_scheduler[0].end == 60
    assert found.param_scheduler[1].milestones == [8, 11]
    assert found.optim_wrapper.type == "AmpOptimWrapper"
    assert found.optim_wrapper.optimizer == {"type": "AdamW", "lr": 1e-4, "weight_decay": 0.05}


def test_the_schedule_is_stretched_to_the_recipes_length() -> None:
    longer = _settings({"epochs": 36}, 360)
    assert longer.train_cfg.max_epochs == 36
    assert longer.param_scheduler[0].end == 180
    assert (longer.param_scheduler[1].milestones, longer.param_scheduler[1].end) == ([24, 33], 36)
    short = _settings({"epochs": "30 steps"}, 30)
    assert short.train_cfg == {"type": "IterBasedTrainLoop", "max_iters": 30, "val_interval": 20}
    assert short.param_scheduler[0].end == 15
    assert (short.param_scheduler[1].milestones, short.param_scheduler[1].end) == ([20, 28], 30)
    assert not any(s.by_epoch for s in short.param_scheduler)
    saves = short.default_hooks.checkpoint
    assert (saves.by_epoch, saves.interval, saves.max_keep_ckpts) == (False, 10, 1)
    one = _settings({"epochs": "1 step"}, 1, param_scheduler={"type": "CosineAnnealingLR", "T_max": 12, "end": 12})
    assert (one.param_scheduler[0].T_max, one.param_scheduler[0].end) == (1, 1)
    assert _settings({"epochs": 1}, 10, param_scheduler=None).param_scheduler == []


def test_what_the_recipe_gives_replaces_the_configs() -> None:
    found = _settings({"epochs": 2, "lr": 0.3, "weight_decay": 0.1, "momentum": 0.8, "clip": 5.0}, 20)
    expected = {"type": "AdamW", "lr": 0.3, "weight_decay": 0.1, "betas": (0.8, 0.999)}
    assert found.optim_wrapper.optimizer == expected
    assert found.optim_wrapper.clip_grad == {"max_norm": 5.0}
    other = _settings({"epochs": 2, "optimizer": "sgd"}, 20)
    assert other.optim_wrapper.optimizer == {"type": "SGD", "lr": 0.01, "weight_decay": 1e-4, "momentum": 0.9}
    cosine = _settings({"epochs": 2, "schedule": "cosine", "warmup": "25%"}, 20).param_scheduler
    assert [(s.type, s.begin, s.end) for s in cosine] == [("LinearLR", 0, 5), ("CosineAnnealingLR", 5, 20)]
    step = _settings({"epochs": 2, "schedule": "step", "milestones": [0.5, 0.9]}, 20).param_scheduler
    assert [(s.type, s.milestones) for s in step] == [("MultiStepLR", [10, 18])]
    assert _settings({"epochs": 2, "schedule": "constant"}, 20).param_scheduler == []


def test_precision_and_accumulation_are_the_runners_own() -> None:
    plain = _settings({"epochs": 2}, 20).optim_wrapper
    assert plain.type == "AmpOptimWrapper"  # the config's own choice
    assert not {"dtype", "accumulative_counts"} & plain.keys()
    config = Finetune.model_validate({"epochs": 2})
    given = {"type": "OptimWrapper", "optimizer": {"type": "AdamW", "lr": 1e-4}}
    cfg = Config({"train_cfg": {"max_epochs": 12}, "optim_wrapper": given})
    found = settings(cfg, config, 20, 10, EngineConfig(precision="bf16", accumulate=3)).optim_wrapper
    assert (found.type, found.dtype, found.accumulative_counts) == ("AmpOptimWrapper", "bfloat16", 3)
    assert cfg.optim_wrapper.type == "OptimWrapper"


def test_checkpoints_of_the_runner_are_read_and_what_else_asks_for_getattr_is_not(tmp_path: Path) -> None:
    log = HistoryBuffer()
    log.update(0.5)
    torch.save({"state_dict": {"a": torch.ones(2)}, "message_hub": {"log_scalars": {"loss": log}}}, tmp_path / "a.pth")
    found = torch.load(tmp_path / "a.pth", weights_only=True)
    assert found["message_hub"]["log_scalars"]["loss"].mean() == 0.5

    class Evil:
        def __reduce__(self) -> Any:
            return getattr, (HistoryBuffer, "__init__")

    torch.save({"state_dict": Evil()}, tmp_path / "b.pth")
    with pytest.raises((ValueError, pickle.UnpicklingError), match="not what mmengine writes, and not read"):
        torch.load(tmp_path / "b.pth", weights_only=True)


@pytest.mark.parametrize(
    ("scores", "kept"), [((0.5, 0.9, 0.7), 2), ((0.9, 0.9, 0.7), 2), ((math.nan, 0.1, 0.0), 2), ((0.0, 0.0, 0.0), 3)]
)
def test_the_best_weights_are_kept_and_of_equals_the_last(scores: tuple[float, ...], kept: int) -> None:
    model, engine = torch.nn.Linear(1, 1), SimpleNamespace(facts={}, record=lambda *_: None)
    work: Any = SimpleNamespace(config=Finetune(epochs=1), engine=engine, student=model, total=3)
    watch, runner = Watch(work), SimpleNamespace(model=model, iter=0, train_dataloader=[0], hooks=[])
    for score in scores:
        runner.iter += 1
        torch.nn.init.constant_(model.weight, runner.iter)
        watch.after_val_epoch(runner, {"mAP": score})
    watch.finish(runner)
    assert model.weight.item() == kept and engine.facts["kept"] == {"step": kept, "of": 3}


def test_a_detection_is_a_task_and_wants_the_runners_device(cfg: Config) -> None:
    task = compress.mmdet.task(cfg)
    assert isinstance(task, Task)
    with pytest.raises(ValueError, match=r"device: mmengine's Runner works on (cpu|cuda) here; the model is on meta"):
        evaluate(cfg, torch.nn.Linear(1, 1, device="meta"), task.val, 0)


@pytest.mark.parametrize("lost", ["images", "annotations"])
def test_a_dataset_without_images_is_refused(cfg: Config, lost: str, tmp_path: Path) -> None:
    notes = json.loads(Path(cfg.train_dataloader.dataset.data_root, "boxes.json").read_text())
    (tmp_path / "boxes.json").write_text(json.dumps(notes | {lost: []}))
    with pytest.raises(ValueError, match=r"train_dataloader.dataset: expected images with boxes; found none"):
        compress.mmdet.task(cfg, {"train_dataloader.dataset.data_root": f"{tmp_path}/"})
