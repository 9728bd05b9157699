"""The budget section: what is left of the dense network, as fractions or as absolute amounts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, model_serializer, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from compress.formatting import format_count

from .fields import Percent, StrictModel, parse_fraction, parse_number
from .messages import did_you_mean, short_repr

BudgetUnit = Literal["macs", "params", "dims", "size", "latency", "auto"]
BUDGET_UNITS: tuple[BudgetUnit, ...] = get_args(BudgetUnit)
COUNT_SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
BYTE_SUFFIXES = {
    "b": 1.0,
    **{f"{prefix}b": 1e3**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024.0**power for power, prefix in enumerate("kmgt", 1)},
}
# Budgets of other libraries, and how many FLOPs each counts.
FLOP_SCALES = {"flops": 1.0, "flop": 1.0, "mflops": 1e6, "gflops": 1e9}
REMOVED_FRACTIONS = ("sparsity", "ratio", "pruning_ratio", "prune_ratio", "ch_sparsity", "amount")
OTHER_NAMES = {"parameters": "params", "mac": "macs", "channels": "dims", "dimensions": "dims", "filters": "dims"}
OTHER_NAMES |= {"memory": "size", "bytes": "size", "file_size": "size", "time": "latency", "ms": "latency"}
TIME_SUFFIXES = {"us": 1e-3, "µs": 1e-3, "ms": 1.0, "s": 1e3}  # in milliseconds


class Quantity(StrictModel):
    """An absolute amount: a count (20M), bytes (10 MB) or milliseconds (5 ms)."""

    amount: float
    text: str  # as the recipe gives it

    @model_serializer
    def _serialize(self) -> str:
        return self.text

    def __str__(self) -> str:
        return self.text


def _parse_amount(value: Any, suffixes: Mapping[str, float]) -> Quantity | None:
    """Return the absolute amount that a value stands for; None if it has no such suffix or is no number."""
    if isinstance(value, Quantity):
        return value
    match = re.fullmatch(r"\s*([\d.]+(?:[eE][+-]?\d+)?)\s*([a-zA-Zµ]*)\s*", str(value))
    number = parse_number(match[1]) if match and not isinstance(value, bool) else None
    if match is None or number is None or match[2].lower() not in suffixes or not 0 < number < math.inf:
        return None
    return Quantity(amount=number * suffixes[match[2].lower()], text=str(value).strip())


def _limit_parser(suffixes: Mapping[str, float], example: str) -> BeforeValidator:
    """Return a validator that reads a fraction, or an absolute amount with one of the suffixes."""

    def parse(value: Any) -> float | Quantity:
        number = parse_fraction(value) if not isinstance(value, Quantity) else None
        if number is not None and 0 < number <= 1:
            return number
        amount = _parse_amount(value, suffixes)
        if amount is not None and (number is None or amount.amount > 100):  # 50 is a percentage without its sign
            return amount
        hint = ""
        if number is not None and 1 < number < math.inf and "%" not in str(value):
            suffix = next((name for name in ("MB", "ms") if name.lower() in suffixes), "")
            meant = [f'"{number:g}%"'] * (number <= 100) + [f'"{number:g} {suffix}"'] * bool(suffix)
            hint = f". Did you mean {' or '.join(meant)}?"
        raise ValueError(
            f'expected what is left, as 0 < x <= 1 or "50%", or at most {example}; got {short_repr(value)}{hint}'
        )

    return BeforeValidator(parse, json_schema_input_type=float | Percent | str)


CountLimit = Annotated[float | Quantity, _limit_parser(COUNT_SUFFIXES, "20M")]
SizeLimit = Annotated[float | Quantity, _limit_parser(BYTE_SUFFIXES, '"10 MB"')]
TimeLimit = Annotated[float | Quantity, _limit_parser(TIME_SUFFIXES, '"5 ms"')]


class Budget(StrictModel):
    """Limits of what is left: fractions of the dense network (50%) or absolute ones (20M). Several hold all at once.

    `budget: 50%` is a limit of the MACs. `budget: auto` lets the search decide: dimensions whose score reached zero are
    removed.
    """

    macs: CountLimit | None = Field(None, description="multiply-adds of one example input: 50%, 20M")
    params: CountLimit | None = Field(None, description="parameters: 50%, 3M")
    dims: CountLimit | None = Field(None, description="dimensions of all groups: 50%, 500")
    size: SizeLimit | None = Field(
        None,
        description="the file model.safetensors with parameters and buffers in their own precision: 50%, 10 MB "
        "(10^6 bytes), 10 MiB",
    )
    latency: TimeLimit | None = Field(
        None, description="measured on the device of the run: 50%, 5 ms; see timing for the batch size"
    )
    auto: Literal[True] | None = Field(None, description="learned; the same as `budget: auto`")

    @model_validator(mode="before")
    @classmethod
    def _expand_short_forms(cls, value: Any) -> Any:
        """Expand `auto` and a bare fraction; explain keys that other libraries have."""
        if value == "auto":
            return {"auto": True}
        if isinstance(value, (str, int, float)) and not isinstance(value, bool):
            fraction = parse_fraction(value)
            if fraction is not None and 0 < fraction <= 1:
                return {"macs": value}
            hint = did_you_mean(str(value), ["auto"])
            if fraction is not None and 1 < fraction <= 100 and "%" not in str(value):
                hint = f' Did you mean "{fraction:g}%"?'
            elif _parse_amount(value, COUNT_SUFFIXES) is not None:
                hint = f" Did you mean {{macs: {value}}} or {{params: {value}}}?"
            raise ValueError(
                f"expected auto, or what is left, as 50% (of the MACs) or {{macs: 50%, params: 3M}}; got "
                f"{short_repr(value)}" + (f".{hint}" if hint else "")
            )
        return value

    @model_validator(mode="after")
    def _check_units(self) -> Budget:
        if problem := units_problem([unit for unit in BUDGET_UNITS if getattr(self, unit) is not None]):
            raise ValueError(problem)
        return self

    @property
    def limits(self) -> dict[str, float | Quantity]:
        """Limits that are given, by unit, in the order of the units; none if the budget is learned."""
        units = (unit for unit in BUDGET_UNITS if unit != "auto")
        return {unit: limit for unit in units if (limit := getattr(self, unit)) is not None}

    @property
    def unit(self) -> BudgetUnit:
        """First unit in which the budget is given."""
        return next(unit for unit in BUDGET_UNITS if getattr(self, unit) is not None)

    @property
    def is_measured(self) -> bool:
        """Return whether a limit is found by timing networks."""
        return self.latency is not None

    @property
    def computed_units(self) -> tuple[str, ...]:
        """Units whose cost follows from the widths."""
        return tuple(unit for unit in self.limits if unit != "latency")

    def __str__(self) -> str:
        if self.auto:
            return "auto"
        return ", ".join(f"{unit} {format_limit(limit)}" for unit, limit in self.limits.items())

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        fraction = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
        percent = {"type": "string", "pattern": r"^\s*[\d.]+\s*%\s*$"}
        options = [{"const": "auto"}, fraction, percent, handler(schema)]
        return {"anyOf": options, "description": "what is left of the dense network"}


def format_limit(limit: float | Quantity) -> str:
    """Return a limit as people write it.

    >>> format_limit(0.5), format_limit(Quantity(amount=2e7, text="20M"))
    ('50%', '20M')
    """
    return str(limit) if isinstance(limit, Quantity) else f"{100 * limit:.4g}%"


def units_problem(units: list[BudgetUnit]) -> str:
    """Return the message about a budget without a limit, or with a limit beside `auto`; "" if there is none."""
    if units and (len(units) == 1 or "auto" not in units):
        return ""
    limits = ", ".join(unit for unit in BUDGET_UNITS if unit != "auto")
    return f"expected auto alone, or one or more of {limits}; got {' and '.join(units) or 'none'}"


def explain_foreign_key(key: str, value: Any) -> str:
    """Return how a budget key of other libraries is written here; "" for any other key.

    >>> explain_foreign_key("speedup", 2)
    'Did you mean {latency: 50%}, measured, or {macs: 50%}, counted? A budget says what is left.'
    """
    name, number = key.lower(), parse_fraction(value)
    if name in FLOP_SCALES:
        amount = _parse_amount(value, COUNT_SUFFIXES)
        ours = "50%" if amount is None else format_count(amount.amount * FLOP_SCALES[name] / 2)
        if number is not None and 0 < number <= 1:
            ours = format_limit(number)
        return f"Did you mean {{macs: {ours}}}? One multiply-add (MAC) is two FLOPs. A budget says what is left."
    if name in REMOVED_FRACTIONS:
        left = format_limit(1 - number) if number is not None and 0 < number < 1 else "50%"
        return (
            f"Did you mean {{dims: {left}}}, of the channels, or {{macs: {left}}}? A budget says what is left, {key} "
            "what is removed."
        )
    if name in ("speedup", "speed_up"):
        factor = parse_number(str(value).strip().rstrip("xX"))
        left = format_limit(1 / factor) if factor is not None and factor > 1 else "50%"
        return f"Did you mean {{latency: {left}}}, measured, or {{macs: {left}}}, counted? A budget says what is left."
    return f"Did you mean {OTHER_NAMES[name]}? A budget says what is left." if name in OTHER_NAMES else ""
