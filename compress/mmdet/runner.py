"""Fine-tune and evaluate on mmengine's Runner, with its schedules, hooks, logs, AMP and DDP."""

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

from compress.modules import set_eval_flags_, shared_copy
from compress.storage import load_tensors_, state_tensors
from compress.training import HISTORY_POINTS, FineTuneJob

from .config import mark_initialized_
from .distill import add_distillation_loss
from .runner_config import finetune_config
from .train_loops import ResumeHook, find_checkpoint


def evaluate_on_runner(cfg: Config, model: nn.Module, val: Any, seed: int) -> dict[str, float]:
    """Return the metrics of the config's evaluator on the validation loader.

    Raises:
        ValueError: the model is on another device than the Runner would use.
    """
    _check_device(model)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        hooks = {**(cfg.get("default_hooks") or {}), "checkpoint": None}
        copied = shared_copy(model)  # a Runner in a single process replaces SyncBN in its model
        runner = _build_runner(cfg, copied, Path(folder), seed, default_hooks=hooks, **_validation_settings(cfg, val))
        metrics = runner.val()
    return {name: float(value) for name, value in metrics.items()}


def finetune_on_runner(cfg: Config, job: FineTuneJob, train: Any, val: Any) -> None:
    """Train the student of a job in place; keep the best weights on validation, or the last.

    Raises:
        ValueError: the student is on another device than the Runner would use.
        Diverged: the loss is not finite.
    """
    _check_device(job.student)
    mark_initialized_(job.student)
    cfg = finetune_config(cfg, job.config, job.total, len(train), job.engine.config)
    settings = {name: cfg.get(name) for name in ("optim_wrapper", "param_scheduler", "auto_scale_lr", "custom_hooks")}
    if val is not None:
        settings |= _validation_settings(cfg, val)
    is_distributed = dist.is_available() and dist.is_initialized()
    model = job.student
    if is_distributed and not torch.cuda.is_available():  # the Runner itself wraps models on GPUs only
        unused = cfg.get("find_unused_parameters", False)
        model = MMDistributedDataParallel(model, broadcast_buffers=False, find_unused_parameters=unused)
    with tempfile.TemporaryDirectory() if job.folder is None else nullcontext(str(job.folder)) as folder:
        work_dir = Path(folder)
        checkpoint = find_checkpoint(work_dir)
        runner = _build_runner(
            cfg,
            model,
            work_dir,
            job.engine.seed,
            train_cfg=cfg.train_cfg,
            train_dataloader=train,
            default_hooks=cfg.get("default_hooks"),
            load_from=None if checkpoint is None else str(checkpoint),
            resume=checkpoint is not None,
            launcher="pytorch" if is_distributed else "none",
            **settings,
        )
        monitor = FineTuneMonitor(job)
        # Before EMAHook, which swaps the averaged weights out again after validation: they are the ones validated.
        runner.register_hook(monitor, priority="VERY_HIGH")
        runner.register_hook(ResumeHook(job.engine, job.folder), priority="VERY_HIGH")
        distillation = add_distillation_loss(job.student, job.teacher, job.plan, job.config.distill)
        with distillation, redirect_stdout(sys.stderr), job.engine.deferred_interrupts():
            runner.train()
    monitor.load_final_weights_(runner)
    job.student.to(job.engine.device)
    set_eval_flags_(job.student)


