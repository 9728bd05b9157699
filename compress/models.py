"""Models by name, as the command line gives them."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

FORMS = "torchvision:NAME, timm:NAME or package.module:factory"
SIZE = (3, 224, 224)
WRAPPERS = ("module.", "_orig_mod.")  # what DataParallel, DDP and torch.compile put before every name


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


def untrained(spec: str) -> str:
    """What is to be said about a model that gets no weights from a file."""
    if spec.partition(":")[0] in ("torchvision", "timm"):
        return f"no --weights: those of {spec} are random; give --weights FILE"
    return f"no --weights: {spec} keeps those of its factory; if they are random, give --weights FILE"


def image_size(model: nn.Module) -> tuple[int, ...]:
    """Channels, height and width of an image: what a timm model says of itself, or else those of ImageNet."""
    for name in ("pretrained_cfg", "default_cfg"):
        told = getattr(model, name, None)
        size = told.get("input_size") if isinstance(told, Mapping) else None
        if isinstance(size, (tuple, list)) and len(size) == 3 and all(type(n) is int and n > 0 for n in size):
            return tuple(size)
    return SIZE


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
            state: Any = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # each format has its own
        raise ValueError(f"--weights {path}: {_unreadable(path, error)}") from error
    if isinstance(state, Mapping):
        state = state.get("state_dict", state.get("model", state))
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise ValueError(f"--weights {path}: expected tensors by name; got {type(state).__name__}. {SAVE}")
    expected = model.state_dict()
    state = _unwrapped(state, expected)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:  # which names every single key
        wrong = _misfits(state, expected) or [str(error)]
        raise ValueError(f"--weights {path}: " + "\n  ".join(wrong)) from error


SAVE = "Save it anew with torch.save(model.state_dict(), FILE)"


def _unreadable(path: Path, error: Exception) -> str:
    """Why a file is no state dict, without running anything that is in it."""
    try:
        classes = [] if path.suffix == ".safetensors" else _classes(path)
    except Exception:  # it is not a file of torch's
        classes = []
    if any(name.startswith("torch.nn.modules.") for name in classes):
        return f"holds a whole module, which cannot be read without running code; expected a state dict. {SAVE}"
    if classes:
        return f"holds more than tensors ({classes[0]}), which cannot be read without running code. {SAVE}"
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return f"not a state dict that can be read without running code ({text.strip()})"


def _classes(path: Path) -> list[str]:
    """The classes that reading a pickle would call, other than those of tensors."""
    found: list[str] = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    return sorted(found)


def _unwrapped(state: Any, expected: Mapping[str, Any]) -> Any:
    """The names as the model has them, where all that sets them apart is what a wrapper puts before every one."""
    for prefix in (p for _ in WRAPPERS for p in WRAPPERS):  # one may lie in the other
        apart = bool(state) and not state.keys() & expected.keys()
        if apart and all(name.startswith(prefix) for name in state):
            consume_prefix_in_state_dict_if_present(state, prefix)
        elif apart and {f"{prefix}{name}" for name in state} == expected.keys():
            return {f"{prefix}{name}": value for name, value in state.items()}
    return state


def _misfits(state: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """How many of the model's tensors are missing, left over or of another shape, with the first of each."""
    shapes = {name: list(value.shape) for name, value in state.items() if isinstance(value, torch.Tensor)}
    missing = [name for name in expected if name not in state]
    more = [name for name in state if name not in expected]
    other = [
        f"{name} ({shapes[name]} in the file, {list(value.shape)} in the model)"
        for name, value in expected.items()
        if isinstance(value, torch.Tensor) and name in shapes and list(value.shape) != shapes[name]
    ]
    if not (missing or more or other):
        return []
    return [
        f"expected the {len(expected)} tensors of the model; of the {len(state)} in the file some do not fit",
        *(f"missing from the file: {_few(missing)}" for _ in missing[:1]),
        *(f"not in the model: {_few(more)}" for _ in more[:1]),
        *(f"of another shape: {_few(other)}" for _ in other[:1]),
        "Give the weights of this model, or the --model that they were saved from",
        *(
            "For other classes write a function that returns the network: --model package.module:factory"
            for _ in other[:1]
        ),
    ]


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
