"""Detection: a Task from an mmdet config. Data, losses, evaluator, optimiser and schedule are the config's."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from mmdet.datasets.samplers import AspectRatioBatchSampler
from mmdet.models.detectors import SingleStageDetector
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmengine.config import Config
from mmengine.dataset import BaseDataset
from mmengine.logging import MessageHub
from mmengine.runner import Runner
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..finetune import Work
from ..recipe import Export, Recipe, Timing
from ..task import BatchError
from .config import ConfigLike, read
from .distill import channelwise, maps, names_of
from .loading import write_config
from .tune import evaluate, finetune

if TYPE_CHECKING:
    from ..exporters.report import ExportReport

COMPARED = 8  # images that an export is compared on
PREPARED = 4  # batches that are kept as they were prepared: a bilevel step asks for two of them, several times


class FreshBatches(AspectRatioBatchSampler):  # type: ignore[misc]
    """mmdet's, which puts what an abandoned epoch has left over into the next one, without that."""

    def __iter__(self) -> Iterator[Any]:
        self._aspect_ratio_buckets: list[list[int]] = [[], []]
        return super().__iter__()  # type: ignore[no-any-return]


@dataclass
class Outputs:
    """What a detector says of a training batch: its loss, and the maps that are distilled."""

    loss: Tensor
    maps: list[Tensor]


def task(config: ConfigLike, options: Mapping[str, Any] | None = None, *, seed: int = 0) -> Detection:
    """The task that an mmdet config describes; `options` change it as `--cfg-options` do.

    Raises:
        ValueError: no such config, or data that cannot be read.
    """
    return Detection(read(config, options), seed)


