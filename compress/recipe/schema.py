"""Recipe: everything that describes one pruning run, as data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, SerializeAsAny, WrapValidator, model_validator
from pydantic.json_schema import WithJsonSchema

from .budget_section import Budget
from .conflicts import Conflict, ConflictError
from .engine_config import EngineConfig
from .fields import StrictModel
from .messages import short_repr
from .reader import read_recipe
from .search_config import SearchConfig, config_class, search_names
from .sections import Compensation, Data, Export, Finetune, Target, Timing


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
    if isinstance(value, str):
        value = {"method": value}
    if not isinstance(value, Mapping):
        raise ValueError(
            "expected a method, as netslim, or one with settings, as {method: netslim, epochs: 10}; got "
            f"{short_repr(value)}"
        )
    method = _SearchMethod(method=value.get("method", "magnitude")).method
    return config_class(method).model_validate({"method": method} | dict(value))


class Recipe(StrictModel):
    """Settings of one pruning run; YAML file, dict and object are equivalent.

    >>> Recipe.load({"budget": {"macs": "50%"}}).budget.macs
    0.5
    """

    target: Target = Field(default_factory=lambda: Target())
    budget: Budget = Field(description="what is left; not needed if only operations are chosen")
    search: Annotated[
        SerializeAsAny[SearchConfig], WrapValidator(_check_search), WithJsonSchema({"type": "object"})
    ] = Field(default_factory=lambda: config_class("magnitude")(method="magnitude"))
    steps: int = Field(1, ge=1, le=1000, description="rounds of search and cut; each comes closer to the budget")
    compensate: Compensation = Field(
        False,
        description="right after the cut, without training: least_squares solves the weights of the layers behind the "
        "cut so that they give what they gave before it, on inputs without labels; mean adds the mean of dropped "
        "inputs to the biases of the layers that read them",
    )
    finetune: Finetune | None = Field(None, description="training of the compact network (default: none)")
    timing: Timing = Field(default_factory=lambda: Timing())
    export: Export | None = Field(None, description="a verified ONNX file in the working directory (default: none)")
    engine: EngineConfig = Field(default_factory=lambda: EngineConfig())
    task: str | None = Field(
        None,
        description="package.module:factory of a Task, which commands take from --task only (default: classification "
        "from the data loaders)",
    )
    data: Data = Field(default_factory=lambda: Data())
    seed: int = Field(0, ge=0, lt=2**63)

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as JSON data that `load` reads as it is; settings that are off are null."""
        data = self.model_dump(mode="json", exclude_none=True)
        for name, section in (("search", self.search), ("finetune", self.finetune)):
            if section is not None and getattr(section, "distill", section) is None:
                data[name]["distill"] = None  # which would be the default in a run
        return data

    @property
    def is_automatic(self) -> bool:
        """Return whether the recipe names neither search nor fine-tuning, so that both follow from the data."""
        return not {"search", "finetune"} & self.model_fields_set and not self.target.operations

    @model_validator(mode="before")
    @classmethod
    def _choose_operations_without_budget(cls, value: Any) -> Any:
        """Without a budget the strongest operations are chosen; the budget of widths is required."""
        target = value.get("target") if isinstance(value, Mapping) else None
        if isinstance(target, Mapping) and target.get("operations") is True:
            try:
                alone = not Target.model_validate(dict(target)).widths
            except ValueError:  # reported when the target itself is validated
                alone = True
            if alone and value.get("budget") is None:
                return dict(value) | {"budget": {"auto": True}}
        return value

    @model_validator(mode="after")
    def _check_conflicts(self) -> Recipe:
        if conflicts := list(self._conflicts()):
            raise ConflictError(conflicts)
        return self

    def _conflicts(self) -> Iterator[Conflict]:
        if self.target.operations:
            yield from self._operation_conflicts()
        if self.budget.auto and not self.search.reaches_zero and self.target.widths:
            yield Conflict(
                ("budget", "search"),
                "auto keeps the dimensions whose score did not reach zero, but the scores of "
                f"{self.search.method} do not reach zero with these settings. Choose bayesnas with a number as gamma; "
                "rarts, netslim, milenas, darts1 or darts2 with a number as gamma and proximal: true (or penalty: "
                "l1_split, l0_split or tl1_split); or give a budget",
            )
        if self.compensate and self.target.branches:
            advice = (
                "a branch that is removed has no reader whose bias could compensate for it; leave out one of the two"
            )
            yield Conflict(("compensate", "target"), advice)
        if self.budget.auto and self.steps > 1:
            yield Conflict(("steps", "budget"), "budget: auto cannot be divided into rounds; leave steps out")

    def _operation_conflicts(self) -> Iterator[Conflict]:
        if self.target.widths and self.finetune is not None and (self.finetune.cells or self.finetune.channels):
            advice = "widths are cut from the searched network, so its size is given; leave cells and channels out"
            yield Conflict(("finetune", "target"), advice)
        if not self.search.chooses_operations or "search" not in self.model_fields_set:
            able = [name for name in search_names() if config_class(name).chooses_operations]
            yield Conflict(
                ("search", "target"),
                f"target.operations needs a search that trains the scores of candidates: one of {', '.join(able)}",
            )
        if self.target.widths:
            return
        if self.steps > 1:
            yield Conflict(("steps", "target"), "operations are chosen in one round; leave steps out")
        if self.budget.dims is not None:
            yield Conflict(("budget", "target"), "operations have no dimensions; give macs, params, size or latency")
        gamma, penalty = getattr(self.search, "gamma", "auto"), getattr(self.search, "penalty", "")
        has_other_use = self.search.method == "bayesnas" or not self.search.chooses_operations  # the latter is reported
        if gamma not in ("auto", 0) and penalty not in ("macs", "latency") and not has_other_use:
            advice = (
                f"penalty {penalty} draws scores of dimensions to zero; for operations give penalty: latency or macs"
            )
            yield Conflict(("search", "target"), advice)

    @classmethod
    def load(cls, source: str | float | Path | Mapping[str, Any] | Recipe) -> Recipe:
        """Return a packaged recipe by name, a YAML file by path, a dict, a budget such as "50%" or a recipe, validated.

        Raises:
            RecipeError: no such recipe, or the recipe is invalid; the message lists all problems.
        """
        return source if isinstance(source, Recipe) else read_recipe(source, Recipe)

    @classmethod
    def schema_for_editors(cls, searches: Iterable[str] | None = None) -> dict[str, Any]:
        """Return the JSON schema, with the settings of these searches (default: all registered) and with `extends`."""
        schema = cls.model_json_schema()
        searches = search_names() if searches is None else list(searches)
        options = []
        for name in searches:
            config = config_class(name).model_json_schema()
            schema["$defs"] |= config.pop("$defs", {})
            schema["$defs"][f"search_{name}"] = config
            options.append({"$ref": f"#/$defs/search_{name}"})
        names = {"enum": searches}
        schema["properties"]["search"] = {"anyOf": [names, *options], "description": "method that ranks the dimensions"}
        schema["properties"]["extends"] = {"type": "string", "description": "recipe (name or path) to start from"}
        schema.pop("required", None)  # a recipe that is extended may give the key
        return schema
