"""Configs of mmdet, as a path, a name or a `Config`, and the detectors that they describe."""

from __future__ import annotations

import copy
import difflib
import re
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

import torch
from mmdet.registry import MODELS
from mmdet.utils import register_all_modules
from mmengine.config import Config, DictAction
from mmengine.hub import get_config
from mmengine.logging import MMLogger
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import init_default_scope
from mmengine.runner import CheckpointLoader
from safetensors.torch import load_file
from torch import nn

ConfigLike: TypeAlias = str | Path | Config


def read(config: ConfigLike, options: Mapping[str, Any] | None = None) -> Config:
    """A config that is ready to use; `options` change it as `--cfg-options` do.

    Raises:
        ValueError: there is no such config, or it describes no detector with a backbone.
    """
    if isinstance(config, Config):
        found = copy.deepcopy(config)
    elif str(config).startswith("mmdet::"):
        found = get_config(str(config))
    else:
        found = Config.fromfile(_path(config))
    found.merge_from_dict(dict(options or {}))
    if not isinstance(found.get("model"), dict) or "backbone" not in found.model:
        held = ", ".join(found.model) if isinstance(found.get("model"), dict) else "no model"
        raise ValueError(f"{_name(config)}: expected the config of a detector, with model.backbone; it has {held}")
    register_all_modules(init_default_scope=False)
    init_default_scope(found.get("default_scope") or "mmdet")
    return found


def build(config: ConfigLike, checkpoint: str | Path | None = None) -> nn.Module:
    """The detector of a config, with the weights of a checkpoint; without one, as training would start it.

    Raises:
        ValueError: no such config or checkpoint, or weights that do not fit; the keys are named.
    """
    cfg = read(config)
    checkpoint = checkpoint or cfg.get("load_from")
    model: nn.Module = MODELS.build(cfg.model)
    if checkpoint is None:
        with _quietly():
            model.init_weights()  # type: ignore[operator]
    else:
        _load(model, str(checkpoint))
    settle_(model)
    return model if torch.cuda.is_available() else revert_sync_batchnorm(model)  # it needs a GPU as soon as it syncs


def settle_(model: nn.Module) -> None:
    """Tell mmengine that the weights are what they are to be: training would initialise them anew."""
    for module in model.modules():
        if hasattr(module, "is_init"):
            module.is_init = True  # type: ignore[assignment]


def parsed(options: Sequence[str]) -> dict[str, Any]:
    """`--cfg-options` as mmdet's tools read them.

    >>> parsed(["train_dataloader.batch_size=4", "model.backbone.depths=[2,2,6,2]"])
    {'train_dataloader.batch_size': 4, 'model.backbone.depths': [2, 2, 6, 2]}

    Raises:
        ValueError: one is not KEY=VALUE.
    """
    if wrong := [option for option in options if "=" not in option]:
        raise ValueError(f"--cfg-options {wrong[0]}: expected KEY=VALUE, as train_dataloader.batch_size=4")
    parser = ArgumentParser()
    parser.add_argument("--cfg-options", nargs="*", action=DictAction, default={})
    found: dict[str, Any] = parser.parse_args(["--cfg-options", *options]).cfg_options if options else {}
    return found


def packaged() -> dict[str, Path]:
    """The configs that come with the library, by name."""
    folder = Path(str(resources.files("compress.recipes"))) / "mmdet"
    return {path.stem: path for path in sorted(folder.glob("*.py"))}


@contextmanager
def _quietly() -> Iterator[None]:
    """Without a line for every parameter that is initialised."""
    logger = MMLogger.get_current_instance()
    before = logger.level
    logger.setLevel("ERROR")
    try:
        yield
    finally:
        logger.setLevel(before)


def _path(config: str | Path) -> Path:
    if Path(config).is_file():
        return Path(config)
    if str(config) in packaged():
        return packaged()[str(config)]
    near = difflib.get_close_matches(str(config), packaged(), n=1)
    raise ValueError(
        f"{config}: expected the path of an mmdet config, one of mmdet's own as mmdet::swin/NAME.py, or one that comes "
        f"along ({', '.join(packaged())}){f'. Did you mean {near[0]}?' if near else ''}"
    )


def _name(config: ConfigLike) -> str:
    return str(config.filename or "config") if isinstance(config, Config) else str(config)


def _load(model: nn.Module, path: str) -> None:
    if "://" not in path and not Path(path).is_file():
        raise ValueError(f"checkpoint {path}: no such file")
    try:
        plain = path.endswith(".safetensors")
        state: Any = load_file(path) if plain else CheckpointLoader.load_checkpoint(path, "cpu")
        state = {re.sub(r"^module\.", "", key): value for key, value in state.get("state_dict", state).items()}
    except Exception as error:  # each format has its own
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"checkpoint {path}: not a state dict that can be read without running code ({text})"
        ) from error
    own = model.state_dict()
    wrong = [f"{key}: missing from the checkpoint" for key in own if key not in state]
    wrong += [f"{key}: not in the detector" for key in state if key not in own]
    wrong += [
        f"{key}: the checkpoint has shape {list(state[key].shape)}, the detector {list(value.shape)}"
        for key, value in own.items()
        if key in state and state[key].shape != value.shape
    ]
    if wrong:
        more = [f"... and {len(wrong) - 8} more"] if len(wrong) > 8 else []
        raise ValueError(f"checkpoint {path}: does not fit the config's detector:\n  " + "\n  ".join(wrong[:8] + more))
    model.load_state_dict(state)
