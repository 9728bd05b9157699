"""The detection task: data, losses, evaluator, optimizer and schedule of an mmdet config."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmdet.datasets.samplers import AspectRatioBatchSampler
from mmdet.models.detectors import SingleStageDetector
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmengine.config import Config
from mmengine.dataset import BaseDataset, InfiniteSampler
from mmengine.logging import MessageHub
from mmengine.runner import Runner
from torch import Tensor, nn
from torch.utils.data import DataLoader

from compress.errors import BatchError
from compress.exporters import ExportReport
from compress.recipe import Export, Recipe, Timing
from compress.surgery import Plan
from compress.training import FineTuneJob, Task

from .config import ConfigLike, read_config
from .distill import channelwise_loss, distilled_modules, record_feature_maps
from .onnx_export import describe_detector, export
from .pruned_config import write_config
from .runner import evaluate_on_runner, finetune_on_runner
from .train_loops import RestartedInfiniteSampler

NUM_COMPARED_IMAGES = 8  # on which an export is compared
NUM_CACHED_BATCHES = 4  # a step of a bilevel search uses two batches several times


class FreshBatches(AspectRatioBatchSampler):  # type: ignore[misc]
    """mmdet's batch sampler, but an epoch does not begin with leftover images of an unfinished one."""

    def __iter__(self) -> Iterator[Any]:
        self._aspect_ratio_buckets: list[list[int]] = [[], []]
        return super().__iter__()  # type: ignore[no-any-return]


@dataclass
class DetectionOutputs:
    """The loss of a detector on a training batch, and the feature maps that are distilled."""

    loss: Tensor
    maps: list[Tensor]


def detection_task(config: ConfigLike, options: Mapping[str, Any] | None = None, *, seed: int = 0) -> Detection:
    """Return the task that an mmdet config describes.

    Args:
        config: as for `read_config`.
        options: changes by dotted key, as those of `--cfg-options`.

    Raises:
        ValueError: the config does not exist, or its data cannot be read.
    """
    return Detection(read_config(config, options), seed)


