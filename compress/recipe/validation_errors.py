"""Turn pydantic's validation errors into messages: where, what was expected, what came, what to do."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from .budget_section import BUDGET_UNITS, explain_foreign_key, units_problem
from .conflicts import Conflict, ConflictError
from .messages import did_you_mean, dotted_key, short_repr
from .search_config import config_class, search_names
from .sources import RecipeData, value_at

SYNONYMS = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "fp32": "float32", "single": "float32"}
STEP_WORDS = ("steps", "iterations", "iters", "max_steps", "num_steps", "n_steps")  # instead of `epochs: 300 steps`
Path = tuple[int | str, ...]


class ErrorExplainer:
    """Explains the errors of one recipe by its schema and by the positions in its files."""

    def __init__(self, schema: type[BaseModel], data: RecipeData) -> None:
        self.schema, self.data = schema, data

    def explain(self, error: ValidationError) -> list[str]:
        """Return a line for each problem."""
        lines = [line for details in _distinct(error.errors()) for line in self._explain_details(details)]
        return lines + self._explain_conflicts(self._hidden_conflicts(error))

    def _explain_details(self, details: ErrorDetails) -> list[str]:
        path, kind, text = tuple(details["loc"]), details["type"], details["msg"].removeprefix("Value error, ")
        cause = details.get("ctx", {}).get("error")
        if isinstance(cause, ConflictError):
            return self._explain_conflicts(cause.conflicts)
        if path and path[-1] == "[key]":
            path = path[:-1]
        while len(path) > 1 and tuple(map(str, path)) not in self.data.places and not self._is_container(path[:-1]):
            path = path[:-1]  # pydantic appends the branch of a union that it tried
        where, got = self.data.describe(path), short_repr(details["input"])
        if kind == "extra_forbidden":
            known = self._keys_of(path[:-1])
            foreign = explain_foreign_key(str(path[-1])[:80], details["input"])
            hint = f" {foreign}" if foreign and path[0] == "budget" else ""
            hint = hint or self._other_searches(path) or self._right_section(path, known)
            if not hint and foreign and len(path) == 1:
                hint = f" It belongs to budget. {foreign}"
            hint = hint or _length_in_steps(path[-1], details["input"], known) or _did_you_mean(path[-1], known)
            return [f"{where}: expected one of {', '.join(known)}; got {short_repr(path[-1])}.{hint}"]
        if kind == "missing":
            return [f"{where}: required but missing"]
        if kind == "literal_error":
            known = [name.strip(" '") for name in details["ctx"]["expected"].replace(" or ", ", ").split(",")]
            return [f"{where}: expected one of {', '.join(known)}; got {got}.{_did_you_mean(details['input'], known)}"]
        if kind == "value_error":
            return [f"{where}: {text}"]
        if kind in ("model_type", "model_attributes_type", "dict_type"):
            known = self._keys_of(path)
            return [f"{where}: expected a section{' with some of ' * bool(known)}{', '.join(known)}; got {got}"]
        if kind in ("tuple_type", "list_type"):
            return [f"{where}: expected a list; got {got}"]
        if kind == "too_short":
            return [f"{where}: expected a list of at least {details['ctx']['min_length']}; got {got}"]
        return [f"{where}: {text[0].lower()}{text[1:]}; got {got}"]

    def _explain_conflicts(self, conflicts: Sequence[Conflict]) -> list[str]:
        return [f"{self.data.describe((conflict.sections[0],))}: {conflict.advice}" for conflict in conflicts]

    def _hidden_conflicts(self, error: ValidationError) -> list[Conflict]:
        """Return conflicts that pydantic does not report because some section is invalid.

        The recipe is validated again without the invalid sections.
        """
        invalid = {str(details["loc"][0]) for details in error.errors() if details["loc"]}
        conflicts: list[Conflict] = []
        if message := self._limit_beside_auto(error):
            conflicts.append(Conflict(("budget",), message))
        if invalid:
            values = self.data.values
            valid = {key: values[key] for key in values if key in self.schema.model_fields and key not in invalid}
            try:
                self.schema.model_validate({"budget": {"macs": 1.0}} | valid)
            except ValidationError as second:
                causes = [details["ctx"]["error"] for details in second.errors() if not details["loc"]]
                conflicts += [c for cause in causes for c in cause.conflicts if not invalid & {*c.sections}]
        return conflicts

    def _limit_beside_auto(self, error: ValidationError) -> str:
        """Return the budget's message about limits beside auto, which it does not check if one of them is invalid."""
        budget = self.data.values.get("budget")
        unit_is_invalid = any(d["loc"][:1] == ("budget",) and d["loc"][1:] for d in error.errors())
        if not isinstance(budget, Mapping) or not unit_is_invalid:
            return ""
        units = [unit for unit in BUDGET_UNITS if budget.get(unit) is not None]
        return units_problem(units) if len(units) > 1 else ""

    def _is_container(self, path: Path) -> bool:
        return isinstance(value_at(self.data.values, path), (Mapping, list, tuple))

    def _other_searches(self, path: Path) -> str:
        """Return which searches have a setting that the one of the recipe does not have; "" if none has it."""
        *section, key = path
        if section != ["search"] or "search" not in self.schema.model_fields:
            return ""
        able = [name for name in search_names() if key in _field_names(config_class(name))]
        if not able:
            return ""
        method = self.data.values["search"].get("method")
        what = f"{method} has no {key}" if method else "Without a method it is magnitude, which trains nothing"
        return f" {what}. Settings of that name belong to the methods {', '.join(able)}: write method: {_best(able)}."

    def _right_section(self, path: Path, known: list[str]) -> str:
        """Return a hint to the sections that have the key: below the section where it is, or else at the top level."""
        *section, key = path
        for candidates in ([(*section, name) for name in known], [(name,) for name in self.schema.model_fields]):
            matches = [dotted_key(c) for c in candidates if c != tuple(section) and key in self._keys_if_section(c)]
            if matches:
                return f" It belongs to {' and '.join(matches)}."
        return ""

    def _keys_if_section(self, path: Path) -> list[str]:
        """Return the keys of a section; none if the path leads to a single setting."""
        model: Any = self.schema
        for key in path:
            field = getattr(model, "model_fields", {}).get(key)
            model = _model_in(field.annotation) if field else None
        try:
            return self._keys_of(path) if model is not None else []
        except (LookupError, ValueError, TypeError, AttributeError):  # the search is missing or unknown
            return []

    def _keys_of(self, path: Path) -> list[str]:
        """Return the keys that a section may have."""
        if not path:
            return [*self.schema.model_fields, "extends"]
        model: Any = self.schema
        for key in path:
            if model is self.schema and key == "search":
                model = config_class(self.data.values["search"].get("method", "magnitude"))
            elif key in getattr(model, "model_fields", {}):
                model = _model_in(model.model_fields[key].annotation)
        return _field_names(model)


