"""Field types that recipes are built from: strict models, and numbers as people write them."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from .messages import short_repr
from .name_patterns import NamePattern

MAX_COUNT = 2**31 - 1  # of anything that is counted
MAX_LENGTH = 1e12  # epochs or steps
SEARCH_LENGTH = "1 epoch, 100 to 2000 steps"


class StrictModel(BaseModel):
    """Frozen settings; unknown keys and wrong types are errors."""

    # Validators are built at their first use, which makes `import compress` faster.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, serialize_by_alias=True, defer_build=True)


def parse_number(value: Any) -> float | None:
    """Return a number, also from text (YAML reads `1e-4` as text); None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def parse_fraction(value: Any) -> float | None:
    """Return the number that `0.5` or `50%` stands for; None for anything else."""
    if isinstance(value, str) and value.strip().endswith("%"):
        number = parse_number(value.strip()[:-1])
        return None if number is None else number / 100
    return parse_number(value)


def parse_allowed_loss(loss: float | str, where: str) -> float:
    """Return how much of a metric may be lost, as a fraction.

    Args:
        where: the argument or option, for the message.

    Raises:
        ValueError: it is not a fraction.
    """
    allowed = parse_fraction(loss)
    if allowed is None or not 0 <= allowed < math.inf:
        raise ValueError(f'{where}: expected what may be lost, as 0.02 or "2%"; got {loss!r}')
    return allowed


def _check_number(value: Any) -> float:
    number = parse_number(value)
    if number is None or not math.isfinite(number):
        raise ValueError(f"expected a number such as 0.1 or 1e-4; got {short_repr(value)}")
    return number


def _check_fraction(value: Any) -> float:
    number = parse_fraction(value)
    if number is None or not 0 <= number <= 1:
        raise ValueError(f'expected a fraction, as 0 <= x <= 1 or "10%"; got {short_repr(value)}')
    return number


def _check_width(value: Any) -> int | float:
    """Return `8` as a number of dimensions and `25%` as a fraction of the dense width."""
    if isinstance(value, str) and re.fullmatch(r"\s*\d{1,12}\s*", value):
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_COUNT:
        return value
    number = parse_fraction(value) if isinstance(value, (str, float)) else None
    if number is None or not 0 < number <= 1:
        raise ValueError(
            'expected a number of dimensions such as 8, or a fraction of the dense width such as "25%"; got '
            f"{short_repr(value)}"
        )
    return number


def _check_pattern(value: str) -> str:
    """Return a module's full name, or `re:` and a regular expression that can be matched."""
    return NamePattern(value).text


def _check_ascending(values: tuple[float, ...]) -> tuple[float, ...]:
    if list(values) != sorted(set(values)):
        raise ValueError(f"expected increasing fractions of the training, such as [0.5, 0.75]; got {list(values)}")
    return values


ModulePattern = Annotated[str, AfterValidator(_check_pattern)]
Number = Annotated[float, BeforeValidator(_check_number, json_schema_input_type=float | str)]
Positive = Annotated[Number, Field(gt=0)]
NonNegative = Annotated[Number, Field(ge=0)]
Percent = Annotated[str, Field(examples=["50%"])]
Fraction = Annotated[float, BeforeValidator(_check_fraction, json_schema_input_type=float | Percent)]
Width = Annotated[int | float, BeforeValidator(_check_width, json_schema_input_type=int | float | Percent)]


