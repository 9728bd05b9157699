"""Models by name, as the command line gives them."""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

FORMS = "torchvision:NAME, timm:NAME or package.module:factory"


def build(spec: str, weights: Path | None = None) -> nn.Module:
    """A model from `torchvision:resnet18`, `timm:resnet18` or `package.module:factory`, with weights from a file.

    Raises:
        ValueError: no such model, or weights that do not fit it.
    """
    source, _, name = spec.partition(":")
    if not name:
        raise ValueError(f"--model {spec}: expected {FORMS}")
    model = _named(source, name) if source in ("torchvision", "timm") else _factory(source, name)
    if weights is not None:
        _load(model, weights)
    return model


def _named(source: str, name: str) -> nn.Module:
    import timm
    import torchvision

    known = torchvision.models.list_models() if source == "torchvision" else timm.list_models()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        raise ValueError(f"--model {source}:{name}: no such model; the nearest are {', '.join(near) or 'none'}")
    if source == "timm":
        model: nn.Module = timm.create_model(name)
        return model
    quiet: dict[str, Any] = {"weights": None}
    if name.startswith(("googlenet", "inception")):
        quiet["init_weights"] = True
    if any(part in name for part in ("deeplab", "fcn", "lraspp", "rcnn", "retinanet", "fcos", "ssd", "keypoint")):
        quiet["weights_backbone"] = None
    model = torchvision.models.get_model(name, **quiet)
    return model


def _factory(source: str, name: str) -> nn.Module:
    try:
        factory = getattr(importlib.import_module(source), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--model {source}:{name}: {error}. Expected {FORMS}, importable from here.") from error
    model = factory()
    if not isinstance(model, nn.Module):
        raise ValueError(f"--model {source}:{name}: expected a torch.nn.Module, got {type(model).__name__}")
    return model


def _load(model: nn.Module, path: Path) -> None:
    if not path.exists():
        raise ValueError(f"--weights {path}: no such file")
    try:
        if path.suffix == ".safetensors":
            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
            state = state.get("state_dict", state.get("model", state))
    except Exception as error:  # each format has its own
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"--weights {path}: not a state dict that can be read without running code ({text})"
        ) from error
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"--weights {path}: {error}") from error
