"""The Runner's config: what the recipe leaves out is the config's own."""

from __future__ import annotations

from typing import Any

from mmengine.config import Config

from compress.mmdet.runner_config import finetune_config
from compress.recipe import EngineConfig, Finetune


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
    return finetune_config(Config(base), Finetune.model_validate(finetune), total, per_epoch)


def test_what_the_recipe_leaves_out_is_the_configs() -> None:
    found = _settings({"epochs": 12}, 120)
    assert found.train_cfg == {"type": "ResumableEpochLoop", "max_epochs": 12, "val_interval": 2}
    assert found.param_scheduler[0].end == 60
    assert found.param_scheduler[1].milestones == [8, 11]
    assert found.optim_wrapper.type == "AmpOptimWrapper"
    assert found.optim_wrapper.optimizer == {"type": "AdamW", "lr": 1e-4, "weight_decay": 0.05}


def test_the_schedule_is_stretched_to_the_recipes_length() -> None:
    longer = _settings({"epochs": 36}, 360)
    assert longer.train_cfg.max_epochs == 36
    assert longer.param_scheduler[0].end == 180
    assert (longer.param_scheduler[1].milestones, longer.param_scheduler[1].end) == ([24, 33], 36)
    assert longer.default_hooks.checkpoint is None  # a run is resumed from checkpoints of its own
    short = _settings({"epochs": "30 steps"}, 30, default_hooks={"checkpoint": {"type": "CheckpointHook"}})
    assert short.train_cfg == {"type": "ResumableIterLoop", "max_iters": 30, "val_interval": 20}
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
    found = finetune_config(cfg, config, 20, 10, EngineConfig(precision="bf16", accumulate=3)).optim_wrapper
    assert (found.type, found.dtype, found.accumulative_counts) == ("AmpOptimWrapper", "bfloat16", 3)
    assert cfg.optim_wrapper.type == "OptimWrapper"
