"""Completion of a recipe: settings that nobody gave follow from the data and from the network."""

from __future__ import annotations

from typing import Any, Literal

from .fields import Length, LogitDistillation, TrainingConfig
from .schema import Recipe
from .search_config import config_class
from .sections import Distill, Finetune

DataKind = Literal["labels", "inputs", "none"]
Stage = Literal["search", "operations", "finetune"]
# Rates of benchmarks/accuracy.py (ResNets, sgd) and benchmarks/transformer.py (ViT, adamw), which start from trained
# weights. The rate of the search stays constant; fine-tuning decays its own.
SGD_RATE, ADAM_RATES = 0.01, {"search": 5e-4, "finetune": 1e-4}
# A repaired ResNet-20 gains from 400 steps on 1024 images without labels, but loses from 100 on 100 images.
MOST_EPOCHS, FEWEST_STEPS = 25, 50  # of fine-tuning on few inputs
WEIGHT_DECAY = {"sgd": 1e-4, "adam": 1e-4, "adamw": 0.05}


def complete_recipe(
    recipe: Recipe,
    data: DataKind,
    *,
    prefers_adamw: bool,
    distill_weight: float | None,
    trains: bool,
    has_teacher: bool = False,
    batches: int | None = None,
) -> Recipe:
    """Return the recipe with all settings that depend on data and network.

    A recipe that names neither search nor fine-tuning becomes the packaged recipe `default` if there is training data;
    with inputs alone a cut by magnitude, repair by least squares and distillation; and without data a cut by magnitude.

    Args:
        recipe: as it was given.
        data: training data with labels, inputs alone, or none.
        prefers_adamw: whether the network is of a family that is trained with AdamW.
        distill_weight: of distillation by default, as the task has it; None: none by default.
        has_teacher: whether the user gives a teacher. A search over operations has none otherwise: the network with all
            candidates, which would be the teacher, is usually untrained.
        trains: whether we fine-tune; a task with its own loop has its own rates.
        batches: in an epoch; None if the loader has no length.
    """
    changes: dict[str, Any] = {}
    search, finetune = recipe.search, recipe.finetune
    if recipe.target.operations and not has_teacher:
        distill_weight = None
    if recipe.is_automatic and data != "none":
        finetune = changes["finetune"] = Finetune()
        if data == "inputs" and batches is not None:
            finetune = changes["finetune"] = Finetune(epochs=_shortened(finetune.epochs, batches))
    if recipe.is_automatic and data == "labels":
        search = config_class("netslim")(method="netslim")
    if recipe.is_automatic and data == "inputs" and "compensate" not in recipe.model_fields_set:
        changes["compensate"] = False if recipe.target.branches else "least_squares"
    if isinstance(search, TrainingConfig):
        stage: Stage = "search" if recipe.target.widths or not recipe.target.operations else "operations"
        changes["search"] = _complete_training(search, stage, prefers_adamw, distill_weight)
    if finetune is not None and trains and finetune.from_ == "search":
        changes["finetune"] = _complete_training(finetune, "finetune", prefers_adamw, distill_weight)
    return recipe.model_copy(update=changes) if changes else recipe


def _shortened(length: Length, batches: int) -> Length:
    """Return a length whose least number of steps is not more than a few epochs.

    >>> for batches in (2, 10, 75):
    ...     print(_shortened(Length.model_validate("4 epochs, 400 to 8000 steps"), batches))
    4 epochs, 50 to 8000 steps
    4 epochs, 250 to 8000 steps
    4 epochs, 400 to 8000 steps
    """
    least = length.least or 0
    return length.model_copy(update={"least": min(least, max(FEWEST_STEPS, MOST_EPOCHS * batches))})


def _complete_training(config: Any, stage: Stage, prefers_adamw: bool, distill_weight: float | None) -> Any:
    """Return the settings of a training with those of its family in place of what nobody gave."""
    keys_of_user = config.model_fields_set
    optimizer = config.optimizer if "optimizer" in keys_of_user else "adamw" if prefers_adamw else "sgd"
    rate = SGD_RATE if optimizer == "sgd" else ADAM_RATES["finetune" if stage == "finetune" else "search"]
    settings: dict[str, Any] = {"optimizer": optimizer, "lr": rate, "weight_decay": WEIGHT_DECAY[optimizer]}
    if stage == "finetune":
        settings |= {"distill": Distill(weight=distill_weight)} if distill_weight is not None else {}
    elif getattr(config, "gamma", None) == "auto":  # a number is for settings as in a paper
        settings |= {"schedule": "constant"} if stage == "search" else {}  # operations: cosine, as in the papers
        settings |= {"distill": LogitDistillation(weight=distill_weight)} if distill_weight is not None else {}
    missing = {key: value for key, value in settings.items() if key not in keys_of_user}
    return config.model_copy(update=missing)


def describe_defaults(recipe: Recipe, data: DataKind, search_steps: int, finetune_steps: int) -> str:
    """Return one line about what a completed recipe does that named neither search nor fine-tuning."""
    if data == "none":
        return (
            "no training data: the dimensions are ranked by magnitude, and nothing is trained; expect to lose "
            "accuracy. Give train=LOADER, or --data in a shell (images suffice, labels are better) to search and train"
        )
    stages = [f"{recipe.search.method} search of {search_steps} steps" if search_steps else "cut by magnitude"]
    stages += ["repair by least squares"] * (recipe.compensate == "least_squares")
    taught_by = (
        "the labels and the dense network" if data == "labels" else "the dense network alone, for want of labels"
    )
    stages.append(f"fine-tuning of {finetune_steps} steps, taught by {taught_by}")
    return f"default recipe: {', '.join(stages)}"
