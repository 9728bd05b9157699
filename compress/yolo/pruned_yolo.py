"""A pruned network as a YOLO object: it predicts, validates, exports and trains, and is saved without pickle."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

from torch import nn
from ultralytics import YOLO
from ultralytics.engine.model import Model
from ultralytics.utils import DEFAULT_CFG_DICT, callbacks

from compress.modules import set_eval_flags_
from compress.storage import YOLO_FILE, atomic_directory, find_saved
from compress.surgery import Plan, save_model
from compress.surgery import load as load_network_

from .architecture import Architecture
from .families import family_of
from .networks import YAML_SUFFIXES, build
from .trainers import keep_network

DEFAULT_IMAGE_SIZE = 640


class PrunedYOLO(YOLO):  # type: ignore[misc]
    """YOLO object of a pruned network. `train` goes on with its widths, where `YOLO` would build the dense network.

    Args:
        network: `pruned.model`, or any other network of Ultralytics.
        plan: `pruned.plan`; needed to save the network again after `train`.
        image_size: default of `predict`, `val`, `train` and `export`; default: that of the network's own settings.
    """

    def __init__(self, network: nn.Module, plan: Plan | None = None, image_size: int | None = None) -> None:
        nn.Module.__init__(self)  # those of YOLO build or read a network
        family = family_of(network)
        described = cast(Any, network)
        self.callbacks = callbacks.get_default_callbacks()
        self.predictor = self.trainer = self.metrics = self.cfg = self.ckpt_path = None
        self.ckpt: dict[str, Any] = {}
        self.plan, self.task = plan, family.task
        self.model_name = str(described.yaml.get("yaml_file") or "pruned.yaml")
        size = image_size or _image_size(described)
        self.overrides = {"model": self.model_name, "task": self.task, **({"imgsz": size} if size else {})}
        described.args = {**DEFAULT_CFG_DICT, **self.overrides}
        described.task = self.task
        self.model = network
        self._family = family
        del self.training  # as YOLO does: the mode is that of the network

    @property
    def task_map(self) -> dict[str, dict[str, type[Any]]]:
        """The classes of Ultralytics for the network, by task."""
        return {self._family.task: self._family.classes}

    def train(self, trainer: type[Any] | None = None, **settings: Any) -> Any:
        """Train the pruned network as `YOLO.train` trains a dense one, on one device.

        Ultralytics writes its checkpoints, which are pickles, and reads the best one back.

        Raises:
            ValueError: `resume` is given; a stopped training starts again from the weights of its checkpoint.
        """
        if settings.get("resume"):
            raise ValueError(
                "resume: Ultralytics would start again on data of its own. Start from the weights of the last epoch: "
                'compress.yolo.PrunedYOLO(compress.yolo.build("last.pt").model, plan).train(...), with the plan of the '
                "saved network (.plan)"
            )
        chosen = trainer or self._smart_load("trainer")
        return super().train(trainer=keep_network(chosen, self.model), **settings)


def _image_size(network: Any) -> int | None:
    settings = getattr(network, "args", None)
    values = settings if isinstance(settings, dict) else vars(settings) if settings is not None else {}
    size = values.get("imgsz")
    return size if isinstance(size, int) and size != DEFAULT_IMAGE_SIZE else None


def save(pruned: Any, directory: str | Path) -> None:
    """Save a result of `compress.prune`, or a `PrunedYOLO`, with the architecture that `load` needs; without pickle.

    Raises:
        ValueError: a `PrunedYOLO` has no plan.
        FileExistsError: the directory holds other files.
        OSError: a file cannot be written.
    """
    directory = Path(directory)
    architecture = Architecture.of(pruned.model, _image_size(pruned.model))
    if not isinstance(pruned, PrunedYOLO):
        pruned.save(directory)
        architecture.save(directory)
        return
    if pruned.plan is None:
        raise ValueError("plan: expected the plan that the network was pruned by: PrunedYOLO(network, pruned.plan)")
    with atomic_directory(directory) as folder:
        save_model(pruned.model, pruned.plan, folder)
        architecture.save(folder)


def load(directory: str | Path, model: str | Path | Model | None = None) -> PrunedYOLO:
    """Return the pruned YOLO that is saved in a directory: by `compress prune --yolo`, a workdir, or `save`.

    No code is loaded from disk.

    Args:
        model: YAML of the dense network, or a YOLO object of it; default: the architecture that the directory knows.

    Raises:
        FileNotFoundError: there is no saved network, or no architecture is known.
        PlanError: the directory is damaged, or was saved from another network.
        ValueError: the YAML or the saved architecture cannot be used.
    """
    folder = find_saved(Path(directory))
    if not (folder / "plan.json").is_file():
        raise FileNotFoundError(
            f"{folder}: expected a directory written by save(), or a workdir; it has no plan.json. "
            "A .pt file that Ultralytics wrote is read by compress.yolo.build, or by ultralytics.YOLO"
        )
    saved: Architecture | None = None
    if model is None:
        saved = Architecture.read(folder)
        network = saved.build(str(folder / YOLO_FILE))
    elif isinstance(model, Model):
        network = copy.deepcopy(model.model)
    else:
        try:
            saved = Architecture.read(folder)
        except (FileNotFoundError, ValueError):  # the user's YAML takes its place
            saved = None
        if Path(model).suffix.lower() not in YAML_SUFFIXES:
            raise ValueError(f"model {model}: expected the YAML of the dense network; its weights are in the directory")
        network = build(model, classes=None if saved is None else len(saved.names)).model
        if saved is not None:
            network.names = dict(saved.names)
    load_network_(network, folder)
    set_eval_flags_(network)
    return PrunedYOLO(network, Plan.load(folder / "plan.json"), None if saved is None else saved.image_size)
