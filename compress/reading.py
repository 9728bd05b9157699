"""From YAML or a dict to a recipe; everything that is wrong is said at once, with file, line and column."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from . import search as searches
from .recipe import UNITS, Clash, Recipe
from .yamltext import Key, Unreadable, dotted, parse, plain, shown

SYNONYMS = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "fp32": "float32", "single": "float32"}


class RecipeError(ValueError):
    """A recipe that cannot be used; the message names every place that is wrong."""


class Places(dict[Key, tuple[str, int, int]]):
    """Key -> file, line, column."""

    def of(self, key: tuple[Any, ...]) -> str:
        found = self.nearest(key)
        return f" (line {found[1]}, column {found[2]})" if found else ""

    def nearest(self, key: tuple[Any, ...]) -> tuple[str, int, int] | None:
        """Where a key stands, or else what it should be part of."""
        words = tuple(map(str, key))
        return next((self[words[:end]] for end in range(len(words), -1, -1) if words[:end] in self), None)


def read(source: str | Path | Mapping[str, Any]) -> Recipe:
    """
    Raises:
        RecipeError: no such recipe, or all that is wrong in it.
    """
    if not isinstance(source, (str, Path, Mapping)):
        raise RecipeError(f"recipe: expected a name, a path, a dict or a Recipe; got {type(source).__name__}")
    wrong: list[str] = []
    data, places, origin = _gather(source, (), wrong)
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        wrong += [line for e in [*error.errors(), *_clashes(error, data)] for line in _explain(e, data, places, origin)]
    if not wrong:
        return recipe
    count = f"{len(wrong)} thing{'s' * (len(wrong) > 1)}"
    raise RecipeError(f"{origin}: {count} to mend\n  " + "\n  ".join(dict.fromkeys(wrong)))


def _clashes(error: ValidationError, data: Mapping[str, Any]) -> list[Any]:
    """What does not go together, as far as sections that are right in themselves show it."""
    bad = {str(e["loc"][0]) for e in error.errors() if e["loc"]}
    found: list[tuple[tuple[str, ...], str]] = []
    if text := _two_budgets(error, data):
        found.append((("budget",), text))
    if bad:
        right = {key: value for key, value in data.items() if key in Recipe.model_fields and key not in bad}
        try:
            Recipe.model_validate({"budget": {"macs": 1.0}} | right)
        except ValidationError as second:
            clashes = [e["ctx"]["error"] for e in second.errors() if not e["loc"]]
            found += [(sections, text) for clash in clashes for sections, text in clash.found if not bad & {*sections}]
    return [{"loc": (), "type": "value_error", "msg": "", "ctx": {"error": Clash(found)}}] if found else []


def _two_budgets(error: ValidationError, data: Mapping[str, Any]) -> str:
    """The budget's own complaint about several units, which it does not come to where one of them is wrong."""
    budget = data.get("budget")
    if not isinstance(budget, Mapping) or not any(e["loc"][:1] == ("budget",) and e["loc"][1:] for e in error.errors()):
        return ""
    given = [unit for unit in UNITS if budget.get(unit) is not None]
    return f"expected exactly one of {', '.join(UNITS)}; got {' and '.join(given)}" if len(given) > 1 else ""


def packaged() -> dict[str, Path]:
    """The recipes that come with the library, by name."""
    folder = Path(str(resources.files("compress.recipes")))
    return {path.stem: path for path in sorted(folder.rglob("*.yaml"))}


def _gather(
    source: str | Path | Mapping[str, Any], before: tuple[str, ...], wrong: list[str]
) -> tuple[dict[str, Any], Places, str]:
    """The data with all that it extends, where each key stands, and the name of the whole."""
    if isinstance(source, Mapping):
        data, places, origin, folder = dict(source), Places(), "recipe", Path()
    else:
        path = _find(source, Path(before[-1]).parent if before else Path())
        origin, folder = str(path), path.parent
        if path.resolve() in [Path(b).resolve() for b in before]:
            raise RecipeError(f"{before[0]}: extends itself, by way of {' -> '.join([*before[1:], origin])}")
        data, places = _parse(path, before[0] if before else origin, wrong)
    base = data.pop("extends", None)
    if base is None:
        return data, places, origin
    where = f"{origin}: extends{places.of(('extends',))}: "
    if not isinstance(base, str):
        raise RecipeError(f"{where}expected a recipe's name or path; got {shown(base)}")
    here = (*before, origin if origin != "recipe" else str(folder / "recipe"))
    try:
        below, its_places, _ = _gather(base, here, wrong)
    except Unknown as error:
        raise RecipeError(f"{where}{error}") from None
    theirs = {key: place for key, place in its_places.items() if key and (places or _at(data, key, places) is places)}
    return _merge(below, data), Places({**theirs, **places}), origin


def _merge(below: Mapping[str, Any], above: Mapping[str, Any], path: Key = ()) -> dict[str, Any]:
    """Section by section and key by key; another unit of the budget and another method replace what was there."""
    merged = dict(below)
    for key, value in above.items():
        old: Any = merged.get(key)
        here = ".".join(map(str, (*path, key)))
        if not isinstance(value, Mapping) or not isinstance(old, Mapping) or _other_method(here, old, value):
            merged[key] = value
        elif here == "budget" and any(unit in value for unit in UNITS):
            merged[key] = {k: v for k, v in old.items() if k not in UNITS} | dict(value)
        else:
            merged[key] = _merge(old, value, (*path, key))
    return merged


