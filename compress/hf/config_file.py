"""The config.json of a saved model: written as Hugging Face does, and read without running code that it names.

A config can make transformers do more than build a network: import Python from a repository (`auto_map`), load compiled
kernels (`attn_implementation`), or ask the hub for a backbone. `read_config` refuses such entries, wherever they are,
and finds classes only by the tables of model types and architectures in the installed transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import CONFIG_MAPPING, modeling_auto

from compress.errors import PlanError
from compress.formatting import describe_value
from compress.storage import hash_tensors, read_json, write_atomic
from compress.surgery import Plan

CONFIG_FILE = "config.json"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")  # of image processors
ENTRY = "compress"  # our key in config.json
DTYPE_NAMES = ("float32", "float16", "bfloat16")
REFUSED_KEYS = {
    *("auto_map", "custom_pipelines", "trust_remote_code", "code_revision"),  # name code
    *("attn_implementation", "experts_implementation", "kernel_config"),  # load kernels
    *("quantization_config", "model_args", "pretrained_cfg", "checkpoint_path"),  # read further files
}


@dataclass(frozen=True)
class SavedConfig:
    """The content of a config.json: all that is needed to build the dense network."""

    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    dtype: torch.dtype


def write_config(model: Any, plan: Plan, folder: Path) -> None:
    """Write config.json, and the files of the image processor that lie beside the weights the model was loaded from.

    A class that is not of transformers is not written: `load` could not find it.
    """
    if find_class(model.config.model_type, type(model).__name__) is not type(model):
        return
    values = json.loads(model.config.to_json_string())
    values = _without_private_keys(values) | {"architectures": [type(model).__name__]}
    values["dtype"] = str(model.dtype).removeprefix("torch.")
    entry = {"eager": [where for where, part in _parts_of(model.config) if part._attn_implementation == "eager"]}
    values[ENTRY] = entry | {"hash": _hash(values | {ENTRY: entry}, plan)}
    write_atomic(folder / CONFIG_FILE, (json.dumps(values, indent=2, sort_keys=True) + "\n").encode())
    if source := model.config.name_or_path:  # a directory, or a name on the hub; empty if the model was not loaded
        for name in PROCESSOR_FILES:
            if (Path(source) / name).is_file() and not (folder / name).exists():
                write_atomic(folder / name, (Path(source) / name).read_bytes())


def read_config(folder: Path, plan: Plan) -> SavedConfig:
    """Return the class and the config of the dense model that was saved in a directory.

    Raises:
        FileNotFoundError: the directory has no config.json.
        PlanError: the file is damaged, belongs to another plan, or asks for more than a network of transformers.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: expected the config of a Hugging Face model; there is none. If the model is of your own class, "
            "build it and use compress.load(model, directory)"
        )
    try:
        values = read_json(path)
        if not isinstance(values, dict):
            raise ValueError(f"expected a JSON object; got {describe_value(values)}")
        _check_safe(values)
        return _saved_config(values, plan)
    except ValueError as error:
        raise PlanError(f"{path}: {error}") from error


def _saved_config(values: dict[str, Any], plan: Plan) -> SavedConfig:
    """Return the class and the config that the values of a config.json name.

    Raises:
        ValueError: the values are not those that `write_config` writes with this plan.
    """
    entry, names = values.get(ENTRY), values.get("architectures")
    if not isinstance(entry, dict) or not isinstance(names, list) or len(names) != 1:
        raise ValueError(f"expected the entries {ENTRY} and architectures that save() writes. Save the model again")
    model_type, name = str(values.get("model_type")), str(names[0])
    model_class = find_class(model_type, name)
    if model_class is None:
        raise ValueError(
            f"model_type {model_type} with architecture {name} is not in this version of transformers "
            f"({transformers.__version__}). If it is your own class, build it and use compress.load(model, directory)"
        )
    entry = dict(entry)
    if entry.pop("hash", None) != _hash(values | {ENTRY: entry}, plan):
        raise ValueError("damaged, changed, or saved with another plan.json. Restore a copy, or save the model again")
    dtype = values.get("dtype")
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPE_NAMES)}; got {dtype!r}")
    kept = {name: value for name, value in values.items() if name != ENTRY}
    try:
        config = model_class.config_class.from_dict(kept)  # type: ignore[union-attr]
    except Exception as error:  # of any type: each config checks its values in its own way
        raise ValueError(f"{type(error).__name__}: {error}") from error
    eager = entry.get("eager")
    for where, part in _parts_of(config):
        # Other implementations need libraries, or are kernels from the hub. None: transformers chooses.
        part._attn_implementation_internal = "eager" if isinstance(eager, list) and where in eager else None
    return SavedConfig(model_class, config, getattr(torch, dtype))


def _parts_of(config: PreTrainedConfig, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a config and the configs in it, such as that of a backbone, with their places."""
    yield where, config
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _parts_of(value, f"{where}{name}.")


def _check_safe(values: dict[str, Any]) -> None:
    """Check that building a network from these values imports, downloads and reads nothing else.

    Raises:
        ValueError: some entry asks for more.
    """
    for where, part in _objects_in(values, ""):
        for key in part:
            if key in REFUSED_KEYS or key.startswith("_"):
                raise ValueError(f"{where}{key}: not read, because it can name code or further files; remove it")
        model_type, backbone = part.get("model_type"), part.get("backbone")
        if model_type is not None and not (isinstance(model_type, str) and model_type in CONFIG_MAPPING):
            raise ValueError(f"{where}model_type: {model_type!r} is not one of transformers' own")
        if model_type == "timm_wrapper":
            raise ValueError(f"{where}model_type: timm_wrapper is not supported; prune and load the model of timm")
        if backbone is None:
            continue
        if model_type == "timm_backbone":
            import timm

            if not isinstance(backbone, str) or ":" in backbone or not timm.is_model(backbone):
                raise ValueError(f"{where}backbone: {backbone!r} is not one of timm's own models")
        elif not isinstance(part.get("backbone_config"), dict):
            raise ValueError(f"{where}backbone: {backbone!r} may be on the hub; expected a backbone_config")


def _objects_in(value: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each object inside a JSON value with its place, the outermost first."""
    if isinstance(value, dict):
        yield where, value
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from _objects_in(part, f"{where}{key}.")


def _without_private_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_private_keys(part) for key, part in value.items() if not key.startswith("_")}
    return [_without_private_keys(part) for part in value] if isinstance(value, list) else value


def _hash(values: Mapping[str, Any], plan: Plan) -> str:
    return hash_tensors({}, f"{plan.digest()} {json.dumps(values, sort_keys=True)}")


def find_class(model_type: Any, name: Any) -> type[PreTrainedModel] | None:
    """Return the class of transformers' own tables with this model type and name; None if there is none."""
    if (model_type, name) not in _known_names():
        return None
    known = getattr(transformers, name, None)
    return known if isinstance(known, type) and issubclass(known, PreTrainedModel) else None


@cache
def _known_names() -> frozenset[tuple[Any, Any]]:
    """Return (model type, class name) of all models in transformers' own tables."""
    tables = [table for name, table in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")]
    pairs = [(kind, names) for table in tables for kind, names in table.items()]
    return frozenset((kind, name) for kind, names in pairs for name in ([names] if isinstance(names, str) else names))
