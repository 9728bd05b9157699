"""Recipe: all that describes a pruning, as data. YAML, dict and object are the same thing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    SerializeAsAny,
    WrapValidator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue, WithJsonSchema
from pydantic_core import CoreSchema

from . import search as searches
from .compute import EngineConfig
from .fields import MOST, Left, Name, NotNegative, Share, Strict, Teaching, Training, Width, near, parse_fraction
from .search import SearchConfig
from .yamltext import shown

UNITS = ("macs", "params", "dims", "latency", "auto")


class Bound(Strict):
    """How narrow and how wide a group may become, in dimensions or as a part of its dense width."""

    least: Width | None = None
    most: Width | None = None

    @model_validator(mode="after")
    def _order(self) -> Bound:
        if self.least is None and self.most is None:
            raise ValueError("expected least, most or both; got none")
        if type(self.least) is type(self.most) and self.least > self.most:  # type: ignore[operator]
            raise ValueError(f"expected least <= most; got {self.least} and {self.most}")
        return self


HEADS = ("qk", "v", "per_head", "heads")


def _attention(value: Any) -> Any:
    """`true`, `false`, one word or several."""
    if isinstance(value, bool):
        return value
    words = [value] if isinstance(value, str) else list(value) if isinstance(value, (list, tuple)) else [value]
    if not words or any(not isinstance(word, str) or word not in HEADS for word in words):
        hint = next((near(str(word), HEADS) for word in words if str(word) not in HEADS), "")
        raise ValueError(f"expected true, false, or some of {', '.join(HEADS)}, as [qk, v]; got {shown(value)}{hint}")
    if "heads" in words and len(set(words)) > 1:
        raise ValueError(
            f"expected heads alone, or {', '.join(HEADS[:3])}: whole heads and dimensions within them cannot be cut at "
            f"once; got {value!r}. Prune twice, heads first"
        )
    return tuple(word for word in HEADS if word in words)


Attention = Annotated[
    bool | tuple[str, ...], BeforeValidator(_attention, json_schema_input_type=bool | str | list[str])
]


class Target(Strict):
    """Which dimensions may be cut."""

    channels: bool = Field(True, description="inner channels of convolutions and linear layers")
    residual: bool = Field(False, description="channels of residual streams, cut alike wherever the stream is written")
    attention: Attention = Field(
        False,
        description="true: dimensions of queries, keys and values, alike in every head; qk, v: with scores of their "
        "own, or one of them alone; per_head: each head with scores of its own; heads: whole heads",
    )
    mlp: bool = Field(False, description="hidden dimensions of transformers' MLPs, if not all inner channels")
    embedding: bool = Field(False, description="residual streams that pass through layer norms, for the advanced")
    branches: bool = Field(False, description="residual branches of which nothing is worth keeping may go altogether")
    include: tuple[Name, ...] = Field((), description="only these modules (full name, or re:REGEX)", strict=False)
    exclude: tuple[Name, ...] = Field((), description="never these modules (full name, or re:REGEX)", strict=False)
    one_path: bool = Field(
        False, description="where code branches on values, trust the path of the example inputs (torch-pruning's graph)"
    )
    round_to: int = Field(1, ge=1, le=MOST, description="keep a multiple of this many dimensions in each group")
    min_keep: int = Field(2, ge=1, le=MOST, description="keep at least this many dimensions in each group")
    bounds: dict[Name, Bound] = Field(
        default_factory=dict, description="group (name, or re:REGEX) -> {least: 8, most: 50%}; the last match counts"
    )


class Budget(Strict):
    """What is left of the dense network; exactly one of these.

    `budget: auto` leaves it to the search: dimensions whose score reached zero go.
    """

    macs: Left | None = None
    params: Left | None = None
    dims: Left | None = None
    latency: Left | None = Field(None, description="measured on the device of the run; see timing")
    auto: Literal[True] | None = Field(None, description="learned; the same as `budget: auto`")

    @model_validator(mode="before")
    @classmethod
    def _word(cls, value: Any) -> Any:
        if isinstance(value, str):
            if value != "auto":
                hint = near(value, ["auto"]) or (f". Did you mean {{macs: {value}}}?" if parse_fraction(value) else "")
                raise ValueError(f"expected auto, or what is left, as {{macs: 50%}}; got {value[:80]!r}{hint}")
            return {"auto": True}
        return value

    @model_validator(mode="after")
    def _one(self) -> Budget:
        given = [name for name in UNITS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"expected exactly one of {', '.join(UNITS)}; got {' and '.join(given) or 'none'}")
        return self

    @property
    def unit(self) -> str:
        return next(name for name in UNITS if getattr(self, name) is not None)

    @property
    def left(self) -> float:
        """The part that may be left; all of it where it is learned."""
        return 1.0 if self.auto else float(getattr(self, self.unit))

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [{"const": "auto"}, handler(schema)], "description": "what is left of the dense network"}


class Timing(Strict):
    """How latency is measured, for a latency budget and for the report."""

    batch_size: int = Field(1, ge=1, le=MOST)
    repeats: int = Field(30, ge=3, le=MOST, description="runs of each network, taken in turn; the median counts")


class Distill(Teaching):
    """Distillation of predictions, and of features where they are named."""

    features: tuple[str, ...] = Field((), description="modules whose outputs are to agree, too", strict=False)
    feature_weight: NotNegative = Field(1.0, description="of their mean squared difference, relative to the teacher's")


class Finetune(Training):
    """Training of the compact network, from the weights that the search left."""

    distill: Distill | None = None
    label_smoothing: Share = 0.0
    mixup: NotNegative = Field(0.0, description="alpha of mixup (timm); 0 is off")
    cutmix: NotNegative = Field(0.0, description="alpha of cutmix (timm); 0 is off")
    ema: Share | None = Field(
        None, description="decay of a moving average of the weights, such as 0.999, which is kept"
    )
    recalibrate: int = Field(
        0, ge=0, le=MOST, description="batches on which batch norms are measured anew before training"
    )
    best: bool | None = Field(
        None, description="keep the weights that are best on the validation data (default: where there are some)"
    )


class Export(Strict):
    """A checked file for deployment: model.onnx in the working directory. `export: onnx` is all defaults."""

    format: Literal["onnx"] = "onnx"
    dynamic_batch: bool = Field(True, description="batches of any size; else that of the example inputs")
    dynamic_size: bool = Field(False, description="images of any height and width, where the model takes them")
    opset: int | None = Field(None, ge=1, le=MOST, description="version of ONNX's operators (default: torch's own)")
    slim: bool = Field(True, description="simplify the graph with onnxslim")
    half: bool = Field(False, description="weights in half precision; inputs and outputs stay float32")
    int8: bool = Field(False, description="also model.int8.onnx, its ranges measured on training data")

    @model_validator(mode="before")
    @classmethod
    def _word(cls, value: Any) -> Any:
        return {"format": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_precision(self) -> Export:
        if self.half and self.int8:
            raise ValueError("expected half or int8, which starts from single precision; got both")
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [{"const": "onnx"}, handler(schema)], "description": "a checked file for deployment"}


class Data(Strict):
    """Loaders by name, for the command line and for recipes that stand alone."""

    source: str | None = Field(
        None, description="digits, cifar10:FOLDER, cifar100:FOLDER, folder:FOLDER or package.module:factory"
    )
    batch_size: int = Field(128, ge=1, le=MOST)
    size: int | None = Field(
        None, ge=1, le=MOST, description="height and width of the images (default: as they are, folder: 224)"
    )
    workers: int = Field(0, ge=0, le=4096)


def _known(name: str) -> str:
    searches.search_class(name)
    return name


class _Named(Strict):
    """Only for the place of the error where the method is unknown."""

    method: Annotated[str, AfterValidator(_known)]


def _search(value: Any, handler: Any) -> Any:
    """The method's own config; its errors keep their places."""
    if isinstance(value, SearchConfig):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"expected a method and its settings, as {{method: netslim, epochs: 10}}; got {shown(value)}")
    named = _Named(method=value.get("method", "magnitude"))
    return searches.config_class(named.method).model_validate({"method": named.method} | dict(value))


