"""Settings that all searches with trained scores share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from compress.recipe import (
    Fraction,
    HasKind,
    LogitDistillation,
    NonNegative,
    Positive,
    Ranking,
    SearchConfig,
    StrictModel,
    TrainingConfig,
    parse_number,
)


class OptimizerOverrides(StrictModel):
    """Training of a separate set of parameters; settings left out are those of the weights."""

    lr: Positive | None = None
    momentum: Annotated[Fraction, Field(lt=1)] | None = None
    weight_decay: NonNegative | None = None
    schedule: Literal["cosine", "step", "constant"] | None = None
    optimizer: Literal["sgd", "adam", "adamw"] | None = None

    def merged_with(self, base: TrainingConfig) -> TrainingConfig:
        """Return the training settings of `base` with these in place of its own."""
        overrides = self.model_dump(exclude_none=True)
        return TrainingConfig(**{name: getattr(base, name) for name in TrainingConfig.model_fields} | overrides)


class ScoreOptimizerOverrides(OptimizerOverrides):
    """Training of the scores; settings left out are those of the weights, except weight decay.

    For the scores of operations the defaults are those of DARTS: adam, lr 3e-4, momentum 0.5, weight decay 1e-3.
    """

    weight_decay: NonNegative = 0.0

    def for_operations(self, base: TrainingConfig) -> TrainingConfig:
        """Return the training settings of the scores of operations."""
        defaults = {"optimizer": "adam", "lr": 3e-4, "momentum": 0.5, "weight_decay": 1e-3, "schedule": "constant"}
        settings_of_user = self.model_dump(exclude_unset=True, exclude_none=True)
        return TrainingConfig(**{"epochs": base.epochs} | defaults | settings_of_user)  # type: ignore[arg-type]


def _check_gamma(value: Any) -> Any:
    number = parse_number(value)
    if value != "auto" and (number is None or not 0 <= number < math.inf):
        raise ValueError(f"expected auto, or a number that is not below zero, such as 1e-4; got {value!r}")
    return value if number is None else number


class ScoredConfig(SearchConfig, TrainingConfig):
    """Base of the settings of a search that trains scores."""

    ranking: Ranking = Field(
        "auto",
        description="how importance is compared across groups. auto: cost with gamma: auto; global, as in the thesis, "
        "with a number as gamma",
    )
    chooses_operations: ClassVar[bool] = True
    gamma: Annotated[
        float | Literal["auto"], BeforeValidator(_check_gamma, json_schema_input_type=float | Literal["auto"] | str)
    ] = Field(
        "auto",
        description="strength of the penalty on the scores; auto: shrink the scores that the budget will drop",
    )
    penalty: Literal["l1", "macs", "latency", "l1_split", "l0_split", "tl1_split"] = Field(
        "l1", description="penalty on the scores, with a number as gamma"
    )
    proximal: bool = Field(
        False, description="apply l1, macs or latency by soft thresholding, which reaches zero exactly"
    )
    split: Positive = Field(1.0, description="strength of the coupling of scores and their sparse copy, if split")
    distill: LogitDistillation | None = Field(
        None,
        description="distillation from the dense model during the search; default in a run: as in finetune; null: none",
    )
    alpha: ScoreOptimizerOverrides = Field(
        default_factory=lambda: ScoreOptimizerOverrides(), description="training of the scores"
    )
    costs: bool = Field(True, description="record the signed cost of every group of scores for the report")

    @model_validator(mode="after")
    def _check_penalty(self) -> ScoredConfig:
        key = "penalty" if self.penalty != "l1" else "proximal" if self.proximal else None
        if self.gamma == "auto" and key:
            raise ValueError(f"{key}: expected a number as gamma along with it; gamma: auto has its own penalty")
        if self.proximal and self.penalty.endswith("split"):
            raise ValueError("proximal: a split penalty has its own thresholds; leave proximal out, or choose l1")
        return self

    def ranking_for(self, groups: Iterable[HasKind], unit: str) -> Ranking:
        if self.ranking != "auto":
            return self.ranking
        return "cost" if self.gamma == "auto" else "global"

    @property
    def reaches_zero(self) -> bool:
        penalized = self.gamma != "auto" and self.gamma > 0
        return penalized and (self.proximal or self.penalty.endswith("split"))

    @property
    def meets_budget(self) -> bool:
        return self.gamma == "auto"

    @property
    def trains_scores(self) -> bool:
        return True

    @property
    def measures_latency(self) -> bool:
        return self.penalty == "latency"
