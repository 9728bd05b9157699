"""Sections of a recipe: target, budget, timing, finetune, export and data."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from .fields import (
    MAX_COUNT,
    Fraction,
    LogitDistillation,
    ModulePattern,
    NonNegative,
    RemainingFraction,
    StrictModel,
    TrainingConfig,
    Width,
    parse_fraction,
)
from .messages import did_you_mean, short_repr

BudgetUnit = Literal["macs", "params", "dims", "latency", "auto"]
BUDGET_UNITS: tuple[BudgetUnit, ...] = get_args(BudgetUnit)
ATTENTION_MODES = ("qk", "v", "per_head", "heads")
# The names of the exporters in `compress.exporters`, which needs optional packages and is imported only for an export.
# A test compares this list with the registered exporters.
ExportFormat = Literal["onnx"]


class Bound(StrictModel):
    """Smallest and largest width of a group, in dimensions or as a fraction of its dense width."""

    least: Width | None = None
    most: Width | None = None

    @model_validator(mode="after")
    def _check_order(self) -> Bound:
        if self.least is None and self.most is None:
            raise ValueError("expected least, most or both; got none")
        if type(self.least) is type(self.most) and self.least > self.most:  # type: ignore[operator]
            raise ValueError(f"expected least <= most; got {self.least} and {self.most}")
        return self


def _check_attention(value: Any) -> Any:
    """Return `true` or `false` as it is, one or several modes as a tuple in the order of `ATTENTION_MODES`."""
    if isinstance(value, bool):
        return value
    modes = [value] if isinstance(value, str) else list(value) if isinstance(value, (list, tuple)) else [value]
    if not modes or any(not isinstance(mode, str) or mode not in ATTENTION_MODES for mode in modes):
        hints = (did_you_mean(str(mode), ATTENTION_MODES) for mode in modes if str(mode) not in ATTENTION_MODES)
        hint = next(hints, "")
        raise ValueError(
            f"expected true, false, or some of {', '.join(ATTENTION_MODES)}, as [qk, v]; got {short_repr(value)}"
            + (f".{hint}" if hint else "")
        )
    if "heads" in modes and len(set(modes)) > 1:
        raise ValueError(
            f"expected heads alone, or some of {', '.join(ATTENTION_MODES[:3])}: whole heads and dimensions within "
            f"them cannot be cut at the same time; got {value!r}. Prune twice, heads first"
        )
    return tuple(mode for mode in ATTENTION_MODES if mode in modes)


Attention = Annotated[
    bool | tuple[str, ...], BeforeValidator(_check_attention, json_schema_input_type=bool | str | list[str])
]


class Target(StrictModel):
    """Dimensions that may be removed."""

    channels: bool = Field(True, description="inner channels of convolutions and linear layers")
    residual: bool = Field(
        False, description="channels of residual streams; the same channels are removed wherever the stream is written"
    )
    attention: Attention = Field(
        False,
        description="true: dimensions of queries, keys and values, the same in every head; qk, v: separate scores for "
        "each of the two, or only one of them; per_head: separate scores for each head; heads: whole heads",
    )
    mlp: bool = Field(False, description="hidden dimensions of transformer MLPs; not needed with channels: true")
    embedding: bool = Field(False, description="residual streams that pass through layer norms (advanced)")
    branches: bool = Field(False, description="allow removing a whole residual branch when none of it is worth keeping")
    include: tuple[ModulePattern, ...] = Field(
        (), description="only these modules (full name, or re:REGEX)", strict=False
    )
    exclude: tuple[ModulePattern, ...] = Field(
        (), description="never these modules (full name, or re:REGEX)", strict=False
    )
    one_path: bool = Field(
        False,
        description="if the code branches on values, assume that every input takes the path of the example inputs "
        "(torch-pruning's graph)",
    )
    round_to: int = Field(1, ge=1, le=MAX_COUNT, description="keep a multiple of this many dimensions in each group")
    min_keep: int = Field(2, ge=1, le=MAX_COUNT, description="keep at least this many dimensions in each group")
    bounds: dict[ModulePattern, Bound] = Field(
        default_factory=dict, description="group (name, or re:REGEX) -> {least: 8, most: 50%}; the last match counts"
    )


class Budget(StrictModel):
    """Fraction of the dense network that is left; give exactly one of these.

    `budget: auto` lets the search decide: dimensions whose score reached zero are removed.
    """

    macs: RemainingFraction | None = None
    params: RemainingFraction | None = None
    dims: RemainingFraction | None = None
    latency: RemainingFraction | None = Field(None, description="measured on the device of the run; see timing")
    auto: Literal[True] | None = Field(None, description="learned; the same as `budget: auto`")

    @model_validator(mode="before")
    @classmethod
    def _expand_auto(cls, value: Any) -> Any:
        if isinstance(value, str):
            if value != "auto":
                hint = did_you_mean(value, ["auto"])
                if not hint and parse_fraction(value):
                    hint = f" Did you mean {{macs: {value}}}?"
                raise ValueError(
                    f"expected auto, or what is left, as {{macs: 50%}}; got {value[:80]!r}"
                    + (f".{hint}" if hint else "")
                )
            return {"auto": True}
        return value

    @model_validator(mode="after")
    def _check_one_unit(self) -> Budget:
        units = [unit for unit in BUDGET_UNITS if getattr(self, unit) is not None]
        if len(units) != 1:
            raise ValueError(one_unit_expected(units))
        return self

    @property
    def unit(self) -> BudgetUnit:
        """Unit in which the budget is given."""
        return next(unit for unit in BUDGET_UNITS if getattr(self, unit) is not None)

    @property
    def left(self) -> float:
        """Fraction of the dense network that may be left; 1 if it is learned."""
        return 1.0 if self.auto else float(getattr(self, self.unit))

    @property
    def is_measured(self) -> bool:
        """Return whether the cost is found by timing networks."""
        return self.unit == "latency"

    @property
    def is_computed(self) -> bool:
        """Return whether the cost follows from the widths, neither measured nor learned."""
        return not self.is_measured and not self.auto

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [{"const": "auto"}, handler(schema)], "description": "what is left of the dense network"}


def one_unit_expected(units: list[BudgetUnit]) -> str:
    """Return the message about a budget that does not have exactly one unit."""
    return f"expected exactly one of {', '.join(BUDGET_UNITS)}; got {' and '.join(units) or 'none'}"


class Timing(StrictModel):
    """Measurement of latency, for a latency budget and for the report."""

    batch_size: int = Field(1, ge=1, le=MAX_COUNT)
    repeats: int = Field(30, ge=3, le=MAX_COUNT, description="runs of each network, in turn; the median is reported")


class Distill(LogitDistillation):
    """Distillation of the predictions, and of the features that are named."""

    features: tuple[str, ...] = Field((), description="modules whose outputs should match the teacher's", strict=False)
    feature_weight: NonNegative = Field(1.0, description="of their mean squared error relative to the teacher's output")


class Finetune(TrainingConfig):
    """Training of the compact network, starting from the weights of the search."""

    distill: Distill | None = None
    label_smoothing: Fraction = 0.0
    mixup: NonNegative = Field(0.0, description="alpha of mixup (timm); 0 is off")
    cutmix: NonNegative = Field(0.0, description="alpha of cutmix (timm); 0 is off")
    ema: Fraction | None = Field(
        None, description="decay of an exponential moving average of the weights, such as 0.999; the average is kept"
    )
    recalibrate: int = Field(
        0, ge=0, le=MAX_COUNT, description="batches on which batch norm statistics are recomputed before training"
    )
    best: bool | None = Field(
        None, description="keep the weights that are best on the validation data (default: true if there is any)"
    )


class Export(StrictModel):
    """A verified file for deployment: model.onnx in the working directory. `export: onnx` uses the defaults."""

    format: ExportFormat = "onnx"
    dynamic_batch: bool = Field(True, description="accept any batch size; else that of the example inputs")
    dynamic_size: bool = Field(False, description="accept images of any height and width, if the model does")
    opset: int | None = Field(None, ge=1, le=MAX_COUNT, description="version of ONNX's operators (default: torch's)")
    slim: bool = Field(True, description="simplify the graph with onnxslim")
    half: bool = Field(False, description="weights in half precision; inputs and outputs stay float32")
    int8: bool = Field(False, description="also write model.int8.onnx, with ranges measured on training data")

    @model_validator(mode="before")
    @classmethod
    def _expand_format(cls, value: Any) -> Any:
        return {"format": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_precision(self) -> Export:
        if self.half and self.int8:
            raise ValueError("expected half or int8, not both: int8 is quantized from single precision")
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        formats = [{"const": name} for name in get_args(ExportFormat)]
        return {"anyOf": [*formats, handler(schema)], "description": "a verified file for deployment"}


class Data(StrictModel):
    """Named data loaders, for the command line and for recipes that are run without Python code."""

    source: str | None = Field(
        None, description="digits, cifar10:FOLDER, cifar100:FOLDER, folder:FOLDER or package.module:factory"
    )
    batch_size: int = Field(128, ge=1, le=MAX_COUNT)
    size: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="height and width of the images (default: unchanged; 224 for folder)"
    )
    workers: int = Field(0, ge=0, le=4096)