class Clash(ValueError):
    """Sections of a recipe that do not go together: which of them, and what to do."""

    def __init__(self, found: list[tuple[tuple[str, ...], str]]) -> None:
        super().__init__("; ".join(f"{sections[0]}: {text}" for sections, text in found))
        self.found = found


class Recipe(Strict):
    """Everything about one pruning.

    >>> Recipe.load({"budget": {"macs": "50%"}}).budget.left
    0.5
    """

    target: Target = Field(default_factory=lambda: Target())
    budget: Budget
    search: Annotated[SerializeAsAny[SearchConfig], WrapValidator(_search), WithJsonSchema({"type": "object"})] = Field(
        default_factory=lambda: searches.config_class("magnitude")(method="magnitude")
    )
    steps: int = Field(1, ge=1, le=1000, description="rounds of search and cut, each a step nearer to the budget")
    compensate: bool = Field(False, description="fold the mean of what is dropped into the readers' biases")
    finetune: Finetune | None = Field(None, description="training of the compact network; none if left out")
    timing: Timing = Field(default_factory=lambda: Timing())
    export: Export | None = Field(None, description="a checked ONNX file in the working directory; none if left out")
    engine: EngineConfig = Field(default_factory=lambda: EngineConfig())
    task: str | None = Field(None, description="package.module:factory of a Task, if not classification from loaders")
    data: Data = Field(default_factory=lambda: Data())
    seed: int = Field(0, ge=0, lt=2**63)

    @model_validator(mode="after")
    def _together(self) -> Recipe:
        if found := list(self._clashes()):
            raise Clash(found)
        return self

    def _clashes(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Sections that do not go together, the one to mend first, and what to do."""
        if self.budget.auto and not self.search.reaches_zero:
            text = (
                "auto keeps the dimensions whose score did not reach zero, and with these settings "
                f"{self.search.method} has no scores that do. Choose bayesnas with a number as gamma; rarts, "
                "netslim, milenas, darts1 or darts2 with a number as gamma and proximal: true (or penalty: l1_split or "
                "l0_split); or give a budget"
            )
            yield ("budget", "search"), text
        if self.compensate and self.target.branches:
            text = "what is dropped has no reader where whole branches go; leave one of them out"
            yield ("compensate", "target"), text
        if self.budget.auto and self.steps > 1:
            yield ("steps", "budget"), "with budget: auto there is nothing to divide into rounds; leave steps out"

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any] | Recipe) -> Recipe:
        """A packaged recipe by name, a YAML file by path, a dict, or a recipe itself.

        Raises:
            RecipeError: no such recipe, or all that is wrong in it.
        """
        from .reading import read

        return source if isinstance(source, Recipe) else read(source)

    @classmethod
    def schema_for_editors(cls) -> dict[str, Any]:
        """The JSON schema, with the settings of every search that is registered, and `extends`."""
        schema = cls.model_json_schema()
        options = []
        for name in searches.names():
            config = searches.config_class(name).model_json_schema()
            schema["$defs"] |= config.pop("$defs", {})
            schema["$defs"][f"search_{name}"] = config
            options.append({"$ref": f"#/$defs/search_{name}"})
        schema["properties"]["search"] = {"anyOf": options, "description": "how the importance of dimensions is found"}
        schema["properties"]["extends"] = {"type": "string", "description": "a recipe (name or path) to start from"}
        schema.pop("required", None)  # what is extended may give it
        return schema
