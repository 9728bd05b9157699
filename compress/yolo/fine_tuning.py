"""Fine-tune a pruned network with Ultralytics' own trainer: its optimizer, schedule, augmentation, EMA and validation.

Checkpoints are written at the end of an epoch, as tensors and JSON. An epoch starts from its own seed, so a training
that is stopped and resumed sees the same images as one that is not.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from ultralytics.utils.torch_utils import unwrap_model

from compress.data import derive_seed
from compress.modules import set_eval_flags_
from compress.storage import (
    CheckpointStore,
    TrainingState,
    isolated_random_state,
    load_tensors_,
    seed_all,
    state_tensors,
)
from compress.training import HISTORY_POINTS, FineTuneJob

from .distillation import TaughtCriterion
from .families import Family
from .quiet import NoCallbacks, quiet
from .settings import training_settings
from .trainers import keep_network

NETWORK_ATTRIBUTES = ("args", "nc", "criterion", "class_weights", "transforms")  # that trainers set on a network


def fine_tune(family: Family, settings: Any, data: dict[str, Any], job: FineTuneJob, per_epoch: int) -> None:
    """Train the student of a job in place; keep the weights that are best on the validation data, or the last.

    Args:
        settings: Ultralytics' settings, which the recipe's `finetune` may change.
        data: as from `read_data`.
        per_epoch: batches of an epoch.

    Raises:
        Diverged: the loss is not finite.
    """
    overrides = training_settings(settings, job.config, job.total, per_epoch, job.engine.config, job.engine.seed)
    overrides["device"] = _device_name(job.engine.device)
    overrides["model"] = "pruned.yaml"  # a name; no file is read
    trainer_class = _with_job(keep_network(family.trainer, job.student))
    with tempfile.TemporaryDirectory() as folder, quiet(), isolated_random_state(), _restored(job.student):
        trainer = trainer_class({**overrides, "save_dir": folder}, data, job)
        with job.engine.display.bar("finetune", job.total) as trainer.bar:
            trainer.train()
        trainer.load_final_weights_()
    job.student.to(job.engine.device)
    set_eval_flags_(job.student)


@contextmanager
def _restored(network: nn.Module) -> Iterator[None]:
    """Remove what trainers set on a network, and which parameters they freeze, after the block."""
    before = {name: vars(network)[name] for name in NETWORK_ATTRIBUTES if name in vars(network)}
    trainable = {parameter: parameter.requires_grad for parameter in network.parameters()}
    try:
        yield
    finally:
        for name in NETWORK_ATTRIBUTES:
            vars(network).pop(name, None)
        network._modules.pop("criterion", None)
        vars(network).update(before)
        for parameter, requires_grad in trainable.items():
            parameter.requires_grad_(requires_grad)


def _device_name(device: torch.device) -> str:
    return str(device.index or 0) if device.type == "cuda" else device.type


def _with_job(trainer: type[Any]) -> type[Any]:
    return type(trainer.__name__, (_JobTrainer, trainer), {})


class _JobTrainer:
    """The methods in which a trainer reports to a job: history, best weights, checkpoints and the number of steps."""

    # of Ultralytics' trainers
    args: Any
    callbacks: dict[str, list[Any]]
    ema: Any
    epoch: int
    epochs: int
    fitness: Any
    loss_items: dict[str, Tensor]
    metrics: dict[str, float]
    model: Any
    optimizer: Any
    scaler: Any
    start_epoch: int
    stop: bool
    train_loader: Any
    bar: Any

    def __init__(self, overrides: dict[str, Any], data: dict[str, Any], job: FineTuneJob) -> None:
        self.job, self.given_data = job, data
        self.done = 0
        self.best_fitness_kept: float | None = None
        self.best_step = 0
        self.best_weights: dict[str, Tensor] = {}
        self.store = CheckpointStore(job.folder) if job.folder is not None else None
        # Ultralytics' trainers read the values of `overrides` as if they were typed by a user.
        super().__init__(overrides=overrides, _callbacks=NoCallbacks())  # type: ignore[call-arg]
        self.callbacks["on_train_start"] = [type(self)._teach]
        self.callbacks["on_train_epoch_start"] = [type(self)._seed_epoch]
        self.callbacks["on_train_batch_end"] = [type(self)._record_losses]

    def get_dataset(self) -> dict[str, Any]:
        """Return the data that the task has read and checked."""
        return copy.deepcopy(self.given_data)

    def _teach(self) -> None:
        """Add distillation to the loss of the student; not of its average, which is a copy of it made before."""
        network, distill = unwrap_model(self.model), self.job.config.distill
        if distill is not None and distill.weight:
            criterion = getattr(network, "criterion", None) or network.init_criterion()
            teacher = self.job.teacher.eval()
            vars(network)["criterion"] = TaughtCriterion(criterion, teacher, distill.weight, distill.temperature)

    def _seed_epoch(self) -> None:
        seed = derive_seed(self.job.engine.seed, "finetune", self.epoch)
        seed_all(seed)
        if self.train_loader.generator is not None:
            self.train_loader.generator.manual_seed(seed)
        self.train_loader.reset()

    def _record_losses(self) -> None:
        engine, total = self.job.engine, self.job.total
        self.done += 1
        if self.done % max(1, total // HISTORY_POINTS) == 0 or self.done == total:
            losses = {name: float(value) for name, value in self.loss_items.items()}
            engine.check_finite("finetune", self.done, total, losses)
            engine.record(self._position(), losses)
            self.bar.update(self.done, {"loss": sum(losses.values())})  # all parts would leave no room for the bar
        self.stop = self.stop or self.done >= total

    def _position(self) -> dict[str, Any]:
        return {"stage": "finetune", "step": self.done, "epoch": self.done / len(self.train_loader)}

    def _handle_nan_recovery(self, epoch: int) -> bool:
        """Return that nothing was recovered: a loss that is not finite ends the run."""
        return False

    def save_metrics(self, metrics: dict[str, float]) -> None:
        """Record the metrics of an epoch in the history of the run."""
        names = {name: name.removeprefix("metrics/") for name in metrics if name.startswith("metrics/")}
        values = {f"val_{short}": float(metrics[name]) for name, short in names.items()}
        self.job.engine.record(self._position(), values)

    def save_model(self) -> bool:
        """Keep the averaged weights if they are the best so far, and write a checkpoint."""
        average, engine = self.ema.ema, self.job.engine
        fitness = None if self.fitness is None else float(self.fitness)
        is_best = fitness is not None and (self.best_fitness_kept is None or fitness >= self.best_fitness_kept)
        if self.job.config.best is not False and is_best:
            self.best_fitness_kept, self.best_step = fitness, self.done
            self.best_weights = {name: tensor.detach().clone() for name, tensor in state_tensors(average).items()}
        if self.store is not None and engine.checkpoint_is_due() and self.done < self.job.total:
            values: dict[str, Any] = {"epoch": self.epoch, "done": self.done, "updates": self.ema.updates}
            values |= {"best": self.best_fitness_kept, "at": self.best_step, "history": engine.history}
            values["scaler"] = self.scaler.state_dict()
            with engine.measured_save():
                self.store.save(self._state().tensors(), values)
        return True

    def _state(self) -> TrainingState:
        modules = {"student": unwrap_model(self.model), "average": self.ema.ema}
        return TrainingState(modules, [self.optimizer], lambda: self.best_weights)

    def resume_training(self, ckpt: Any) -> None:
        """Continue from the checkpoint of the job, if there is one."""
        loaded = self.store.load() if self.store is not None else None
        if loaded is None:
            return
        tensors, values = loaded
        if values["best"] is not None:  # tensors of the right shapes, to copy the best weights to
            self.best_weights = {name: tensor.clone() for name, tensor in state_tensors(self.ema.ema).items()}
        self._state().restore_(tensors, {})
        self.best_fitness_kept, self.best_step = values["best"], values["at"]
        self.ema.updates, self.done, self.start_epoch = values["updates"], values["done"], values["epoch"] + 1
        self.scaler.load_state_dict(values["scaler"])
        self.job.engine.history[:] = values["history"]
        network = unwrap_model(self.model)
        network.criterion = network.init_criterion()
        if hasattr(network.criterion, "updates"):  # the weights of the two losses of end-to-end networks
            network.criterion.updates = values["epoch"]
            network.criterion.update()

    def final_eval(self) -> None:
        """Do nothing: the run evaluates the network itself."""

    def load_final_weights_(self) -> None:
        """Give the student the best averaged weights, or the last."""
        if self.best_weights:
            load_tensors_(self.job.student, self.best_weights)
            self.job.engine.run_state.kept_step = {"step": self.best_step, "of": self.job.total}
        else:
            load_tensors_(self.job.student, state_tensors(self.ema.ema))
