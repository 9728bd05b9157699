"""What a file says of itself: the plan, the recipe, how inputs are prepared, what the classes are called."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import compress
from compress.plan import Plan

PREFIX = "compress."


@dataclass
class About:
    """What is known about a model beside its graph; each part may be left out."""

    plan: Plan | None = None
    recipe: Mapping[str, Any] | None = None  # as plain data
    mean: Sequence[float] | None = None  # inputs are (value in 0..1 - mean) / std, channel by channel
    std: Sequence[float] | None = None
    classes: Sequence[str] | None = None
    more: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_loader(cls, loader: Any, **known: Any) -> About:
        """Class names and normalisation as far as a loader of torchvision's or timm's datasets knows them."""
        data = getattr(loader, "dataset", loader)
        while not hasattr(data, "classes") and hasattr(data, "dataset"):  # Subset
            data = data.dataset
        classes = getattr(data, "classes", None)
        named = isinstance(classes, (list, tuple)) and all(isinstance(c, str) for c in classes)
        mean, std = _normalisation(getattr(data, "transform", None))
        return cls(classes=list(classes) if named and classes else None, mean=mean, std=std, **known)

    def entries(self, inputs: Mapping[str, Sequence[Any]]) -> dict[str, str]:
        """Text by key, as ONNX has it."""
        found = {"version": compress.__version__, "inputs": json.dumps({n: self._input(s) for n, s in inputs.items()})}
        if self.plan is not None:
            found["plan"] = plan_hash(self.plan)
        if self.recipe is not None:
            found["recipe"] = json.dumps(self.recipe)
        if self.classes is not None:
            found["classes"] = json.dumps(list(self.classes), ensure_ascii=False)
        return {f"{PREFIX}{key}": value for key, value in found.items()} | dict(self.more)

    def _input(self, shape: Sequence[Any]) -> dict[str, Any]:
        known = {"shape": list(shape), "mean": self.mean, "std": self.std}
        return {key: list(value) for key, value in known.items() if value is not None}


def plan_hash(plan: Plan) -> str:
    """The same for the same plan, wherever it was saved."""
    return hashlib.sha256(json.dumps(plan.to_dict(), sort_keys=True).encode()).hexdigest()


def read_metadata(path: str | Path) -> dict[str, Any]:
    """What a file of ours says of itself, as data: version, inputs, and as far as known plan, recipe and classes."""
    from .runtime import Runner

    entries = Runner(path).session.get_modelmeta().custom_metadata_map
    plain = {"plan", "version"}
    ours = {key.removeprefix(PREFIX): text for key, text in entries.items() if key.startswith(PREFIX)}
    return {key: text if key in plain else json.loads(text) for key, text in ours.items()}


def _normalisation(transform: Any) -> tuple[list[float] | None, list[float] | None]:
    """Mean and deviation of the last `Normalize` among transforms."""
    found: tuple[list[float] | None, list[float] | None] = (None, None)
    for step in getattr(transform, "transforms", [transform]):
        mean, std = getattr(step, "mean", None), getattr(step, "std", None)
        if type(step).__name__ == "Normalize" and mean is not None and std is not None:
            found = [float(m) for m in mean], [float(s) for s in std]
    return found
