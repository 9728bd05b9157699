"""Recipe: everything that describes one pruning run, as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, SerializeAsAny, WrapValidator, model_validator
from pydantic.json_schema import WithJsonSchema

from .conflicts import Conflict, ConflictError
from .engine_config import EngineConfig
from .fields import StrictModel
from .messages import short_repr
from .reader import read_recipe
from .search_config import SearchConfig, config_class, search_names
from .sections import Budget, Data, Export, Finetune, Target, Timing


def _check_method(name: str) -> str:
    config_class(name)
    return name


class _SearchMethod(StrictModel):
    """Validates the method alone, so that an unknown one is reported as `search.method`."""

    method: Annotated[str, AfterValidator(_check_method)]


def _check_search(value: Any, _: Any) -> SearchConfig:
    """Validate the `search` section with the config class of its method."""
    if isinstance(value, SearchConfig):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(
            f"expected a method and its settings, as {{method: netslim, epochs: 10}}; got {short_repr(value)}"
        )
    method = _SearchMethod(method=value.get("method", "magnitude")).method
    return config_class(method).model_validate({"method": method} | dict(value))


class Recipe(StrictModel):
    """Settings of one pruning run; YAML file, dict and object are equivalent.

    >>> Recipe.load({"budget": {"macs": "50%"}}).budget.left
    0.5
    """

    target: Target = Field(default_factory=lambda: Target())
    budget: Budget
    search: Annotated[
        SerializeAsAny[SearchConfig], WrapValidator(_check_search), WithJsonSchema({"type": "object"})
    ] = Field(default_factory=lambda: config_class("magnitude")(method="magnitude"))
    steps: int = Field(1, ge=1, le=1000, description="rounds of search and cut; each comes closer to the budget")
    compensate: bool = Field(
        False, description="add the mean of the dropped inputs to the biases of the layers that read them"
    )
    finetune: Finetune | None = Field(None, description="training of the compact network (default: none)")
    timing: Timing = Field(default_factory=lambda: Timing())
    export: Export | None = Field(None, description="a verified ONNX file in the working directory (default: none)")
    engine: EngineConfig = Field(default_factory=lambda: EngineConfig())
    task: str | None = Field(
        None, description="package.module:factory of a Task (default: classification from the data loaders)"
    )
    data: Data = Field(default_factory=lambda: Data())
    seed: int = Field(0, ge=0, lt=2**63)

    @model_validator(mode="after")
    def _check_conflicts(self) -> Recipe:
        if conflicts := list(self._conflicts()):
            raise ConflictError(conflicts)
        return self

    def _conflicts(self) -> Iterator[Conflict]:
        if self.budget.auto and not self.search.reaches_zero:
            yield Conflict(
                ("budget", "search"),
                "auto keeps the dimensions whose score did not reach zero, but the scores of "
                f"{self.search.method} do not reach zero with these settings. Choose bayesnas with a number as gamma; "
                "rarts, netslim, milenas, darts1 or darts2 with a number as gamma and proximal: true (or penalty: "
                "l1_split or l0_split); or give a budget",
            )
        if self.compensate and self.target.branches:
            advice = (
                "a branch that is removed has no reader whose bias could compensate for it; leave out one of the two"
            )
            yield Conflict(("compensate", "target"), advice)
        if self.budget.auto and self.steps > 1:
            yield Conflict(("steps", "budget"), "budget: auto cannot be divided into rounds; leave steps out")

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any] | Recipe) -> Recipe:
        """Return a packaged recipe by name, a YAML file by path, a dict or a recipe, validated.

        Raises:
            RecipeError: no such recipe, or the recipe is invalid; the message lists all problems.
        """
        return source if isinstance(source, Recipe) else read_recipe(source, Recipe)

    @classmethod
    def schema_for_editors(cls) -> dict[str, Any]:
        """Return the JSON schema, with the settings of every registered search and with `extends`."""
        schema = cls.model_json_schema()
        options = []
        for name in search_names():
            config = config_class(name).model_json_schema()
            schema["$defs"] |= config.pop("$defs", {})
            schema["$defs"][f"search_{name}"] = config
            options.append({"$ref": f"#/$defs/search_{name}"})
        schema["properties"]["search"] = {"anyOf": options, "description": "method that ranks the dimensions"}
        schema["properties"]["extends"] = {"type": "string", "description": "recipe (name or path) to start from"}
        schema.pop("required", None)  # a recipe that is extended may give the key
        return schema