def _other_method(here: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return here == "search" and "method" in new and new["method"] != old.get("method")


def _parse(path: Path, origin: str, wrong: list[str]) -> tuple[dict[str, Any], Places]:
    try:
        data, found, bad = parse(path)
    except Unreadable as error:
        raise RecipeError(f"{path}: {error}") from error
    if not isinstance(data, Mapping):
        raise RecipeError(f"{path}: expected keys such as budget, target and search; got {plain(data)}")
    of = f" of {path}" if str(path) != origin else ""
    wrong += [f"{dotted(key)} (line {line}, column {column}){of}: {text}" for key, (line, column), text in bad]
    return dict(data), Places({key: (str(path), *place) for key, place in found.items()})


class Unknown(RecipeError):
    """No recipe of that name."""


def _find(source: str | Path, folder: Path) -> Path:
    name, known = str(source), packaged()
    try:
        for path in (folder / source, Path(source)):
            if path.is_file():
                return path
            if path.is_dir() and name not in known:
                raise Unknown(
                    f"{path}: expected the path of a YAML file or one of the packaged recipes; it is a folder"
                )
    except (OSError, ValueError) as error:  # too long a name
        if isinstance(error, Unknown):
            raise
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    raise Unknown(
        f"{dotted((name,))}: expected the path of a YAML file or one of the packaged recipes "
        f"({', '.join(known) or 'none'})" + (f". Did you mean {near[0]}?" if near else "")
    )


def _explain(error: Any, data: Mapping[str, Any], places: Places, origin: str) -> list[str]:
    """A line for each thing: where, what was expected, what came, what to do."""
    path, kind, text = tuple(error["loc"]), error["type"], error["msg"].removeprefix("Value error, ")
    clash = error.get("ctx", {}).get("error")
    if isinstance(clash, Clash):
        return [f"{_where((sections[0],), places, origin)}: {text}" for sections, text in clash.found]
    if path and path[-1] == "[key]":
        path = path[:-1]
    while len(path) > 1 and tuple(map(str, path)) not in places and not _holds(_at(data, path[:-1])):
        path = path[:-1]  # pydantic adds the branch of a union that it tried
    where = _where(path, places, origin)
    if kind == "extra_forbidden":
        known = _fields(path[:-1], data)
        hint = _elsewhere(path, known, data) or _nearest(path[-1], known)
        return [f"{where}: expected one of {', '.join(known)}; got {shown(path[-1])}.{hint}"]
    if kind == "missing":
        return [f"{where}: required, and missing"]
    got = shown(error["input"])
    if kind == "literal_error":
        known = [word.strip(" '") for word in error["ctx"]["expected"].replace(" or ", ", ").split(",")]
        return [f"{where}: expected one of {', '.join(known)}; got {got}.{_nearest(error['input'], known)}"]
    if kind == "value_error":
        return [f"{where}: {text}"]
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        known = _fields(path, data)
        return [f"{where}: expected settings{', some of ' * bool(known)}{', '.join(known)}; got {got}"]
    if kind in ("tuple_type", "list_type"):
        return [f"{where}: expected a list; got {got}"]
    return [f"{where}: {text[0].lower()}{text[1:]}; got {got}"]


def _where(path: tuple[Any, ...], places: Places, origin: str) -> str:
    found = places.nearest(path)
    return (dotted(path) or "keys") + places.of(path) + (f" of {found[0]}" if found and found[0] != origin else "")


def _holds(value: Any) -> bool:
    return isinstance(value, (Mapping, list, tuple))


def _nearest(word: Any, known: list[str]) -> str:
    meant = SYNONYMS.get(str(word)[:80].lower())
    near = [meant] if meant in known else difflib.get_close_matches(str(word)[:80], known, n=1)
    return f" Did you mean {near[0]}?" if near else ""


def _elsewhere(path: tuple[Any, ...], known: list[str], data: Mapping[str, Any]) -> str:
    """The sections that have the key, below the one where it stands or else beside it."""
    *here, word = path
    for sections in ([(*here, key) for key in known], [(key,) for key in Recipe.model_fields]):
        if found := [dotted(s) for s in sections if s != tuple(here) and word in _keys(s, data)]:
            return f" It stands in {' and '.join(found)}."
    return ""


def _keys(path: tuple[Any, ...], data: Mapping[str, Any]) -> list[str]:
    """The keys of what may be a section, or a single setting."""
    model: Any = Recipe
    for key in path:
        field = getattr(model, "model_fields", {}).get(key)
        model = _model_in(field.annotation) if field else None
    try:
        return _fields(path, data) if model is not None else []
    except (LookupError, ValueError, TypeError, AttributeError):  # a search that is not there, or not known
        return []


def _at(data: Any, path: tuple[Any, ...], missing: Any = None) -> Any:
    for key in path:
        try:
            data = data[int(key) if isinstance(data, (list, tuple)) else key]
        except (KeyError, IndexError, TypeError, ValueError):
            return missing
    return data


def _fields(path: tuple[Any, ...], data: Mapping[str, Any]) -> list[str]:
    """The keys that a section may have."""
    if not path:
        return [*Recipe.model_fields, "extends"]
    model: Any = Recipe
    for key in path:
        if model is Recipe and key == "search":
            model = searches.config_class(data["search"].get("method", "magnitude"))
            continue
        model = _model_in(model.model_fields[key].annotation) if key in getattr(model, "model_fields", {}) else model
    return [field.alias or name for name, field in getattr(model, "model_fields", {}).items()]


def _model_in(annotation: Any) -> Any:
    """The section that an annotation such as `Finetune | None` or `dict[str, Bound]` holds."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, dict):
        return next((m for a in typing.get_args(annotation) if (m := _model_in(a)) is not None), None)
    return None
