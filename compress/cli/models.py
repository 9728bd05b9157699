"""Models that the command line names: `torchvision:NAME`, `timm:NAME` or `package.module:factory`."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from compress.recipe import packaged_recipes

MODEL_FORMS = "torchvision:NAME, timm:NAME or package.module:factory"
YAML = (".yaml", ".yml")
IMAGENET_SIZE = (3, 224, 224)
WRAPPER_PREFIXES = ("module.", "_orig_mod.")  # that DataParallel, DDP and torch.compile add to every name


def build_model(spec: str, weights: Path | None = None, option: str = "--model") -> nn.Module:
    """Build a model from `torchvision:resnet18`, `timm:resnet18` or `package.module:factory`; load weights from a file.

    Args:
        option: the option that names the model, for messages; its weights are those of `weights_option(option)`.

    Raises:
        ValueError: there is no such model, or the weights do not fit it.
    """
    source, _, name = spec.partition(":")
    if not name:
        raise ValueError(f"{option} {spec}: expected {MODEL_FORMS}")
    model = (
        _build_from_library(source, name, option)
        if source in ("torchvision", "timm")
        else _build_from_factory(source, name, option)
    )
    if weights is not None:
        load_weights_(model, weights, option)
    return model


def load_weights_(model: nn.Module, path: Path, option: str = "--model") -> None:
    """Load the state dict in a file into a model, without running code that is in the file.

    Args:
        option: the option that names the model, for messages.

    Raises:
        ValueError: there is no such file, or the weights do not fit.
    """
    try:
        _load_weights(model, path)
    except ValueError as error:
        raise ValueError(f"{weights_option(option)} {path}: {error}") from error


def complete_recipe(incomplete: str) -> list[str]:
    """Return the packaged recipes, YAML files and folders whose names start with a text, for the shell's completion."""
    folder, _, prefix = incomplete.rpartition("/")
    paths = Path(f"{folder}/" if "/" in incomplete else ".").glob(f"{prefix}*")
    files = sorted(f"{path}/" * path.is_dir() or str(path) for path in paths if path.is_dir() or path.suffix in YAML)
    return [*sorted(name for name in packaged_recipes() if name.startswith(incomplete)), *files]


def import_from_current_directory() -> None:
    """Make the current directory importable, as `python -m` does, because the user names code in this call.

    Not before: a module in a saved directory must not take the place of an installed one.
    """
    if "" not in sys.path:
        sys.path.insert(0, "")


def weights_option(option: str) -> str:
    """Return the option for the weights of the model that an option names: --weights or --teacher-weights."""
    return "--weights" if option == "--model" else f"{option}-weights"


def weights_notice(spec: str, option: str = "--model") -> str:
    """Return a notice about the weights of a model that gets none from a file."""
    weights = weights_option(option)
    if spec.partition(":")[0] in ("torchvision", "timm"):
        return f"no {weights}: {spec} has random weights; give {weights} FILE"
    return f"no {weights}: {spec} has the weights of its factory; if they are random, give {weights} FILE"


def image_size(model: nn.Module) -> tuple[int, ...]:
    """Return channels, height and width of an image: from the config of a timm model, or else those of ImageNet."""
    for name in ("pretrained_cfg", "default_cfg"):
        config = getattr(model, name, None)
        size = config.get("input_size") if isinstance(config, Mapping) else None
        if isinstance(size, (tuple, list)) and len(size) == 3 and all(type(n) is int and n > 0 for n in size):
            return tuple(size)
    return IMAGENET_SIZE


def _build_from_library(source: str, name: str, option: str) -> nn.Module:
    import timm
    import torchvision

    known = torchvision.models.list_models() if source == "torchvision" else timm.list_models()
    if name not in known:
        nearest = difflib.get_close_matches(name, known, n=3)
        raise ValueError(f"{option} {source}:{name}: no such model; the nearest are {', '.join(nearest) or 'none'}")
    if source == "timm":
        model: nn.Module = timm.create_model(name)
        return model
    options: dict[str, Any] = {"weights": None}  # no download, no warning
    if name.startswith(("googlenet", "inception")):
        options["init_weights"] = True
    if any(part in name for part in ("deeplab", "fcn", "lraspp", "rcnn", "retinanet", "fcos", "ssd", "keypoint")):
        options["weights_backbone"] = None
    model = torchvision.models.get_model(name, **options)
    return model


