"""Load a pruned Hugging Face model from its directory alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from compress.errors import PlanError
from compress.storage import find_saved, isolated_random_state
from compress.surgery import Plan, load

from .config_file import read_config


def load_model(directory: str | Path) -> PreTrainedModel:
    """Build the dense model from config.json, slice it and load the compact weights; return it in eval mode.

    The directory is one that `Pruned.save` or `DistillationTrainer` wrote. Nothing is downloaded, and no code is run
    that a file names: the class is looked up in transformers' own tables.

    Raises:
        PlanError: a file is damaged, of another model, or asks for more than a model of transformers.
        FileNotFoundError: the directory has no saved model.
    """
    folder = find_saved(Path(directory))
    if not (folder / "plan.json").is_file():
        raise FileNotFoundError(f"{folder}: expected a directory written by save(); it has no plan.json")
    saved = read_config(folder, Plan.load(folder / "plan.json"))
    try:
        with isolated_random_state():
            model: Any = saved.model_class(saved.config)
            model.to(saved.dtype)
    except Exception as error:  # of any type: the values of the config do not go together
        raise PlanError(f"{folder / 'config.json'}: {type(error).__name__}: {error}") from error
    model.config.name_or_path = str(folder)
    load(model, folder)
    model.eval()
    return model  # type: ignore[no-any-return]
