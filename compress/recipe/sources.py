"""Find recipe files, packaged or by path, and merge a recipe with those that it extends."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from compress.errors import RecipeError

from .budget_section import BUDGET_UNITS
from .messages import describe_kind, did_you_mean, dotted_key, short_repr
from .yaml_file import Key, Position, UnreadableYaml, parse_yaml

MAX_EXTENDS = 32  # recipes in a chain
Source = str | Path | Mapping[str, Any]


class Place(NamedTuple):
    """File and position of a key."""

    file: str
    position: Position


@dataclass
class RecipeData:
    """Data of a recipe merged with all that it extends, before validation."""

    values: dict[str, Any]
    origin: str  # the file's path, or "recipe" for a dict
    places: dict[Key, Place] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # keys that cannot be used

    def describe(self, key: tuple[Any, ...]) -> str:
        """Return the name of a key, its position, and its file if it is in a recipe that was extended."""
        place = self.nearest_place(key)
        file = f" of {place.file}" if place and place.file != self.origin else ""
        return (dotted_key(key) or "keys") + (f" ({place.position})" if place else "") + file

    def nearest_place(self, key: tuple[Any, ...]) -> Place | None:
        """Return the place of a key, or else of the section that it should be in."""
        names = tuple(map(str, key))
        ends = range(len(names), -1, -1)
        return next((self.places[names[:end]] for end in ends if names[:end] in self.places), None)


def packaged_recipes() -> dict[str, Path]:
    """Return the files of the packaged recipes by name."""
    folder = Path(str(resources.files("compress.recipes")))
    return {path.stem: path for path in sorted(folder.rglob("*.yaml"))}


def gather(source: Source) -> RecipeData:
    """Load a recipe's data and merge it with all that it extends.

    Raises:
        RecipeError: no such recipe, a file cannot be read, a recipe extends itself, or the chain is too long.
    """
    return _gather(source, ())


def _gather(source: Source, extended_by: tuple[str, ...]) -> RecipeData:
    """Load and merge; `extended_by` are the files that led here, the outermost first."""
    if isinstance(source, Mapping):
        data = RecipeData(dict(source), "recipe")
    else:
        path = _find(source, Path(extended_by[-1]).parent if extended_by else Path())
        if path.resolve() in [Path(file).resolve() for file in extended_by]:
            chain = " -> ".join([*extended_by[1:], str(path)])
            raise RecipeError(f"{extended_by[0]}: extends itself through {chain}")
        if len(extended_by) >= MAX_EXTENDS:
            chain = " -> ".join([*extended_by[:3], "..."])
            raise RecipeError(f"{chain}: expected at most {MAX_EXTENDS} recipes that extend each other; got more")
        data = _load_file(path, is_extended=bool(extended_by))
    if isinstance(data.values.get("search"), str):  # so that a recipe that extends this one can change settings
        data.values["search"] = {"method": data.values["search"]}
    base_name = data.values.pop("extends", None)
    if base_name is None:
        return data
    where = f"{data.origin}: {data.describe(('extends',))}: "
    if not isinstance(base_name, str):
        raise RecipeError(f"{where}expected a recipe's name or path; got {short_repr(base_name)}")
    try:
        base = _gather(base_name, (*extended_by, data.origin))
    except UnknownRecipe as error:
        raise RecipeError(f"{where}{error}") from None
    # A key that a dict overrides has no place: it is not in the file of the recipe that the dict extends.
    inherited = {
        key: place for key, place in base.places.items() if key and (data.places or not contains(data.values, key))
    }
    return RecipeData(
        _merge(base.values, data.values), data.origin, {**inherited, **data.places}, [*data.problems, *base.problems]
    )


class UnknownRecipe(RecipeError):
    """No recipe has that name."""


def _find(source: str | Path, folder: Path) -> Path:
    """Return the file of a recipe: by its packaged name, or a path relative to `folder` or the current directory."""
    name, packaged = str(source), packaged_recipes()
    if name in packaged:  # first, because a file of that name may lie in a directory that somebody else wrote
        return packaged[name]
    try:
        for path in (folder / source, Path(source)):
            if path.is_file():
                return path
            if path.is_dir():
                raise UnknownRecipe(
                    f"{path}: expected the path of a YAML file or one of the packaged recipes; got a folder"
                )
    except (OSError, ValueError) as error:  # the name is too long for a path
        if isinstance(error, UnknownRecipe):
            raise
    hint = did_you_mean(name, list(packaged))
    if re.fullmatch(r"-?[\d.]+\s*[a-zA-Z%]*", name):
        hint = ' For a budget alone, write what is left, as "50%" of the MACs, or a dict: {"budget": {"macs": "20M"}}'
    raise UnknownRecipe(
        f"{dotted_key((name,))}: expected the path of a YAML file or one of the packaged recipes "
        f'({", ".join(packaged) or "none"}), or a budget such as "50%"' + (f".{hint}" if hint else "")
    )


def _load_file(path: Path, is_extended: bool) -> RecipeData:
    try:
        document = parse_yaml(path)
    except UnreadableYaml as error:
        raise RecipeError(f"{path}: {error}") from error
    if not isinstance(document.data, Mapping):
        raise RecipeError(
            f"{path}: expected keys such as budget, target and search; got {describe_kind(document.data)}"
        )
    file = f" of {path}" if is_extended else ""
    return RecipeData(
        dict(document.data),
        str(path),
        {key: Place(str(path), position) for key, position in document.positions.items()},
        [f"{dotted_key(key)} ({position}){file}: {text}" for key, position, text in document.problems],
    )


def _merge(base: Mapping[str, Any], override: Mapping[str, Any], path: Key = ()) -> dict[str, Any]:
    """Merge section by section and key by key; another budget unit or search method replaces that of the base."""
    merged = dict(base)
    for key, value in override.items():
        inherited: Any = merged.get(key)
        name = ".".join(map(str, (*path, key)))
        are_sections = isinstance(value, Mapping) and isinstance(inherited, Mapping)
        if not are_sections or _is_other_method(name, value, inherited):
            merged[key] = value
        elif name == "budget" and any(unit in value for unit in BUDGET_UNITS):
            merged[key] = {k: v for k, v in inherited.items() if k not in BUDGET_UNITS} | dict(value)
        else:
            merged[key] = _merge(inherited, value, (*path, key))
    return merged


def _is_other_method(section: str, override: Mapping[str, Any], base: Mapping[str, Any]) -> bool:
    return section == "search" and "method" in override and override["method"] != base.get("method")


def contains(data: Any, path: tuple[Any, ...]) -> bool:
    """Return whether nested data has a value at this path."""
    return value_at(data, path, _MISSING) is not _MISSING


def value_at(data: Any, path: tuple[Any, ...], default: Any = None) -> Any:
    """Return the value at a path in nested data, or the default."""
    for key in path:
        try:
            data = data[int(key) if isinstance(data, (list, tuple)) else key]
        except (KeyError, IndexError, TypeError, ValueError):
            return default
    return data


_MISSING = object()
