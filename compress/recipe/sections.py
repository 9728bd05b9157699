"""Sections of a recipe: target, timing, finetune, export and data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from .fields import (
    MAX_COUNT,
    Fraction,
    Length,
    LogitDistillation,
    ModulePattern,
    NonNegative,
    StrictModel,
    TrainingConfig,
    Width,
)
from .messages import did_you_mean, short_repr

FINETUNE_LENGTH = "4 epochs, 400 to 8000 steps"
TARGET_KINDS = ("channels", "residual", "attention", "mlp", "embedding", "selection")
ATTENTION_MODES = ("qk", "v", "per_head", "heads")
COMPENSATIONS = ("least_squares", "mean")
# The names of the exporters in `compress.exporters`, which needs optional packages and is imported only for an export.
# A test compares this list with the registered exporters.
ExportFormat = Literal["onnx"]


def _check_compensation(value: Any) -> Any:
    if value is True:
        raise ValueError("expected least_squares, mean or false; got true. Did you mean least_squares?")
    if value is not False and value not in COMPENSATIONS:
        hint = did_you_mean(str(value), COMPENSATIONS)
        raise ValueError(
            f"expected least_squares, mean or false; got {short_repr(value)}" + (f".{hint}" if hint else "")
        )
    return value


Compensation = Annotated[Literal["least_squares", "mean", False], BeforeValidator(_check_compensation)]


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
    """Return `true`, `false` or `auto` as it is, one or several modes as a tuple in the order of `ATTENTION_MODES`."""
    if isinstance(value, bool) or value == "auto":
        return value
    modes = [value] if isinstance(value, str) else list(value) if isinstance(value, (list, tuple)) else [value]
    if not modes or any(not isinstance(mode, str) or mode not in ATTENTION_MODES for mode in modes):
        hints = (did_you_mean(str(mode), ATTENTION_MODES) for mode in modes if str(mode) not in ATTENTION_MODES)
        hint = next(hints, "")
        raise ValueError(
            f"expected true, false, auto, or some of {', '.join(ATTENTION_MODES)}, as [qk, v]; got {short_repr(value)}"
            + (f".{hint}" if hint else "")
        )
    if "heads" in modes and len(set(modes)) > 1:
        raise ValueError(
            f"expected heads alone, or some of {', '.join(ATTENTION_MODES[:3])}: whole heads and dimensions within "
            f"them cannot be cut at the same time; got {value!r}. Prune twice, heads first"
        )
    return tuple(mode for mode in ATTENTION_MODES if mode in modes)


Attention = Annotated[
    bool | Literal["auto"] | tuple[str, ...],
    BeforeValidator(_check_attention, json_schema_input_type=bool | str | list[str]),
]


def _check_round_to(value: Any) -> Any:
    if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_COUNT):
        raise ValueError(f"expected auto, or a number of dimensions such as 8; got {short_repr(value)}")
    return value


RoundTo = Annotated[
    int | Literal["auto"], BeforeValidator(_check_round_to, json_schema_input_type=int | Literal["auto"])
]


class Target(StrictModel):
    """Dimensions that may be removed. `target: auto`, the default: inner channels, MLP and attention dimensions.

    If a kind is named (channels, residual, attention, mlp, embedding, selection), the kinds that are not named have the
    defaults below.
    """

    channels: bool = Field(True, description="inner channels of convolutions and linear layers")
    residual: bool = Field(
        False, description="channels of residual streams; the same channels are removed wherever the stream is written"
    )
    attention: Attention = Field(
        False,
        description="true: dimensions of queries, keys and values, the same in every head; auto: the same, if the "
        "model has attention; qk, v: separate scores for each of the two, or only one of them; per_head: separate "
        "scores for each head; heads: whole heads",
    )
    mlp: bool | Literal["before_activation"] = Field(
        False,
        description="hidden dimensions of transformer MLPs; not needed with channels: true. before_activation: scores "
        "stand in front of the activation function instead of in the layer that reads it; only where it maps 0 to 0",
    )
    embedding: bool = Field(False, description="residual streams that pass through layer norms (advanced)")
    selection: bool = Field(
        False,
        description="channels that a pre-activation norm reads from a residual stream, or from features that several "
        "norms read: every norm selects its own by an index, and the stream stays whole",
    )
    branches: bool = Field(False, description="allow removing a whole residual branch when none of it is worth keeping")
    operations: bool = Field(
        False,
        description="choose one candidate of every `compress.Choice`, before widths are cut; then channels is false "
        "unless it is given",
    )
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
    round_to: RoundTo = Field(
        "auto",
        description="keep a multiple of this many dimensions in each group; auto: 8 in groups of 64 dimensions or "
        "more, 4 from 32, 2 from 16, 1 below and in attention",
    )
    min_keep: int = Field(2, ge=1, le=MAX_COUNT, description="keep at least this many dimensions in each group")
    bounds: dict[ModulePattern, Bound] = Field(
        default_factory=dict, description="group (name, or re:REGEX) -> {least: 8, most: 50%}; the last match counts"
    )

    @model_validator(mode="before")
    @classmethod
    def _expand_auto(cls, value: Any) -> Any:
        """Cut whatever the model has if no kind of dimension is named; only choose operations if these are."""
        if value == "auto":
            value = {}
        if not isinstance(value, Mapping):
            return value
        if value.get("operations") is True:
            return {"channels": False, **value}
        return value if any(kind in value for kind in TARGET_KINDS) else {**value, "attention": "auto"}

    @property
    def widths(self) -> bool:
        """Return whether dimensions may be removed, not only operations chosen."""
        return bool(
            self.channels
            or self.residual
            or self.attention
            or self.mlp
            or self.embedding
            or self.selection
            or not self.operations
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [{"const": "auto"}, handler(schema)], "description": "dimensions that may be removed"}


class Timing(StrictModel):
    """Measurement of latency, for a latency budget and for the report."""

    batch_size: int = Field(1, ge=1, le=MAX_COUNT)
    repeats: int = Field(30, ge=3, le=MAX_COUNT, description="runs of each network, in turn; the median is reported")


class Distill(LogitDistillation):
    """Distillation of the predictions, and of the features that are named."""

    features: tuple[str, ...] = Field((), description="modules whose outputs should match the teacher's", strict=False)
    feature_weight: NonNegative = Field(1.0, description="of their mean squared error relative to the teacher's output")


class Finetune(TrainingConfig):
    """Training of the compact network, starting from the weights of the search or from scratch.

    `finetune: {}` has the defaults.
    """

    epochs: Length = Field(
        default_factory=lambda: Length.model_validate(FINETUNE_LENGTH),
        description="how long: 10, 10 epochs, 500 steps; or epochs within bounds",
    )
    from_: Literal["search", "scratch"] = Field(
        "search",
        alias="from",
        description="scratch: new weights; a network of cells is built anew from its genotype, as in the papers",
    )
    cells: int | None = Field(
        None, ge=1, le=1000, description="with from: scratch, cells of the network (NATS-Bench: in each stage)"
    )
    channels: int | None = Field(None, ge=1, le=10000, description="with from: scratch, channels of the first cells")
    drop_path: Annotated[Fraction, Field(lt=1)] = Field(
        0.0, description="probability of dropping a path of a cell; grows linearly from 0 to this value"
    )
    auxiliary: NonNegative = Field(
        0.0, description="weight of the auxiliary head of a network of DARTS cells; 0 is none"
    )
    cutout: int = Field(0, ge=0, le=MAX_COUNT, description="side of the square that is cut out of images; 0 is off")
    distill: Distill | None = Field(
        None,
        description="distillation from the dense model; default in a run: with the defaults below, but none with "
        "target.operations unless you give a teacher; null: none",
    )
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
        None,
        description="keep the weights that are best on the validation data, those before the first step included "
        "(default: true if there is any)",
    )

    @model_validator(mode="after")
    def _check_sizes(self) -> Finetune:
        for name in ("cells", "channels"):
            if getattr(self, name) is not None and self.from_ != "scratch":
                raise ValueError(f"{name}: the searched network has its own size; give from: scratch to build another")
        return self


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
        None,
        description="digits, cifar10:FOLDER, cifar100:FOLDER, folder:FOLDER or package.module:factory, which commands "
        "take from --data only",
    )
    batch_size: int = Field(128, ge=1, le=MAX_COUNT)
    size: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="height and width of the images (default: unchanged; 224 for folder)"
    )
    validation: Fraction | None = Field(
        None,
        gt=0,
        lt=1,
        description="part of the training images that is held out for validation; the source's own split is then test "
        "data (default: 10% for cifar10 and cifar100, else the source's own split)",
    )
    classes: tuple[str, ...] | None = Field(
        None, min_length=2, description="folders of the classes to use, in the order of their numbers; for folder:"
    )
    workers: int = Field(0, ge=0, le=4096)
