"""Settings of the search `aps`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, model_validator

from compress.recipe import (
    Fraction,
    HasKind,
    LogitDistillation,
    NonNegative,
    Number,
    Positive,
    Ranking,
    SearchConfig,
    StrictModel,
    TrainingConfig,
    Width,
)

Sharing = Literal["ordinal", "independent", "transitionary"]


class ControllerTraining(StrictModel):
    """Training of the controller by REINFORCE, with Adam (0.5, 0.999)."""

    lr: Positive = 1.6e-4
    entropy: NonNegative = Field(4e-3, description="weight of the entropy of the policy")
    baseline: Annotated[Fraction, Field(lt=1)] = Field(0.99, description="decay of the moving average of the rewards")
    draws: int = Field(1, ge=1, le=1000, description="widths that are drawn and evaluated for each update")


class ApsConfig(SearchConfig, TrainingConfig):
    """Widths drawn by a controller that is rewarded for accuracy within the budget (APS-T)."""

    method: Literal["aps"] = "aps"
    ranking: Ranking = Field(
        "global", description="how importance, a probability, is compared across groups; auto: global"
    )
    candidates: tuple[Width, ...] = Field(
        (0.25, 0.5, 0.75, 1.0),
        min_length=1,
        strict=False,
        description="widths to choose from, as fractions of a group's width or numbers of dimensions; rounded up to "
        "multiples of target.round_to",
    )
    sharing: Sharing = Field(
        "transitionary",
        description="weights of the candidates. ordinal: nested; independent: each has its own; transitionary: from "
        "the first to the second. Groups that are not between plain layers are always nested",
    )
    first_stage: Fraction = Field(
        0.333, description="fraction of the search in which widths are drawn uniformly and only weights train"
    )
    settle: Fraction = Field(
        0.1, description="fraction of the search, at its end, in which the weights train at the widths of the budget"
    )
    alpha: NonNegative = Field(0.0, description="exponent of cost / budget in the reward, below the budget")
    beta: Annotated[Number, Field(le=0)] = Field(-0.1, description="the same above the budget")
    controller: ControllerTraining = Field(
        default_factory=lambda: ControllerTraining(), description="training of the controller"
    )
    diagnostics: int | None = Field(
        None,
        ge=0,
        le=10000,
        description="how often the gradients of a group's candidates are compared (default: up to 20 times, in at "
        "most 2 % of the passes)",
    )
    distill: LogitDistillation | None = Field(None, description="distillation from the dense model during the search")

    @model_validator(mode="after")
    def _check_stages(self) -> ApsConfig:
        if self.first_stage + self.settle >= 1:
            raise ValueError(
                "first_stage, settle: expected a sum below 1, so that the controller trains in between; got "
                f"{self.first_stage:g} and {self.settle:g}"
            )
        return self

    def ranking_for(self, groups: Iterable[HasKind], unit: str) -> Ranking:
        return "global" if self.ranking == "auto" else self.ranking

    @property
    def meets_budget(self) -> bool:
        return True