def _build_from_factory(source: str, name: str, option: str) -> nn.Module:
    import_from_current_directory()
    try:
        factory = getattr(importlib.import_module(source), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{option} {source}:{name}: {error}. Expected {MODEL_FORMS}, importable from the current directory."
        ) from error
    model = factory()
    if not isinstance(model, nn.Module):
        raise ValueError(f"{option} {source}:{name}: expected a torch.nn.Module, got {type(model).__name__}")
    return model


def _load_weights(model: nn.Module, path: Path) -> None:
    if not path.exists():
        raise ValueError("no such file")
    try:
        if path.suffix == ".safetensors":
            state: Any = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the type depends on the format
        raise ValueError(_explain_unreadable(path, error)) from error
    if isinstance(state, Mapping):
        state = state.get("state_dict", state.get("model", state))
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise ValueError(f"expected tensors by name; got {type(state).__name__}. {SAVE_ADVICE}")
    expected = model.state_dict()
    state = _match_wrapper_prefix(state, expected)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:  # its message lists every key
        problems = _describe_mismatch(state, expected) or [str(error)]
        raise ValueError("\n  ".join(problems)) from error


SAVE_ADVICE = "Save it with torch.save(model.state_dict(), FILE)"


def _explain_unreadable(path: Path, error: Exception) -> str:
    """Explain why a file cannot be read as a state dict, without running code that is in it."""
    try:
        classes = [] if path.suffix == ".safetensors" else _unsafe_classes(path)
    except Exception:  # not a file written by torch.save
        classes = []
    if any(name.startswith("torch.nn.modules.") for name in classes):
        return f"holds a whole module, which cannot be read without running code; expected a state dict. {SAVE_ADVICE}"
    if classes:
        return f"holds more than tensors ({classes[0]}), which cannot be read without running code. {SAVE_ADVICE}"
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return f"not a state dict that can be read without running code ({text.strip()})"


def _unsafe_classes(path: Path) -> list[str]:
    """Return the classes that unpickling would call, other than those of tensors."""
    classes: list[str] = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    return sorted(classes)


def _match_wrapper_prefix(state: Any, expected: Mapping[str, Any]) -> Any:
    """Return the state with the names of the model if they differ only by the prefix of a wrapper such as DDP."""
    for prefix in (p for _ in WRAPPER_PREFIXES for p in WRAPPER_PREFIXES):  # wrappers may be nested
        all_differ = bool(state) and not state.keys() & expected.keys()
        if all_differ and all(name.startswith(prefix) for name in state):
            consume_prefix_in_state_dict_if_present(state, prefix)
        elif all_differ and {f"{prefix}{name}" for name in state} == expected.keys():
            return {f"{prefix}{name}": value for name, value in state.items()}
    return state


def _describe_mismatch(state: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Describe the tensors that are missing, unknown or of another shape, with the first names of each."""
    shapes = {name: list(value.shape) for name, value in state.items() if isinstance(value, torch.Tensor)}
    missing = [name for name in expected if name not in state]
    unknown = [name for name in state if name not in expected]
    reshaped = [
        f"{name} ({shapes[name]} in the file, {list(value.shape)} in the model)"
        for name, value in expected.items()
        if isinstance(value, torch.Tensor) and name in shapes and list(value.shape) != shapes[name]
    ]
    if not (missing or unknown or reshaped):
        return []
    return [
        f"expected the {len(expected)} tensors of the model; some of the {len(state)} in the file do not fit",
        *(f"missing from the file: {_list_some(missing)}" for _ in missing[:1]),
        *(f"not in the model: {_list_some(unknown)}" for _ in unknown[:1]),
        *(f"of another shape: {_list_some(reshaped)}" for _ in reshaped[:1]),
        "Give the weights of this model, or the --model that they were saved from",
        *(
            "For another number of classes write a function that returns the network: --model package.module:factory"
            for _ in reshaped[:1]
        ),
    ]


def _list_some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
