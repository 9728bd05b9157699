"""Read mmdet configs, given as a path, a name or a `Config`, and build the detectors that they describe."""

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


def read_config(config: ConfigLike, options: Mapping[str, Any] | None = None) -> Config:
    """Return a config that is ready to use: read, with options applied, and mmdet's modules registered.

    Args:
        config: a path, `mmdet::FOLDER/NAME.py`, the name of a config that comes with this library, or a `Config`.
        options: changes by dotted key, as those of `--cfg-options`.

    Raises:
        ValueError: the config does not exist, or does not describe a detector with a backbone.
    """
    if isinstance(config, Config):
        cfg = copy.deepcopy(config)
    elif str(config).startswith("mmdet::"):
        cfg = get_config(str(config))
    else:
        cfg = Config.fromfile(_config_path(config))
    cfg.merge_from_dict(dict(options or {}))
    if not isinstance(cfg.get("model"), dict) or "backbone" not in cfg.model:
        keys = ", ".join(cfg.model) if isinstance(cfg.get("model"), dict) else "no model"
        raise ValueError(
            f"{_config_name(config)}: expected the config of a detector, with model.backbone; it has {keys}"
        )
    register_all_modules(init_default_scope=False)
    init_default_scope(cfg.get("default_scope") or "mmdet")
    return cfg


def build_detector(config: ConfigLike, checkpoint: str | Path | None = None) -> nn.Module:
    """Build the detector of a config and load a checkpoint; without one, initialize it as for training.

    Args:
        config: as for `read_config`.
        checkpoint: a file or URL; default: the config's `load_from`.

    Raises:
        ValueError: config or checkpoint does not exist, or weights do not fit; the message names the keys.
    """
    cfg = read_config(config)
    checkpoint = checkpoint or cfg.get("load_from")
    model: nn.Module = MODELS.build(cfg.model)
    if checkpoint is None:
        with _silenced_logger():
            model.init_weights()  # type: ignore[operator]
    else:
        _load_checkpoint_(model, str(checkpoint))
    mark_initialized_(model)
    return model if torch.cuda.is_available() else revert_sync_batchnorm(model)  # SyncBN needs a GPU


def mark_initialized_(model: nn.Module) -> None:
    """Mark the weights as initialized; otherwise mmengine would initialize them again when training starts."""
    for module in model.modules():
        if hasattr(module, "is_init"):
            module.is_init = True  # type: ignore[assignment]


def parse_cfg_options(options: Sequence[str]) -> dict[str, Any]:
    """Parse `--cfg-options` as mmdet's tools do.

    >>> parse_cfg_options(["train_dataloader.batch_size=4", "model.backbone.depths=[2,2,6,2]"])
    {'train_dataloader.batch_size': 4, 'model.backbone.depths': [2, 2, 6, 2]}

    Raises:
        ValueError: an option is not KEY=VALUE.
    """
    if invalid := [option for option in options if "=" not in option]:
        raise ValueError(f"--cfg-options {invalid[0]}: expected KEY=VALUE, such as train_dataloader.batch_size=4")
    if not options:
        return {}
    parser = ArgumentParser()
    parser.add_argument("--cfg-options", nargs="*", action=DictAction, default={})
    values: dict[str, Any] = parser.parse_args(["--cfg-options", *options]).cfg_options
    return values


def packaged_configs() -> dict[str, Path]:
    """Return the configs that come with the library, by name."""
    folder = Path(str(resources.files("compress.recipes"))) / "mmdet"
    return {path.stem: path for path in sorted(folder.glob("*.py"))}


@contextmanager
def _silenced_logger() -> Iterator[None]:
    """Suppress mmengine's log line for each parameter that is initialized."""
    logger = MMLogger.get_current_instance()
    level = logger.level
    logger.setLevel("ERROR")
    try:
        yield
    finally:
        logger.setLevel(level)


def _config_path(config: str | Path) -> Path:
    """Return the path of a config.

    Raises:
        ValueError: it is neither a file nor the name of a packaged config.
    """
    if str(config) in packaged_configs():
        return packaged_configs()[str(config)]
    if Path(config).is_file():
        return Path(config)
    similar = difflib.get_close_matches(str(config), packaged_configs(), n=1)
    raise ValueError(
        f"{config}: expected the path of an mmdet config, one of mmdet's own as mmdet::swin/NAME.py, or one that comes "
        f"with this library ({', '.join(packaged_configs())}){f'. Did you mean {similar[0]}?' if similar else ''}"
    )


def _config_name(config: ConfigLike) -> str:
    return str(config.filename or "config") if isinstance(config, Config) else str(config)


def _load_checkpoint_(model: nn.Module, path: str) -> None:
    """Load a state dict into a model.

    Raises:
        ValueError: the file does not exist or is not a state dict, or its weights do not fit the model.
    """
    if "://" not in path and not Path(path).is_file():
        raise ValueError(f"checkpoint {path}: no such file")
    try:
        is_safetensors = path.endswith(".safetensors")
        state: Any = load_file(path) if is_safetensors else CheckpointLoader.load_checkpoint(path, "cpu")
        state = {re.sub(r"^module\.", "", key): value for key, value in state.get("state_dict", state).items()}
    except Exception as error:  # each format raises its own exceptions
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"checkpoint {path}: not a state dict that can be read without running code ({text})"
        ) from error
    expected = model.state_dict()
    problems = [f"{key}: missing from the checkpoint" for key in expected if key not in state]
    problems += [f"{key}: not in the detector" for key in state if key not in expected]
    problems += [
        f"{key}: the checkpoint has shape {list(state[key].shape)}, the detector {list(value.shape)}"
        for key, value in expected.items()
        if key in state and state[key].shape != value.shape
    ]
    if problems:
        more = [f"... and {len(problems) - 8} more"] if len(problems) > 8 else []
        lines = "\n  ".join(problems[:8] + more)
        raise ValueError(f"checkpoint {path}: does not fit the config's detector:\n  {lines}")
    model.load_state_dict(state)