def _distinct(errors: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Return the errors without those that follow from another, or that another branch of a union repeats.

    A list counts as too short if its elements are invalid, and a setting that is a boolean or one of some words as both
    no boolean and none of the words.
    """
    paths = [details["loc"] for details in errors]
    of_words = {details["loc"][:-1]: details for details in errors if details["type"] == "literal_error"}
    distinct = []
    for details in errors:
        path, kind = details["loc"], details["type"]
        if kind == "too_short" and any(p[: len(path)] == path and len(p) > len(path) for p in paths):
            continue
        if kind.startswith("bool_") and path[-1:] == ("bool",) and (words := of_words.get(path[:-1])) is not None:
            words["ctx"]["expected"] = "true, false, " + words["ctx"]["expected"]
            continue
        distinct.append(details)
    return distinct


def _field_names(model: Any) -> list[str]:
    return [field.alias or name for name, field in getattr(model, "model_fields", {}).items()]


def _best(methods: list[str]) -> str:
    return "netslim" if "netslim" in methods else methods[0]  # netslim is the default where there are labels


def _length_in_steps(key: int | str, value: Any, known: list[str]) -> str:
    """Return how a length in steps is written, if the key stands for one and the section has a length."""
    if str(key) not in STEP_WORDS or "epochs" not in known:
        return ""
    number = value if isinstance(value, int) and not isinstance(value, bool) else 300
    return f" A length in steps is written as epochs: {number} steps."


def _did_you_mean(value: Any, known: list[str]) -> str:
    synonym = SYNONYMS.get(str(value)[:80].lower())
    return f" Did you mean {synonym}?" if synonym in known else did_you_mean(str(value), known)


def _model_in(annotation: Any) -> Any:
    """Return the section in an annotation such as `Finetune | None` or `dict[str, Bound]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, dict):
        return next((m for a in typing.get_args(annotation) if (m := _model_in(a)) is not None), None)
    return None