class Length(StrictModel):
    """Length of a training: `10`, `10 epochs`, `500 steps`, or `1 epoch, 100 to 2000 steps`.

    >>> Length.model_validate("500 steps").count
    500.0
    >>> Length.model_validate(10).model_dump()
    '10 epochs'
    >>> [Length.model_validate("1 epoch, 100 to 2000 steps").steps(size) for size in (15, 700, 5000)]
    [100, 700, 2000]
    """

    count: float
    unit: Literal["epochs", "steps"]
    least: int | None = None  # steps, if the length is in epochs
    most: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _parse(cls, value: Any) -> Any:
        if isinstance(value, Length) or (isinstance(value, dict) and {"count", "unit"} <= value.keys()):
            return value
        number, unit, bounds = parse_number(value), "epochs", {}
        pattern = r"(.*?\d\s*(?:epochs?)?)\s*,\s*(\d{1,12})\s*to\s*(\d{1,12})\s*steps?\s*"
        if isinstance(value, str) and (match := re.fullmatch(pattern, value)) and int(match[2]) <= int(match[3]):
            value, bounds = match[1], {"least": int(match[2]), "most": int(match[3])}
            number = parse_number(value)
        if isinstance(value, str) and (match := re.fullmatch(r"\s*([\d.eE+-]+)\s*(epoch|step)s?\s*", value)):
            number, unit = parse_number(match[1]), f"{match[2]}s"
        if number is None or not 0 < number <= MAX_LENGTH or (unit == "steps" and number != int(number)):
            raise ValueError(f'expected a number of epochs, "10 epochs" or "500 steps"; got {short_repr(value)}')
        if bounds and unit == "steps":
            raise ValueError(
                f'expected epochs with the bounds, as "1 epoch, 100 to 2000 steps"; got {short_repr(value)}'
            )
        return {"count": number, "unit": unit, **bounds}

    @model_validator(mode="after")
    def _check_range(self) -> Length:
        if not 0 < self.count <= MAX_LENGTH or (self.unit == "steps" and self.count != int(self.count)):
            raise ValueError(
                f"expected a length of more than 0 and at most {MAX_LENGTH:g}; got {self.count} {self.unit}"
            )
        return self

    @model_serializer
    def _serialize(self) -> str:
        return str(self)

    def __str__(self) -> str:
        is_whole = self.count == int(self.count)
        bounds = f", {self.least} to {self.most} steps" if self.least is not None else ""
        return f"{int(self.count) if is_whole else self.count} {self.unit}{bounds}"

    def steps(self, per_epoch: int | None) -> int:
        """Return the length in steps, at least one.

        Args:
            per_epoch: steps per epoch; required if the length is in epochs.
        """
        if self.unit == "steps":
            return int(self.count)
        assert per_epoch is not None
        steps = max(1, round(self.count * per_epoch))
        return steps if self.least is None or self.most is None else min(max(steps, self.least), self.most)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        text = {"type": "string", "pattern": r"^\s*[\d.eE+-]+\s*(epochs?|steps?)?\s*(,\s*\d+ to \d+ steps)?$"}
        return {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, text], "description": "10, 10 epochs or 500 steps"}


class TrainingConfig(StrictModel):
    """Length, optimizer and learning rates of a training."""

    epochs: Length = Field(
        default_factory=lambda: Length.model_validate(SEARCH_LENGTH),
        description="how long: 10, 10 epochs, 500 steps; or epochs within bounds",
    )
    optimizer: Literal["sgd", "adam", "adamw"] = Field(
        "sgd", description="default in a run: adamw for networks with more layer norms than batch norms, else sgd"
    )
    lr: Positive = Field(
        0.01,
        description="learning rate of the weights; default in a run with adam: 5e-4 in a search, 1e-4 in finetune",
    )
    momentum: Annotated[Fraction, Field(lt=1)] = Field(
        0.9, description="Nesterov momentum of sgd; first beta of adam and adamw"
    )
    weight_decay: NonNegative = Field(
        1e-4, description="of the weights; scores, biases and norms have none; default in a run with adamw: 0.05"
    )
    decay_norms: bool = Field(
        False,
        description="weight decay also on biases and norms, as PyTorch's optimizers do by default",
    )
    schedule: Literal["cosine", "step", "constant"] = "cosine"
    milestones: Annotated[tuple[Fraction, ...], AfterValidator(_check_ascending)] = Field(
        (0.5, 0.75),
        description="fractions of the training at which `step` divides the learning rate by ten",
        strict=False,
    )
    warmup: Fraction = Field(
        0.0, description="fraction of the training over which the learning rate rises linearly to its full value"
    )
    clip: Positive | None = Field(None, description="maximum norm of the gradients")


class LogitDistillation(StrictModel):
    """Knowledge distillation from the dense model: KL divergence of the softened predictions (Xue 2022, 4.2.1)."""

    temperature: Positive = 4.0
    weight: NonNegative = Field(
        8.0,
        description="loss = task loss + weight * KL(teacher / T, student / T), without the usual factor T²: at "
        "temperature 4, a weight of 8 here equals 0.5 in the usual form",
    )
