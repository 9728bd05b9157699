"""The fields that recipes are made of: strict models, and numbers as people write them."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
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

from .yamltext import shown

MOST = 2**31 - 1  # of anything that is counted
LONGEST = 1e12  # epochs or steps


class Strict(BaseModel):
    """Unknown keys and wrong types are errors; nothing changes once it is made."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, serialize_by_alias=True)


def parse_number(value: Any) -> float | None:
    """A number, or text that is one (YAML reads `1e-4` as text); None if it is neither."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def parse_fraction(value: Any) -> float | None:
    """`0.5` or `50%`; None if it is neither."""
    if isinstance(value, str) and value.strip().endswith("%"):
        number = parse_number(value.strip()[:-1])
        return None if number is None else number / 100
    return parse_number(value)


def _number(value: Any) -> Any:
    number = parse_number(value)
    if number is None or not math.isfinite(number):
        raise ValueError(f"expected a number such as 0.1 or 1e-4; got {shown(value)}")
    return number


def _left(value: Any) -> Any:
    number = parse_fraction(value)
    if number is None or not 0 < number <= 1:
        bare = number is not None and 1 < number <= 100 and "%" not in str(value)
        hint = f'. Did you mean "{number:g}%"?' if bare else ""
        raise ValueError(f'expected what is left, as 0 < x <= 1 or "50%"; got {shown(value)}{hint}')
    return number


def _share(value: Any) -> Any:
    number = parse_fraction(value)
    if number is None or not 0 <= number <= 1:
        raise ValueError(f'expected a part of the whole, as 0 <= x <= 1 or "10%"; got {shown(value)}')
    return number


def _width(value: Any) -> Any:
    """`8` dimensions, or `25%` of the dense width."""
    if isinstance(value, str) and re.fullmatch(r"\s*\d{1,12}\s*", value):
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST:
        return value
    number = parse_fraction(value) if isinstance(value, (str, float)) else None
    if number is None or not 0 < number <= 1:
        raise ValueError(
            f'expected a number of dimensions such as 8, or a part of the dense width as "25%"; got {shown(value)}'
        )
    return number


def near(word: str, known: Sequence[str]) -> str:
    """A question that names the nearest word, if one is near.

    >>> near("atuo", ["auto"])
    '. Did you mean auto?'
    """
    found = difflib.get_close_matches(word[:80], known, n=1)
    return f". Did you mean {found[0]}?" if found else ""


def _name(value: str) -> str:
    """A module's full name, or `re:` and an expression that compiles."""
    try:
        re.compile(value[3:] if value.startswith("re:") else "")
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{shown(value)} is not a regular expression: {error}") from error
    return value


def _ascending(values: tuple[float, ...]) -> tuple[float, ...]:
    if list(values) != sorted(set(values)):
        raise ValueError(f"expected parts of the training that rise, as [0.5, 0.75]; got {list(values)}")
    return values


Name = Annotated[str, AfterValidator(_name)]
Number = Annotated[float, BeforeValidator(_number, json_schema_input_type=float | str)]
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]
Percent = Annotated[str, Field(examples=["50%"])]
Left = Annotated[float, BeforeValidator(_left, json_schema_input_type=float | Percent)]
Share = Annotated[float, BeforeValidator(_share, json_schema_input_type=float | Percent)]
Width = Annotated[int | float, BeforeValidator(_width, json_schema_input_type=int | float | Percent)]


class Length(Strict):
    """How long a training is: `10`, `10 epochs` or `500 steps`.

    >>> Length.model_validate("500 steps").count
    500.0
    >>> Length.model_validate(10).model_dump()
    '10 epochs'
    """

    count: float
    unit: Literal["epochs", "steps"]

    @model_validator(mode="before")
    @classmethod
    def _parse(cls, value: Any) -> Any:
        if isinstance(value, Length) or (isinstance(value, dict) and value.keys() == {"count", "unit"}):
            return value
        number, unit = parse_number(value), "epochs"
        if isinstance(value, str) and (found := re.fullmatch(r"\s*([\d.eE+-]+)\s*(epoch|step)s?\s*", value)):
            number, unit = parse_number(found[1]), f"{found[2]}s"
        if number is None or not 0 < number <= LONGEST or (unit == "steps" and number != int(number)):
            raise ValueError(f'expected a number of epochs, "10 epochs" or "500 steps"; got {shown(value)}')
        return {"count": number, "unit": unit}

    @model_validator(mode="after")
    def _possible(self) -> Length:
        if not 0 < self.count <= LONGEST or (self.unit == "steps" and self.count != int(self.count)):
            raise ValueError(f"expected a length of more than 0 and at most {LONGEST:g}; got {self.count} {self.unit}")
        return self

    @model_serializer
    def _text(self) -> str:
        return str(self)

    def __str__(self) -> str:
        whole = self.count == int(self.count)
        return f"{int(self.count) if whole else self.count} {self.unit}"

    def steps(self, per_epoch: int | None) -> int:
        """In steps, at least one; `per_epoch` must be known where the length is in epochs."""
        if self.unit == "steps":
            return int(self.count)
        assert per_epoch is not None
        return max(1, round(self.count * per_epoch))

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        text = {"type": "string", "pattern": r"^\s*[\d.eE+-]+\s*(epochs?|steps?)?\s*$"}
        return {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, text], "description": "10, 10 epochs or 500 steps"}


class Training(Strict):
    """How weights are trained: how long, by what, at which rates."""

    epochs: Length = Field(description="how long: 10, 10 epochs or 500 steps")
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: Positive = Field(0.01, description="learning rate of the weights")
    momentum: Annotated[Share, Field(lt=1)] = Field(
        0.9, description="of sgd, with Nesterov's correction; adamw's first beta"
    )
    weight_decay: NotNegative = Field(1e-4, description="on the weights; none on scores, biases and norms")
    schedule: Literal["cosine", "step", "constant"] = "cosine"
    milestones: Annotated[tuple[Share, ...], AfterValidator(_ascending)] = Field(
        (0.5, 0.75), description="where `step` divides the rate by ten", strict=False
    )
    warmup: Share = Field(0.0, description="part of the training over which the rate rises from zero")
    clip: Positive | None = Field(None, description="largest norm of the gradients")


class Teaching(Strict):
    """Knowledge distillation from the dense model: KL of its softened predictions (Xue 2022, 4.2.1)."""

    temperature: Positive = 4.0
    weight: NotNegative = Field(
        0.5,
        description="loss = task loss + weight * KL(teacher / T, student / T), without the usual factor T²: at "
        "temperature 4 a weight of 8 here is 0.5 there",
    )