class Detection(Task):
    """The task of an mmdet config; fine-tuning and evaluation run on mmengine's Runner.

    Batches are mmdet's data dicts, the loss is the sum of the detector's losses (`parse_losses`). By default only the
    backbone is pruned (recipe: `target.include`). The dense detector teaches by channel-wise distillation of the neck's
    feature maps (recipe: `finetune.distill.features`).
    """

    train: DataLoader[Any] | None
    val: DataLoader[Any] | None
    can_test = False  # mmengine's Runner reads `val`
    include = ("backbone",)

    def __init__(self, cfg: Config, seed: int = 0) -> None:
        self.cfg, self.seed = cfg, seed
        self.train = self._read_loader("train_dataloader")
        self.val = self._read_loader("val_dataloader")
        if self.train is not None and isinstance(self.train.dataset, BaseDataset):
            self.train.halves = self._halves
        self._preprocessor = MODELS.build(cfg.model.get("data_preprocessor") or {"type": "DetDataPreprocessor"})
        self._is_single_stage = issubclass(MODELS.get(cfg.model.type), SingleStageDetector)
        self._prepared_batches: list[tuple[Any, dict[str, Any]]] = []

    def inputs(self, batch: Any) -> dict[str, Any]:
        """Return the arguments for one image: raw outputs of a one-stage detector, else predictions.

        The raw outputs of other detectors do not include all layers.
        """
        data = self._prepare(batch)
        sample = DetDataSample(metainfo={"scale_factor": (1.0, 1.0), **data["data_samples"][0].metainfo})
        mode = "tensor" if self._is_single_stage else "predict"
        return {"inputs": data["inputs"][:1], "data_samples": [sample], "mode": mode}

    def forward(self, model: nn.Module, batch: Any) -> DetectionOutputs:
        detector: Any = model
        with record_feature_maps(model, distilled_modules(model)) as maps:
            losses = model(**self._prepare(batch), mode="loss")
        return DetectionOutputs(detector.parse_losses(losses)[0], maps)

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        total: Tensor = outputs.loss
        return total

    def teach(self, model: nn.Module, batch: Any) -> list[Tensor]:
        """Return the dense detector's feature maps; its heads do not run."""
        detector: Any = model
        with record_feature_maps(model, distilled_modules(model)) as maps:
            detector.extract_feat(self._prepare(batch)["inputs"])
        return maps

    def distil(self, outputs: Any, teacher: Any, temperature: float) -> Tensor:
        return channelwise_loss(outputs.maps, teacher, temperature)

    def evaluate(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """Return the metrics of the config's evaluator; `batches` is ignored, the Runner reads `val` itself."""
        return evaluate_on_runner(self.cfg, model, self.val, self.seed)

    def finetune(self, work: FineTuneJob) -> None:
        """Train the compact detector on mmengine's Runner."""
        finetune_on_runner(self.cfg, work, self.train, self.val)

    def save(self, folder: Path) -> None:
        """Write the config with which mmdet's tools load the detector saved in the folder."""
        write_config(self.cfg, folder / "config.py")

    def export(
        self,
        pair: tuple[nn.Module, nn.Module],
        settings: Export,
        path: Path,
        *,
        plan: Plan,
        recipe: dict[str, Any],
        timing: Timing,
    ) -> ExportReport:
        """Write the second of (dense, compact) as a complete detector, compared on validation images."""
        dense, compact = pair
        return export(
            compact,
            path,
            self.sample_images(NUM_COMPARED_IMAGES),
            opset=settings.opset,
            slim=settings.slim,
            dense=dense,
            about=describe_detector(compact, self.class_names, plan=plan, recipe=recipe),
            timing=timing,
        )

    def sample_images(self, count: int) -> list[Tensor]:
        """Return the first validation images as RGB pixels, in the size that the detector sees.

        Raises:
            ValueError: there are none.
        """
        dataset: Any = [] if self.val is None else self.val.dataset
        if not len(dataset):
            raise ValueError("val_dataloader: an export is compared on validation images, and the config has none")
        return [dataset[i]["inputs"].flip(0) for i in range(min(count, len(dataset)))]  # mmdet loads images as BGR

    @property
    def class_names(self) -> Sequence[str] | None:
        """The class names of the validation data, if it has any."""
        metainfo = getattr(None if self.val is None else self.val.dataset, "metainfo", {})
        return metainfo.get("classes")

    def objections(self, recipe: Recipe) -> list[str]:
        """Return the settings of the recipe that detectors do not support, one line each."""
        finetune, export_settings = recipe.finetune, recipe.export
        problems = []
        if export_settings is not None and (export_settings.half or export_settings.int8):
            problems.append("export: half and int8 are not supported for detectors; leave them out")
        if finetune is None:
            return problems
        if finetune.ema is not None:
            problems.append("finetune.ema: fine-tuning runs on mmengine's Runner; add an EMAHook to the config's hooks")
        if "decay_norms" in finetune.model_fields_set:
            problems.append(
                "finetune.decay_norms: fine-tuning runs on mmengine's Runner; set paramwise_cfg in its optim_wrapper"
            )
        if finetune.recalibrate:
            problems.append("finetune.recalibrate: fine-tuning runs on mmengine's Runner, which has none; leave it out")
        if finetune.distill is not None and "feature_weight" in finetune.distill.model_fields_set:
            problems.append("finetune.distill.feature_weight: only feature maps are distilled; set weight instead")
        if recipe.engine.effective_precision != "float32" and not torch.cuda.is_available():
            problems.append(
                "engine.precision: fine-tuning runs on mmengine's Runner, whose AMP needs a GPU; leave it out"
            )
        if self.train is not None and self.cfg.get("optim_wrapper") is None:
            problems.append("config.optim_wrapper: fine-tuning takes the optimizer from the config, and it has none")
        return problems

    def _prepare(self, batch: Any) -> dict[str, Any]:
        """Return the batch as the detector takes it; recent batches are cached.

        A preprocessor may draw random numbers, so a batch that is used twice is prepared once.

        Raises:
            BatchError: it is not a batch of mmdet.
        """
        for cached_batch, data in self._prepared_batches:
            if cached_batch is batch:
                return data
        if not isinstance(batch, Mapping) or not {"inputs", "data_samples"} <= batch.keys():
            raise BatchError(
                "the loader: expected mmdet's batches, a dict with inputs and data_samples; got "
                f"{', '.join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__}"
            )
        hub = MessageHub.get_current_instance()
        hub.update_info("iter", (hub.get_info("iter") or 0) + 1)  # some preprocessors act every few iterations
        device = batch["inputs"][0].device
        data = self._preprocessor.to(device)(batch, training=True)
        self._prepared_batches = [*self._prepared_batches[1 - NUM_CACHED_BATCHES :], (batch, data)]
        return data  # type: ignore[no-any-return]

    def _read_loader(self, name: str) -> DataLoader[Any] | None:
        """
        Raises:
            ValueError: the dataset cannot be read or is empty.
        """
        settings = self.cfg.get(name)
        if settings is None:
            return None
        try:
            with redirect_stdout(sys.stderr):  # pycocotools prints
                return self._build_loader(settings)
        except OSError as error:
            raise ValueError(
                f"{self.cfg.filename or 'config'}: {name}.dataset cannot be read: {error}. Set the location of the "
                f"data: --cfg-options {name}.dataset.data_root=FOLDER (and the evaluator's ann_file)"
            ) from error
        except ValueError as error:  # an empty dataset, or one that is not in COCO's format
            raise ValueError(
                f"{self.cfg.filename or 'config'}: {name}.dataset: expected images with boxes; found none ({error})"
            ) from error

    def _build_loader(self, settings: Mapping[str, Any]) -> DataLoader[Any]:
        loader: DataLoader[Any] = Runner.build_dataloader(settings, seed=self.seed)
        if type(loader.batch_sampler) is AspectRatioBatchSampler:
            loader.batch_sampler.__class__ = FreshBatches
        if type(loader.sampler) is InfiniteSampler:
            loader.sampler.__class__ = RestartedInfiniteSampler
        return loader

    def _halves(self, seed: int) -> list[DataLoader[Any]]:
        """Return two loaders of the training data that share no image.

        Raises:
            BatchError: the dataset has less than two images.
        """
        assert self.train is not None
        dataset: Any = self.train.dataset
        if len(dataset) < 2:
            raise BatchError(f"train: expected at least two images, to split them in halves; got {len(dataset)}")
        order = np.random.default_rng(seed).permutation(len(dataset))
        count = len(dataset) // 2
        settings = {key: value for key, value in self.cfg.train_dataloader.items() if key != "dataset"}
        return [
            self._build_loader({**settings, "dataset": dataset.get_subset(sorted(indices.tolist()))})
            for indices in (order[:count], order[count : 2 * count])
        ]