class FineTuneMonitor(Hook):  # type: ignore[misc]
    """Records losses and metrics, stops if the loss is not finite, and keeps the best weights."""

    def __init__(self, job: FineTuneJob) -> None:
        self.job = job
        self.keep_best = job.config.best is not False
        self.best_metric: float | None = None
        self.best_step = 0
        self.best_weights: dict[str, torch.Tensor] = {}

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Record the losses and check that they are finite, at about HISTORY_POINTS steps of the training."""
        engine, total, done = self.job.engine, self.job.total, runner.iter + 1
        if done % max(1, total // HISTORY_POINTS) == 0 or done == total:
            losses = {key: float(value.detach()) for key, value in (outputs or {}).items() if "loss" in key}
            engine.check_finite("finetune", done, total, losses)
            engine.record(self._position(runner, done), losses)

    def after_val_epoch(self, runner: Any, metrics: Mapping[str, float] | None = None) -> None:
        """Record the metrics; keep the weights if the first metric is the best so far."""
        values = {name: float(value) for name, value in (metrics or {}).items()}
        done = min(runner.iter, self.job.total)
        self.job.engine.record(self._position(runner, done), {f"val_{name}": v for name, v in values.items()})
        metric = next(iter(values.values()), None)
        if not self.keep_best or metric is None or not math.isfinite(metric):
            return
        if self.best_metric is None or metric >= self.best_metric:
            self.best_metric, self.best_step = metric, done
            self.best_weights = {name: t.detach().clone() for name, t in state_tensors(_unwrap(runner.model)).items()}

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["compress"] = {"first": self.best_metric, "at": self.best_step, "best": self.best_weights}

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint.get("meta", {}).pop("config", None)  # mmengine would execute it as a Python config
        saved = checkpoint.get("compress", {"first": None, "at": 0, "best": {}})
        self.best_metric, self.best_step, self.best_weights = saved["first"], saved["at"], saved["best"]

    def load_final_weights_(self, runner: Any) -> None:
        """Load the best weights into the student, else those of a moving average; else the last ones stay."""
        averages = [hook.ema_model.module for hook in runner.hooks if getattr(hook, "ema_model", None) is not None]
        if self.best_weights:
            load_tensors_(self.job.student, self.best_weights)
            self.job.engine.run_state.kept_step = {"step": self.best_step, "of": self.job.total}
        elif averages:
            load_tensors_(self.job.student, state_tensors(averages[0]))

    def _position(self, runner: Any, done: int) -> dict[str, Any]:
        return {"stage": "finetune", "step": done, "epoch": done / len(runner.train_dataloader)}


def _validation_settings(cfg: Config, val: Any) -> dict[str, Any]:
    return {"val_cfg": cfg.get("val_cfg") or {}, "val_dataloader": val, "val_evaluator": cfg.val_evaluator}


def _build_runner(cfg: Config, model: nn.Module, work_dir: Path, seed: int, **settings: Any) -> Runner:
    """Build a Runner with a unique name: mmengine keeps loggers and visualizers by name until the process ends."""
    name = f"compress_{uuid.uuid4().hex[:8]}"
    visualizer = {**cfg.visualizer, "name": name} if cfg.get("visualizer") else None
    unformatted = Config(  # mmengine prints it six times; formatting it takes one to two seconds each time
        cfg._cfg_dict, filename=cfg.filename, cfg_text=cfg.text, format_python_code=False
    )
    common = {key: cfg[key] for key in ("env_cfg", "log_processor", "log_level", "default_scope") if cfg.get(key)}
    with redirect_stdout(sys.stderr):  # mmengine's loggers keep the stream that was stdout when they were created
        return Runner(
            model=model,
            work_dir=str(work_dir),
            experiment_name=name,
            visualizer=visualizer,
            randomness={"seed": seed},
            cfg=unformatted,
            **common,
            **settings,
        )


def _unwrap(model: Any) -> nn.Module:
    inner: nn.Module = model.module if is_model_wrapper(model) else model
    return inner


def _check_device(model: nn.Module) -> None:
    """Check that a model is on the device of the Runner.

    Raises:
        ValueError: the model is on another device than the Runner would use.
    """
    device = next(model.parameters()).device
    if device.type != torch.device(get_device()).type:
        raise ValueError(
            f"device: mmengine's Runner uses {get_device()}; the model is on {device}. Leave device out, or hide the "
            "GPUs (CUDA_VISIBLE_DEVICES=) to use the CPU"
        )
