"""Calibration data: inputs without labels, on which a cut network is repaired in closed form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compress.data import (
    batch_size_of,
    derive_seed,
    loader_problems,
    reproducible_reading,
    seed_loader,
    shard_loader,
    split_batch,
)
from compress.distributed import rank, world_size
from compress.errors import BatchError, format_error
from compress.formatting import describe_value, format_percent
from compress.graph import Groups, included_modules
from compress.modules import as_call_inputs, module_mode
from compress.recipe import Recipe
from compress.report import Report
from compress.surgery import AttentionRepair, LayerRepair, Plan, Repair, prefer_predictors, repair_
from compress.training import Engine, Task

from .report_updates import add_note

IMAGES_FROM_TRAIN = 1024
BATCH_SIZE = 64  # larger batches are split, so that the layers of one batch need little memory


@dataclass(frozen=True)
class CalibrationData:
    """The inputs that the user gave as `calibration`, or else those of the training data."""

    given: Any
    train: Iterable[Any] | None
    task: Task
    engine: Engine

    def problems(self, model: nn.Module, recipe: Recipe) -> list[str]:
        """Return what is missing or does not fit, after a run of the model on the first batch."""
        if self.given is None:
            if recipe.compensate != "least_squares" or (
                self.train is not None and not isinstance(self.train, Iterator)
            ):
                return []
            kind = "there is none" if self.train is None else "train is an iterator, which is read only once"
            return [
                f"compensate: least_squares needs inputs, and {kind}. Give calibration=INPUTS (a tensor, a list or a "
                "loader; no labels), or train=LOADER"
            ]
        if not isinstance(self.given, Tensor) and (problems := loader_problems(self.given, "calibration")):
            return problems
        if isinstance(self.given, Iterator):
            return ["calibration: expected inputs that can be read twice; got an iterator. Give list(calibration)"]
        try:
            first = next(iter(self._given_batches()), None)
        except BatchError as error:
            return [str(error)]
        if first is None or batch_size_of(first) == 0:
            return ["calibration: expected at least one input; got none"]
        tensors = [t for t in pytree.tree_leaves(first) if isinstance(t, Tensor) and t.is_floating_point()]
        if not all(bool(torch.isfinite(t).all()) for t in tensors):
            return ["calibration: the first batch contains NaN or infinity"]
        try:
            with module_mode(model, training=False), torch.no_grad(), torch.random.fork_rng(devices=[]):
                self.forward(model, first)
        except Exception as error:
            return [
                f"calibration: the model does not run on the first batch, {describe_value(first)}: "
                f"{format_error(error)}. Give inputs as the model takes them, in batches"
            ]
        return []

    def first(self) -> Any:
        """Return the inputs of the first batch that the user gave."""
        return next(iter(self._given_batches()))

    def read(self) -> list[Any]:
        """Return this process's part of the batches."""
        if self.given is not None:
            return [batch for i, batch in enumerate(self._given_batches()) if i % world_size() == rank()]
        assert self.train is not None
        loader, batches, images = shard_loader(self.train), [], 0
        with reproducible_reading(loader):
            seed_loader(loader, derive_seed(self.engine.seed, "calibration"), 0)
            for batch in loader:
                batches += split_batch(batch, -(-(batch_size_of(batch) or 1) // BATCH_SIZE))
                images += (batch_size_of(batch) or 1) * world_size()
                if images >= IMAGES_FROM_TRAIN:
                    break
        return batches

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Run a model on a batch of `read`."""
        batch = self.engine.move(batch)
        if self.given is None:
            return self.task.teach(model, batch)
        args, kwargs = as_call_inputs(batch)
        return model(*args, **kwargs)

    def _given_batches(self) -> Iterator[Any]:
        """Yield the inputs of each batch, without labels.

        Raises:
            BatchError: a single image is not a batch.
        """
        inputs_source = self.given
        if isinstance(inputs_source, Tensor):
            if inputs_source.ndim < 2:
                raise BatchError(f"calibration: expected a batch of inputs; got {describe_value(inputs_source)}")
            yield from torch.split(inputs_source, BATCH_SIZE)
            return
        with reproducible_reading(inputs_source):
            seed_loader(inputs_source, derive_seed(self.engine.seed, "calibration"), 0)
            for batch in inputs_source:
                inputs = self._inputs_of(batch)
                yield from split_batch(inputs, -(-(batch_size_of(inputs) or 1) // BATCH_SIZE))

    def _inputs_of(self, batch: Any) -> Any:
        if isinstance(batch, Tensor):
            return batch
        if isinstance(batch, Sequence) and len(batch) == 1:
            return batch[0]
        try:
            return self.task.inputs(batch)
        except Exception:  # of any type: the task expects labels
            return batch


def prefer_predictors_for_repair(
    run: Any, groups: Groups, importance: dict[str, Tensor]
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the importance for a network that will be repaired, and notes: what is kept predicts what is dropped."""
    data: CalibrationData = run.calibration
    with run.engine.display.bar("measuring activations") as bar:
        importance, changed = prefer_predictors(
            run.compact,
            groups,
            importance,
            data.read(),
            data.forward,
            on_progress=lambda done, total: bar.update(done, "", total),
        )
    if not changed:
        return importance, []
    which, method = "all" if len(changed) == len(groups) else f"{len(changed)} of", run.recipe.search.method
    note = f"least squares: {which} {len(groups)} groups keep the dimensions that best predict the dropped ones"
    return importance, [f"{note}; {method} decides how many"]


def repair_by_least_squares_(run: Any, before_cut: nn.Module, plan: Plan, report: Report) -> None:
    """Solve the layers of the cut network on the calibration data; write the result to the report."""
    data: CalibrationData = run.calibration
    include = included_modules(before_cut, run.recipe.target)
    with run.engine.display.bar("repair") as bar:
        repair = repair_(
            run.compact,
            before_cut,
            plan,
            data.read(),
            data.forward,
            within=include,
            on_layer=lambda done, total: bar.update(done, "", total),
        )
    report.repair = asdict(repair)
    for note in describe_repair(repair):
        add_note(report, note)


def describe_repair(repair: Repair) -> list[str]:
    """Return the result of a repair as notes for the report."""
    solved = [layer for layer in repair.layers if layer.is_solved]
    text = f"least squares: {len(solved)} layers were solved"
    if solved:
        before, after = (median(errors) for errors in _errors(solved))
        text += f"; the error of their outputs went from {before:.2g} to {after:.2g} of the variance (median)"
    if repair.agreement_before is not None and repair.agreement_after is not None:
        text += (
            f"; agreement with the network before the cut on the first batch: "
            f"{format_percent(repair.agreement_before)} before, {format_percent(repair.agreement_after)} after"
        )
    elif repair.error_before is not None and repair.error_after is not None:
        text += f"; error of the network's outputs: {repair.error_before:.2g} before, {repair.error_after:.2g} after"
    notes = [text]
    if repair.error_before is not None and repair.error_after is not None and repair.error_after > repair.error_before:
        notes.append(
            "least squares: the outputs are further from those before the cut than without it; leave `compensate` out"
        )
    attentions = [attention for attention in repair.attentions if attention.is_solved]
    if attentions:
        before, after = (median(errors) for errors in _errors(attentions))
        notes.append(
            f"least squares: queries and keys of {len(attentions)} attentions were solved; the error of their logits "
            f"went from {before:.2g} to {after:.2g} (median)"
        )
    notes += _what_was_left(layer for layer in repair.layers if layer.is_reader)
    notes += _what_was_left(repair.attentions, "queries and keys of ")
    if repair.few_samples:
        notes.append(
            f"least squares: {len(repair.few_samples)} layers have fewer samples than unknowns, "
            f"{repair.few_samples[0]} first, so their solution stays near the cut weights; give more inputs"
        )
    if repair.unused_batches:
        notes.append(
            f"least squares: {repair.unused_batches} of {repair.batches + repair.unused_batches} batches were not "
            "used: the activations of all would not fit in memory"
        )
    return notes


def _what_was_left(repairs: Iterable[LayerRepair | AttentionRepair], kind: str = "") -> list[str]:
    """Return a note for each reason why layers or attentions were left as they are."""
    by_reason: dict[str, list[str]] = {}
    for repair in repairs:
        if not repair.is_solved:
            by_reason.setdefault(repair.reason, []).append(repair.name)
    notes = []
    for reason, names in by_reason.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        notes.append(f"least squares: left as they are: {kind}{', '.join(names[:3])}{more}: {reason}")
    return notes


def _errors(solved: Sequence[LayerRepair | AttentionRepair]) -> tuple[list[float], list[float]]:
    return [repair.error_before or 0 for repair in solved], [repair.error_after or 0 for repair in solved]