class Detection:
    """Batches are mmdet's data dicts, the loss is `parse_losses`; fine-tuning and evaluation run on mmengine's Runner.

    Only the backbone is cut if the recipe's `target.include` names nothing. The dense detector teaches by channel-wise
    distillation of the neck's feature maps, or of those of `finetune.distill.features`.
    """

    include = ("backbone",)

    def __init__(self, cfg: Config, seed: int = 0) -> None:
        self.cfg, self.seed = cfg, seed
        self.train = self._loader("train_dataloader")
        self.val = self._loader("val_dataloader")
        if self.train is not None and isinstance(self.train.dataset, BaseDataset):
            self.train.halves = self._halves
        self._preprocess = MODELS.build(cfg.model.get("data_preprocessor") or {"type": "DetDataPreprocessor"})
        self._single = issubclass(MODELS.get(cfg.model.type), SingleStageDetector)
        self._prepared: list[tuple[Any, dict[str, Any]]] = []

    def inputs(self, batch: Any) -> Any:
        """One image, up to raw outputs where that is traced as a whole, and up to predictions where it is not."""
        data = self._data(batch)
        sample = DetDataSample(metainfo={"scale_factor": (1.0, 1.0), **data["data_samples"][0].metainfo})
        mode = "tensor" if self._single else "predict"
        return {"inputs": data["inputs"][:1], "data_samples": [sample], "mode": mode}

    def forward(self, model: nn.Module, batch: Any) -> Outputs:
        detector: Any = model
        with maps(model, names_of(model)) as seen:
            losses = model(**self._data(batch), mode="loss")
        return Outputs(detector.parse_losses(losses)[0], seen)

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        total: Tensor = outputs.loss
        return total

    def teach(self, model: nn.Module, batch: Any) -> list[Tensor]:
        """The dense detector's feature maps; its heads do not run."""
        detector: Any = model
        with maps(model, names_of(model)) as seen:
            detector.extract_feat(self._data(batch)["inputs"])
        return seen

    def distil(self, outputs: Any, teacher: Any, temperature: float) -> Tensor:
        return channelwise(outputs.maps, teacher, temperature)

    def evaluate(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """What the config's evaluator finds on its validation data; the Runner reads them itself."""
        return evaluate(self.cfg, model, self.val, self.seed)

    def finetune(self, work: Work) -> None:
        finetune(self.cfg, work, self.train, self.val)

    def save(self, folder: Path) -> None:
        """Write the config with which mmdet's tools load what is saved there."""
        write_config(self.cfg, folder / "config.py")

    def export(
        self, pair: tuple[nn.Module, nn.Module], asked: Export, path: Path, timing: Timing, **known: Any
    ) -> ExportReport:
        """Write the compact one of a pair as a complete detector, compared on validation images."""
        from ..exporters import detector

        about = detector.described(pair[1], **known)
        about.classes = about.classes or self.classes
        given: dict[str, Any] = {"opset": asked.opset, "slim": asked.slim, "about": about, "timing": timing}
        return detector.export(pair[1], path, self.pictures(COMPARED), dense=pair[0], **given)

    def pictures(self, count: int) -> list[Tensor]:
        """The first validation images in the size that the detector sees, RGB pixels.

        Raises:
            ValueError: there are none.
        """
        data: Any = [] if self.val is None else self.val.dataset
        if not len(data):
            raise ValueError("val_dataloader: an export is compared on validation images, and the config has none")
        return [data[i]["inputs"].flip(0) for i in range(min(count, len(data)))]  # mmdet loads BGR

    @property
    def classes(self) -> Sequence[str] | None:
        found = getattr(None if self.val is None else self.val.dataset, "metainfo", {})
        return found.get("classes")

    def objections(self, recipe: Recipe) -> list[str]:
        config, file = recipe.finetune, recipe.export
        wrong = []
        if file is not None and (file.half or file.int8):
            wrong.append(
                "export: half and int8 are not for detectors, whose files are in single precision; leave them out"
            )
        if config is None:
            return wrong
        if config.ema is not None:
            wrong.append("finetune.ema: fine-tuning runs on mmengine's Runner; name an EMAHook in the config's hooks")
        if config.recalibrate:
            wrong.append("finetune.recalibrate: fine-tuning runs on mmengine's Runner, which has none; leave it out")
        if config.distill is not None and "feature_weight" in config.distill.model_fields_set:
            wrong.append("finetune.distill.feature_weight: feature maps are all that is distilled; say weight instead")
        if recipe.engine.passes != "float32" and not torch.cuda.is_available():
            wrong.append("engine.precision: fine-tuning runs on mmengine's Runner, whose AMP is for GPUs; leave it out")
        if self.train is not None and self.cfg.get("optim_wrapper") is None:
            wrong.append("config.optim_wrapper: fine-tuning takes the optimiser from the config, and it has none")
        return wrong

    def _data(self, batch: Any) -> dict[str, Any]:
        """The batch as the detector takes it, prepared once: what a preprocessor draws or scales, it does one time."""
        for known, data in self._prepared:
            if known is batch:
                return data
        if not isinstance(batch, Mapping) or not {"inputs", "data_samples"} <= batch.keys():
            raise BatchError("the loader: expected mmdet's batches, a dict of inputs and data_samples; got another")
        hub = MessageHub.get_current_instance()
        hub.update_info("iter", (hub.get_info("iter") or 0) + 1)  # some preprocessors act every so many iterations
        device = batch["inputs"][0].device
        data = self._preprocess.to(device)(batch, training=True)
        self._prepared = [*self._prepared[1 - PREPARED :], (batch, data)]
        return data  # type: ignore[no-any-return]

    def _loader(self, name: str) -> DataLoader[Any] | None:
        settings = self.cfg.get(name)
        if settings is None:
            return None
        try:
            with redirect_stdout(sys.stderr):  # where pycocotools talks
                loader = self._built(settings)
        except OSError as error:
            raise ValueError(
                f"{self.cfg.filename or 'config'}: {name}.dataset cannot be read: {error}. Say where the data lie: "
                f"--cfg-options {name}.dataset.data_root=FOLDER (and the evaluator's ann_file)"
            ) from error
        except ValueError as error:  # of an empty dataset, or of one that is no COCO
            raise ValueError(
                f"{self.cfg.filename or 'config'}: {name}.dataset: expected images with boxes; found none ({error})"
            ) from error
        return loader

    def _built(self, settings: Mapping[str, Any]) -> DataLoader[Any]:
        loader: DataLoader[Any] = Runner.build_dataloader(settings, seed=self.seed)
        if type(loader.batch_sampler) is AspectRatioBatchSampler:
            loader.batch_sampler.__class__ = FreshBatches
        return loader

    def _halves(self, seed: int) -> list[DataLoader[Any]]:
        """Two loaders of the training data that share no image."""
        assert self.train is not None
        data: Any = self.train.dataset
        if len(data) < 2:
            raise BatchError(f"train: expected at least two images, to be split in halves; the dataset has {len(data)}")
        order = np.random.default_rng(seed).permutation(len(data))
        count = len(data) // 2
        settings = {key: value for key, value in self.cfg.train_dataloader.items() if key != "dataset"}
        return [
            self._built({**settings, "dataset": data.get_subset(sorted(part.tolist()))})
            for part in (order[:count], order[count : 2 * count])
        ]
