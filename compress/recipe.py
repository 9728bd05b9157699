"""Recipe: all that describes a pruning, as data. YAML, dict and object are the same thing."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator


class RecipeError(ValueError):
    """A recipe that cannot be used; the message names every place that is wrong."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Target(Strict):
    """Which dimensions may be cut."""

    channels: bool = Field(True, description="inner channels of convolutions and linear layers")
    residual: bool = Field(False, description="channels of residual streams, cut alike wherever the stream is written")
    attention: bool = Field(False, description="dimensions that pass through a product of activations")
    include: tuple[str, ...] = Field((), description="only these modules (full name, or re:REGEX)", strict=False)
    exclude: tuple[str, ...] = Field((), description="never these modules (full name, or re:REGEX)", strict=False)
    one_path: bool = Field(
        False, description="where code branches on values, trust the path of the example inputs (torch-pruning's graph)"
    )
    round_to: int = Field(1, ge=1, description="keep a multiple of this many dimensions in each group")
    min_keep: int = Field(2, ge=1, description="keep at least this many dimensions in each group")


def _left(value: Any) -> Any:
    """`0.5` or `50%`: the fraction that is left."""
    expected = 'expected what is left, as 0 < x <= 1 or "50%"'
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            number = float(value.strip()[:-1]) / 100
        except ValueError:
            raise ValueError(f"{expected}; got {value!r}") from None
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value)
    else:
        try:
            number = float(value) if isinstance(value, str) else math.nan
        except ValueError:
            number = math.nan
    if not 0 < number <= 1:
        raise ValueError(f"{expected}; got {value!r}" + (f'. Did you mean "{number:g}%"?' if 1 < number <= 100 else ""))
    return number


Left = Annotated[float, BeforeValidator(_left, json_schema_input_type=float | str)]


class Budget(Strict):
    """What is left of the dense network; exactly one of these."""

    macs: Left | None = None
    params: Left | None = None
    dims: Left | None = None

    @model_validator(mode="after")
    def _one(self) -> Budget:
        given = [name for name in ("macs", "params", "dims") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"expected exactly one of macs, params, dims; got {' and '.join(given) or 'none'}")
        return self

    @property
    def unit(self) -> str:
        return next(name for name in ("macs", "params", "dims") if getattr(self, name) is not None)

    @property
    def left(self) -> float:
        value = getattr(self, self.unit)
        assert isinstance(value, float)
        return value


class Search(Strict):
    """How the importance of dimensions is found."""

    method: Literal["magnitude", "random"] = "magnitude"
    seed: int = 0


class Recipe(Strict):
    """Everything about one pruning.

    >>> Recipe.load({"budget": {"macs": "50%"}}).budget.left
    0.5
    """

    target: Target = Field(default_factory=lambda: Target())
    budget: Budget
    search: Search = Field(default_factory=lambda: Search())
    compensate: bool = Field(False, description="fold the mean of what is dropped into the readers' biases")

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any] | Recipe) -> Recipe:
        """A packaged recipe by name, a YAML file by path, a dict, or a recipe itself.

        Raises:
            RecipeError: no such recipe, or all that is wrong in it.
        """
        if isinstance(source, Recipe):
            return source
        if isinstance(source, Mapping):
            return cls._validate(dict(source), "recipe", {})
        path = Path(source)
        if not path.is_file():
            path = _packaged(str(source))
        try:
            text = path.read_text()
            data = yaml.safe_load(text)
            found = list(_places(yaml.compose(text)))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise RecipeError(f"{path}: not YAML: {error}") from error
        places = dict(found)
        for key, (line, column) in found:
            if key and [k for k, _ in found].count(key) > 2:  # once as a key and once as its value
                raise RecipeError(f"{path}: {'.'.join(map(str, key))} (line {line}, column {column}) is given twice")
        if not isinstance(data, Mapping):
            raise RecipeError(f"{path}: expected keys such as budget, target and search; got {type(data).__name__}")
        return cls._validate(dict(data), str(path), places)

    @classmethod
    def _validate(cls, data: dict[str, Any], origin: str, places: Mapping[tuple[Any, ...], tuple[int, int]]) -> Recipe:
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            lines = [_explain(e, places) for e in error.errors()]
            raise RecipeError(
                f"{origin}: {len(lines)} thing{'s' * (len(lines) > 1)} to mend\n  " + "\n  ".join(lines)
            ) from None


def packaged() -> dict[str, Path]:
    """The recipes that come with the library, by name."""
    folder = Path(str(resources.files("compress.recipes")))
    return {str(path.relative_to(folder).with_suffix("")): path for path in sorted(folder.rglob("*.yaml"))}


def _packaged(name: str) -> Path:
    known = packaged()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    raise RecipeError(
        f"{name}: expected the path of a YAML file or one of the packaged recipes ({', '.join(known) or 'none'})"
        + (f". Did you mean {near[0]}?" if near else "")
    )


def _places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], tuple[int, int]]]:
    """Line and column of every key and item of a YAML document."""
    if node is None:
        return
    yield path, (node.start_mark.line + 1, node.start_mark.column + 1)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _places(value, (*path, key.value))
            yield (*path, key.value), (key.start_mark.line + 1, key.start_mark.column + 1)
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            yield from _places(value, (*path, i))


def _explain(error: Any, places: Mapping[tuple[Any, ...], tuple[int, int]]) -> str:
    """One line: where, what was expected, what came, what to do."""
    path = tuple(error["loc"])
    line = places.get(path) or places.get(path[:-1])
    where = ".".join(map(str, path)) + (f" (line {line[0]}, column {line[1]})" if line else "")
    if error["type"] == "extra_forbidden":
        known = _fields(path[:-1])
        near = difflib.get_close_matches(str(path[-1]), known, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        return f"{where}: expected one of {', '.join(known)}; got {path[-1]!r}.{hint}"
    if error["type"] == "missing":
        return f"{where}: required, and missing"
    text = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{where}: {text}"
    return f"{where}: {text[0].lower()}{text[1:]}; got {error['input']!r}"


def _fields(path: tuple[Any, ...]) -> list[str]:
    model: Any = Recipe
    for key in path:
        model = model.model_fields[key].annotation
    return list(model.model_fields)
