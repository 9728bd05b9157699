"""The task of a YOLO: data, augmentation, losses and metrics are Ultralytics' own; so is fine-tuning."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from ultralytics.engine.model import Model
from ultralytics.nn.tasks import RTDETRDetectionModel
from ultralytics.utils.loss import v8ClassificationLoss

from compress.distributed import on_rank_zero, world_size
from compress.errors import BatchError
from compress.modules import unwrap_model
from compress.recipe import Recipe
from compress.training import FineTuneJob, Task

from .architecture import Architecture
from .datasets import build_loader, read_data, with_settings
from .distillation import distillation_loss
from .families import Family, family_of
from .fine_tuning import fine_tune
from .networks import unfreeze_
from .quiet import NoCallbacks, quiet
from .settings import changed_settings, objections, read_settings

CLASSIFIER_IMAGE_SIZE = 224  # Ultralytics' default for classifiers; that of the others is 640


@dataclass
class YoloOutputs:
    """Raw predictions of a network on a batch, and the loss where the network computes both at once."""

    predictions: Any
    loss: Tensor | None = None


def yolo_task(model: Model | nn.Module, *, data: str | Path, seed: int = 0, **settings: Any) -> YoloTask:
    """Return the task of a YOLO object, or of its network, on a data YAML.

    A network whose classes have numbers for names, as those that are built from a YAML, gets the names of the data.
    A network whose parameters are all frozen, as in Ultralytics' checkpoints, is unfrozen.

    Args:
        data: data YAML with train, val and names; for classification a folder.
        settings: of Ultralytics, such as imgsz=320, batch=8, mosaic=0.5.

    Raises:
        ValueError: the head is not known, the data cannot be read or have other classes, or a setting is refused.
    """
    network: Any = model.model if isinstance(model, Model) else unwrap_model(model)
    family = family_of(network)
    content = read_data(data, family)
    classes = len(network.names)
    if classes != content["nc"]:
        raise ValueError(
            f"data {data}: expected {classes} classes, those of the network; got {content['nc']}. Train the dense "
            f'network on these data first, or build it for them: compress.yolo.build("x.yaml", classes={content["nc"]})'
        )
    shapes = [list(described.get("kpt_shape") or ()) for described in (network.yaml, content)]
    if family.task == "pose" and shapes[0] != shapes[1]:
        raise ValueError(
            f"data {data}: kpt_shape: expected {shapes[0]}, that of the network; got {shapes[1]}. Train the dense "
            f'network on these data first, or build it for them: compress.yolo.build("x.yaml", keypoints={shapes[1]})'
        )
    if all(str(name) == str(number) for number, name in network.names.items()):
        network.names = {number: str(content["names"][number]) for number in range(classes)}
    unfreeze_(network)
    default_size = CLASSIFIER_IMAGE_SIZE if family.task == "classify" else None
    values = read_settings(family.task, str(data), settings, default_size)
    if values.imgsz % (stride := int(network.stride.max())):
        nearest = max(stride, round(values.imgsz / stride) * stride)
        raise ValueError(
            f"imgsz: expected a multiple of {stride}, the stride of the network; got {values.imgsz}. Give {nearest}"
        )
    return YoloTask(network, family, content, values, seed)


class YoloTask(Task):
    """Losses, loaders, augmentation and metrics of Ultralytics for one network and one data YAML.

    Batches are Ultralytics' dicts. The loss is its weighted sum of losses per image. The dense network teaches by the
    outputs of its head (recipe: `finetune.distill`).
    """

    train: DataLoader[Any] | None
    val: DataLoader[Any] | None
    can_test = False  # Ultralytics' validators read the validation data of the YAML

    def __init__(self, network: Any, family: Family, data: dict[str, Any], settings: Any, seed: int = 0) -> None:
        self.family, self.data, self.settings, self.seed = family, data, settings, seed
        self.architecture = Architecture.of(network, settings.imgsz)
        self.train = build_loader(family, network, settings, data, "train")
        self.val = build_loader(family, network, settings, data, "val")
        self._criteria: dict[torch.device, Any] = {}

    def describe(self) -> dict[str, Any]:
        return changed_settings(self.settings)

    def inputs(self, batch: Any) -> Tensor:
        """Return the first image of a batch."""
        return self._prepare(batch)["img"][:1]  # type: ignore[no-any-return]

    def forward(self, model: nn.Module, batch: Any) -> YoloOutputs:
        batch = self._prepare(batch)
        if self.family.network is RTDETRDetectionModel:  # its decoder also takes the targets, with noise
            with self._criterion_on(unwrap_model(model), batch["img"].device):
                return YoloOutputs(None, model(batch)[0])
        return YoloOutputs(model(batch["img"]))

    def loss(self, outputs: YoloOutputs, batch: Any) -> Tensor:
        if outputs.loss is not None:
            return outputs.loss
        batch = self._prepare(batch)
        criterion = self._criterion(batch["img"].device)
        total: Tensor = criterion(outputs.predictions, batch)[0].sum()
        return total if isinstance(criterion, v8ClassificationLoss) else total / len(batch["img"])

    def distil(self, outputs: YoloOutputs, teacher: YoloOutputs, temperature: float) -> Tensor:
        return distillation_loss(outputs.predictions, teacher.predictions, temperature)

    def evaluate(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """Return the metrics of Ultralytics' validator; `batches` is ignored, the validator reads `val` itself.

        The first is mAP50-95 (of masks or poses where there are any), or the accuracy of a classifier.
        """
        return on_rank_zero(lambda: self._validate(model))

    def _validate(self, model: nn.Module) -> dict[str, float]:
        network = unwrap_model(model)
        network = with_settings(network, vars(self.settings), self.data)  # the validator makes a copy of it
        device = next(network.parameters()).device
        name = str(device.index or 0) if device.type == "cuda" else device.type
        with tempfile.TemporaryDirectory() as folder, quiet():
            args = {**vars(self.settings), "mode": "val", "device": name, "rect": True}
            validator = self.family.validator(self.val, Path(folder), args, NoCallbacks())
            metrics = validator(model=network)
        values = {key.removeprefix("metrics/"): float(value) for key, value in metrics.items() if "/" in key}
        return dict(sorted(values.items(), key=lambda item: _rank(item[0])))

    def finetune(self, work: FineTuneJob) -> None:
        """Train the compact network with Ultralytics' own trainer."""
        assert self.train is not None
        fine_tune(self.family, self.settings, self.data, work, len(self.train))

    def save(self, folder: Path) -> None:
        """Write the architecture, with which `compress.yolo.load` needs no YAML."""
        self.architecture.save(folder)

    def objections(self, recipe: Recipe) -> list[str]:
        """Return the settings of the recipe that Ultralytics' trainer does not support, one line each."""
        problems = objections(recipe, world_size())
        distills = [recipe.finetune is not None and recipe.finetune.distill is not None]
        distills.append(getattr(recipe.search, "distill", None) is not None)
        if any(distills) and self.family.network is RTDETRDetectionModel:
            problems.append(
                "distill: the queries of RT-DETR have no order, so its outputs are not distilled. Write a recipe that "
                "sets it to null, such as `extends: yolo_half` and `finetune: {epochs: 100, distill: null}`"
            )
        return problems

    def _prepare(self, batch: Any) -> dict[str, Any]:
        """Return a batch with its images from 0 to 1.

        Raises:
            BatchError: it is not a batch of Ultralytics.
        """
        if not isinstance(batch, Mapping) or not {"img", "cls"} <= batch.keys():
            names = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
            raise BatchError(f"the loader: expected Ultralytics' batches, a dict with img and cls; got {names}")
        images = batch["img"]
        return {**batch, "img": images.float() / 255 if images.dtype == torch.uint8 else images}

    def _criterion(self, device: torch.device) -> Any:
        """Return Ultralytics' criterion; it reads widths of the head's outputs from the network, which are not cut."""
        if device not in self._criteria:
            dense: Any = self.architecture.build().to(device)
            self._criteria[device] = with_settings(dense, self.settings, self.data).init_criterion()
        return self._criteria[device]

    @contextmanager
    def _criterion_on(self, network: nn.Module, device: torch.device) -> Iterator[None]:
        """Let a network find the criterion where its own loss looks for it, during the block."""
        before = vars(network).get("criterion", self)
        vars(network)["criterion"] = self._criterion(device)
        try:
            yield
        finally:
            del vars(network)["criterion"]
            if before is not self:
                vars(network)["criterion"] = before


def _rank(metric: str) -> tuple[bool, bool, str]:
    """Return a key that sorts the metric first that decides which weights are best."""
    return not metric.startswith(("mAP50-95", "accuracy_top1")), metric.endswith("(B)"), metric
