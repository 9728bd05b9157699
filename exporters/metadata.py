"""Metadata of an exported file: plan, recipe, input normalization and class names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compress.surgery import Plan
from compress.version import __version__

from .runtime import OnnxRunner

PREFIX = "compress."


@dataclass
class ExportMetadata:
    """Information about a model that is written into the file; each part is optional."""

    plan: Plan | None = None
    recipe: Mapping[str, Any] | None = None  # as JSON-compatible data
    mean: Sequence[float] | None = None  # inputs are (value in 0..1 - mean) / std, channel by channel
    std: Sequence[float] | None = None
    classes: Sequence[str] | None = None
    more: Mapping[str, str] = field(default_factory=dict)  # further entries by their full key

    @classmethod
    def from_loader(cls, loader: Any, **fields: Any) -> ExportMetadata:
        """Take class names and normalization from a loader, where its torchvision or timm dataset has them.

        Args:
            fields: further fields of the metadata.
        """
        dataset = getattr(loader, "dataset", loader)
        while not hasattr(dataset, "classes") and hasattr(dataset, "dataset"):  # torch.utils.data.Subset
            dataset = dataset.dataset
        classes = getattr(dataset, "classes", None)
        are_names = isinstance(classes, (list, tuple)) and all(isinstance(c, str) for c in classes)
        mean, std = _normalization(getattr(dataset, "transform", None))
        return cls(classes=list(classes) if are_names and classes else None, mean=mean, std=std, **fields)

    def entries(self, inputs: Mapping[str, Sequence[Any]]) -> dict[str, str]:
        """Return the metadata as ONNX stores it: text by key.

        Args:
            inputs: the shape of each input by name.
        """
        entries = {
            "version": __version__,
            "inputs": json.dumps({n: self._describe_input(s) for n, s in inputs.items()}),
        }
        if self.plan is not None:
            entries["plan"] = self.plan.digest()
        if self.recipe is not None:
            entries["recipe"] = json.dumps(self.recipe)
        if self.classes is not None:
            entries["classes"] = json.dumps(list(self.classes), ensure_ascii=False)
        return {f"{PREFIX}{key}": value for key, value in entries.items()} | dict(self.more)

    def _describe_input(self, shape: Sequence[Any]) -> dict[str, Any]:
        entries = {"shape": list(shape), "mean": self.mean, "std": self.std}
        return {key: list(value) for key, value in entries.items() if value is not None}


def read_metadata(path: str | Path) -> dict[str, Any]:
    """Return the metadata of a file that `export` wrote: version, inputs and, where known, plan, recipe and classes.

    Raises:
        MissingExtra: onnxruntime is not installed.
        ExportError: onnxruntime does not load the file.
    """
    entries = OnnxRunner(path).session.get_modelmeta().custom_metadata_map
    not_json = {"plan", "version"}
    own = {key.removeprefix(PREFIX): text for key, text in entries.items() if key.startswith(PREFIX)}
    return {key: text if key in not_json else json.loads(text) for key, text in own.items()}


def _normalization(transform: Any) -> tuple[list[float] | None, list[float] | None]:
    """Return mean and standard deviation of the last `Normalize` among the transforms."""
    normalization: tuple[list[float] | None, list[float] | None] = (None, None)
    for step in getattr(transform, "transforms", [transform]):
        mean, std = getattr(step, "mean", None), getattr(step, "std", None)
        if type(step).__name__ == "Normalize" and mean is not None and std is not None:
            normalization = [float(m) for m in mean], [float(s) for s in std]
    return normalization
