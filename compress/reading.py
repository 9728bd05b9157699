"""From YAML or a dict to a recipe; everything that is wrong is said at once, with file, line and column."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from . import search as searches
from .recipe import UNITS, Recipe

Key = tuple[Any, ...]


class RecipeError(ValueError):
    """A recipe that cannot be used; the message names every place that is wrong."""


class Places(dict[Key, tuple[str, int, int]]):
    """Key -> file, line, column."""

    def of(self, key: Key) -> str:
        found = self.get(key) or self.get(key[:-1])
        return f" (line {found[1]}, column {found[2]})" if found else ""


def read(source: str | Path | Mapping[str, Any]) -> Recipe:
    """
    Raises:
        RecipeError: no such recipe, or all that is wrong in it.
    """
    if not isinstance(source, (str, Path, Mapping)):
        raise RecipeError(f"recipe: expected a name, a path, a dict or a Recipe; got {type(source).__name__}")
    data, places, origin = _gather(source, ())
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        lines = [_explain(e, data, places, origin) for e in error.errors()]
        raise RecipeError(
            f"{origin}: {len(lines)} thing{'s' * (len(lines) > 1)} to mend\n  " + "\n  ".join(lines)
        ) from None


def packaged() -> dict[str, Path]:
    """The recipes that come with the library, by name."""
    folder = Path(str(resources.files("compress.recipes")))
    return {path.stem: path for path in sorted(folder.rglob("*.yaml"))}


def _gather(source: str | Path | Mapping[str, Any], before: tuple[str, ...]) -> tuple[dict[str, Any], Places, str]:
    """The data with all that it extends, where each key stands, and the name of the whole."""
    if isinstance(source, Mapping):
        data, places, origin, folder = dict(source), Places(), "recipe", Path()
    else:
        path = _find(source, Path(before[-1]).parent if before else Path())
        origin, folder = str(path), path.parent
        if path.resolve() in [Path(b).resolve() for b in before]:
            raise RecipeError(f"{before[0]}: extends itself, by way of {' -> '.join([*before[1:], origin])}")
        data, places = _parse(path)
    base = data.pop("extends", None)
    if base is None:
        return data, places, origin
    if not isinstance(base, str):
        raise RecipeError(f"{origin}: extends{places.of(('extends',))}: expected a recipe's name or path; got {base!r}")
    here = (*before, origin if origin != "recipe" else str(folder / "recipe"))
    below, its_places, _ = _gather(base, here)
    theirs = {key: place for key, place in its_places.items() if key and (places or _at(data, key) is None)}
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


def _parse(path: Path) -> tuple[dict[str, Any], Places]:
    try:
        text = path.read_text()
        data = yaml.safe_load(text)
        found = list(_places(yaml.compose(text)))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise RecipeError(f"{path}: not YAML: {error}") from error
    keys = [key for key, _ in found]
    for key, (line, column) in found:
        if key and keys.count(key) > 2:  # once as a key and once as its value
            raise RecipeError(f"{path}: {'.'.join(map(str, key))} (line {line}, column {column}) is given twice")
    if not isinstance(data, Mapping):
        raise RecipeError(f"{path}: expected keys such as budget, target and search; got {type(data).__name__}")
    return dict(data), Places({key: (str(path), *place) for key, place in found})


def _find(source: str | Path, folder: Path) -> Path:
    for path in (folder / source, Path(source)):
        if path.is_file():
            return path
    name, known = str(source), packaged()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    raise RecipeError(
        f"{name}: expected the path of a YAML file or one of the packaged recipes ({', '.join(known) or 'none'})"
        + (f". Did you mean {near[0]}?" if near else "")
    )


def _places(node: Any, path: Key = ()) -> Iterator[tuple[Key, tuple[int, int]]]:
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


def _explain(error: Any, data: Mapping[str, Any], places: Places, origin: str) -> str:
    """One line: where, what was expected, what came, what to do."""
    path, kind, text = tuple(error["loc"]), error["type"], error["msg"].removeprefix("Value error, ")
    if not path and ": " in text:  # sections that do not go together: the text begins with the one to mend
        section, _, text = text.partition(": ")
        path = (section,)
    while (
        path and path not in places and len(path) > 1 and not isinstance(_at(data, path[:-1]), (Mapping, list, tuple))
    ):
        path = path[:-1]  # pydantic adds the branch of a union that it tried
    where = ".".join(map(str, path)) + places.of(path)
    other = places.get(path, places.get(path[:-1], (origin,)))[0]
    where += f" of {other}" if other != origin else ""
    if kind == "extra_forbidden":
        known = _fields(path[:-1], data)
        return f"{where}: expected one of {', '.join(known)}; got {path[-1]!r}.{_nearest(path[-1], known)}"
    if kind == "missing":
        return f"{where}: required, and missing"
    if kind == "literal_error":
        known = [word.strip(" '") for word in error["ctx"]["expected"].replace(" or ", ", ").split(",")]
        return f"{where}: expected one of {', '.join(known)}; got {error['input']!r}.{_nearest(error['input'], known)}"
    if kind == "value_error":
        return f"{where}: {text}"
    return f"{where}: {text[0].lower()}{text[1:]}; got {error['input']!r}"


def _nearest(word: Any, known: list[str]) -> str:
    near = difflib.get_close_matches(str(word), known, n=1)
    return f" Did you mean {near[0]}?" if near else ""


def _at(data: Any, path: Key) -> Any:
    for key in path:
        try:
            data = data[key]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def _fields(path: Key, data: Mapping[str, Any]) -> list[str]:
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
