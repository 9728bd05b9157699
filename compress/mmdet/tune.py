"""Fine-tuning and evaluation on mmengine's Runner, which keeps its schedules, hooks, logs, AMP, DDP and resume."""

from __future__ import annotations

import math
import sys
import tempfile
import uuid
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.hooks import Hook
from mmengine.model import MMDistributedDataParallel, is_model_wrapper
from mmengine.runner import Runner
from torch import distributed as dist
from torch import nn

from ..checkpoint import put_, tensors_of
from ..engine import POINTS
from ..finetune import Work
from ..shell import shell, still_
from .config import settle_
from .distill import taught
from .schedule import settings


def evaluate(cfg: Config, model: nn.Module, val: Any, seed: int) -> dict[str, float]:
    """What the config's evaluator measures.

    Raises:
        ValueError: the model is not where the Runner would put it.
    """
    _check_place(model)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        parts = {"val_cfg": cfg.get("val_cfg") or {}, "val_dataloader": val, "val_evaluator": cfg.val_evaluator}
        hooks = {**(cfg.get("default_hooks") or {}), "checkpoint": None}
        copied = shell(model)  # alone, the Runner would take the SyncBN out of it
        found = _runner(cfg, copied, Path(folder), seed, default_hooks=hooks, **parts).val()
    return {name: float(value) for name, value in found.items()}


def finetune(cfg: Config, work: Work, train: Any, val: Any) -> None:
    """Train the student in place; the best on validation, or the last, are kept."""
    _check_place(work.student)
    settle_(work.student)
    cfg = settings(cfg, work.config, work.total, len(train), work.engine.config)
    given = {name: cfg.get(name) for name in ("optim_wrapper", "param_scheduler", "auto_scale_lr", "custom_hooks")}
    if val is not None:
        given |= {"val_cfg": cfg.get("val_cfg") or {}, "val_dataloader": val, "val_evaluator": cfg.val_evaluator}
    several = dist.is_available() and dist.is_initialized()
    model = work.student
    if several and not torch.cuda.is_available():  # the Runner itself wraps for GPUs only
        unused = cfg.get("find_unused_parameters", False)
        model = MMDistributedDataParallel(model, broadcast_buffers=False, find_unused_parameters=unused)
    with tempfile.TemporaryDirectory() if work.folder is None else nullcontext(str(work.folder)) as folder:
        place = Path(folder)
        runner = _runner(
            cfg,
            model,
            place,
            work.engine.seed,
            train_cfg=cfg.train_cfg,
            train_dataloader=train,
            default_hooks=cfg.get("default_hooks"),
            resume=(place / "last_checkpoint").exists(),
            launcher="pytorch" if several else "none",
            **given,
        )
        watch = Watch(work)
        runner.register_hook(watch, priority="VERY_HIGH")  # sees the weights that were validated: EMAHook comes later
        with taught(work.student, work.teacher, work.plan, work.config.distill), redirect_stdout(sys.stderr):
            runner.train()
    watch.finish(runner)
    work.student.to(work.engine.device)
    still_(work.student)


class Watch(Hook):  # type: ignore[misc]
    """Writes down what happens, stops where the loss is not finite, and remembers the weights that are best."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.first: float | None = None
        self.at = 0  # the step that it was measured behind
        self.keeps = work.config.best is not False
        self.best: dict[str, torch.Tensor] = {}

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        engine, total, done = self.work.engine, self.work.total, runner.iter + 1
        if done % max(1, total // POINTS) == 0 or done == total:
            values = {key: float(value.detach()) for key, value in (outputs or {}).items() if "loss" in key}
            engine.check_finite("finetune", done, total, values)
            engine.record(self._where(runner, done), values)

    def after_val_epoch(self, runner: Any, metrics: Mapping[str, float] | None = None) -> None:
        found = {name: float(value) for name, value in (metrics or {}).items()}
        done = min(runner.iter, self.work.total)
        self.work.engine.record(self._where(runner, done), {f"val_{k}": v for k, v in found.items()})
        first = next(iter(found.values()), None)
        finite = first is not None and math.isfinite(first)
        if self.keeps and first is not None and finite and (self.first is None or first >= self.first):
            self.first, self.at = first, done
            self.best = {name: t.detach().clone() for name, t in tensors_of(_inner(runner.model)).items()}

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["compress"] = {"first": self.first, "at": self.at, "best": self.best}

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        kept = checkpoint.get("compress", {"first": None, "at": 0, "best": {}})
        self.first, self.at, self.best = kept["first"], kept["at"], kept["best"]

    def finish(self, runner: Any) -> None:
        """Give the student the weights that count: the best, those of a moving average, or the last."""
        averages = [hook.ema_model.module for hook in runner.hooks if getattr(hook, "ema_model", None) is not None]
        if self.best:
            put_(self.work.student, self.best)
            self.work.engine.facts["kept"] = {"step": self.at, "of": self.work.total}
        elif averages:
            put_(self.work.student, tensors_of(averages[0]))

    def _where(self, runner: Any, done: int) -> dict[str, Any]:
        return {"stage": "finetune", "step": done, "epoch": done / len(runner.train_dataloader)}


def _runner(cfg: Config, model: nn.Module, folder: Path, seed: int, **given: Any) -> Any:
    """A Runner of its own name: mmengine keeps loggers, hubs and visualisers by name for the life of the process."""
    name = f"compress_{uuid.uuid4().hex[:8]}"
    draws = {**cfg.visualizer, "name": name} if cfg.get("visualizer") else None
    common = {key: cfg[key] for key in ("env_cfg", "log_processor", "log_level", "default_scope") if cfg.get(key)}
    with redirect_stdout(sys.stderr):  # where its loggers begin, and stay
        return Runner(
            model=model,
            work_dir=str(folder),
            experiment_name=name,
            visualizer=draws,
            randomness={"seed": seed},
            cfg=cfg,
            **common,
            **given,
        )


def _inner(model: Any) -> nn.Module:
    inner: nn.Module = model.module if is_model_wrapper(model) else model
    return inner


def _check_place(model: nn.Module) -> None:
    """
    Raises:
        ValueError: the model is on another device than the Runner works on.
    """
    here = next(model.parameters()).device
    if here.type != torch.device(get_device()).type:
        raise ValueError(
            f"device: mmengine's Runner works on {get_device()} here; the model is on {here}. Leave device out, or "
            "hide the GPUs (CUDA_VISIBLE_DEVICES=) to work on the CPU"
        )
