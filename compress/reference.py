"""The reference of recipes, as Markdown, from the schema itself: python -m compress.reference > docs/recipe.md."""

from __future__ import annotations

import json
from typing import Any

from .recipe import Recipe
from .search import names, search_class

INTRODUCTION = """# Recipes, key by key

Written from the schema by `python -m compress.reference`; `compress recipes --schema` gives the same to editors. A key
that is left out has its default; `budget` has none and must be there, and the search is `magnitude` if none is named.
Lengths are `10`, `10 epochs` or `500 steps`; parts of a whole `0.5` or `50%`. `extends: NAME` starts from another
recipe, by name or path.
"""
HEAD = "| key | what it takes | default | |\n| --- | --- | --- | --- |"


def reference() -> str:
    """The whole page."""
    schema = Recipe.schema_for_editors()
    known = schema["$defs"]
    parts = [INTRODUCTION, "## Top level", "", _table(schema["properties"], known)]
    for name, field in schema["properties"].items():
        section = _section(field, known)
        if name != "search" and section is not None:
            parts += ["", f"## {name}", "", *_described(section, known)]
    ours = [name for name in names() if search_class(name).__module__.startswith("compress.")]
    methods = {name: known[f"search_{name}"] for name in ours}
    parts += ["", "## search", "", "One of these, by its `method`."]
    for name, config in methods.items():
        parts += ["", f"### method: {name}", "", *_described(config, known, skip=("method",))]
    return "\n".join(parts) + "\n"


def _described(section: dict[str, Any], known: dict[str, Any], skip: tuple[str, ...] = ()) -> list[str]:
    text = " ".join(section.get("description", "").split())
    fields = {key: value for key, value in section["properties"].items() if key not in skip}
    nested = {key: part for key, value in fields.items() if (part := _section(value, known)) is not None}
    lines = ([text, ""] if text else []) + [_table(fields, known)]
    for key, part in nested.items():
        if "properties" in part:
            lines += ["", f"`{key}` has", "", _table(part["properties"], known)]
    return lines


def _table(fields: dict[str, Any], known: dict[str, Any]) -> str:
    rows = [HEAD]
    for key, field in fields.items():
        default = field.get("default", "")
        shown = "" if default in ("", None) else f"`{json.dumps(default)}`"
        text = " ".join(field.get("description", "").split()).replace("|", "\\|")
        rows.append(f"| `{key}` | {_kind(field, known)} | {shown} | {text} |")
    return "\n".join(rows)


def _section(field: dict[str, Any], known: dict[str, Any]) -> dict[str, Any] | None:
    """The part of the schema that a field refers to, if it has keys of its own."""
    for option in [field, *field.get("anyOf", [])]:
        if "$ref" in option:
            found: dict[str, Any] = known[option["$ref"].rpartition("/")[2]]
            return found if "properties" in found else next(iter(_sections(found, known)), None)
    return None


def _sections(found: dict[str, Any], known: dict[str, Any]) -> list[dict[str, Any]]:
    return [option for option in found.get("anyOf", []) if "properties" in option]


def _kind(field: dict[str, Any], known: dict[str, Any]) -> str:
    """What a field takes, in a few words."""
    if "const" in field:
        return f"`{json.dumps(field['const']).strip(chr(34))}`"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return "a method and its settings" if name.startswith("search_") else _named(name, known[name])
    if "anyOf" in field:
        kinds = [_kind(option, known) for option in field["anyOf"] if option.get("type") != "null"]
        numbers = any(kind.startswith(("a number", "an integer")) for kind in kinds)  # text is a number as YAML has it
        return " or ".join(dict.fromkeys(kind for kind in kinds if not numbers or kind != "text"))
    if field.get("type") == "array":
        return f"a list of {_kind(field.get('items', {}), known)}"
    if "examples" in field:
        return f"`{field['examples'][0]}`"
    least = f" >= {field['minimum']}" if "minimum" in field else ""
    words = {"boolean": "`true`, `false`", "integer": "an integer", "number": "a number", "string": "text"}
    return words.get(field.get("type", ""), "a mapping") + least


def _named(name: str, found: dict[str, Any]) -> str:
    return "a length" if name == "Length" else "a section" if "properties" in found else "text or a section"


if __name__ == "__main__":
    print(reference(), end="")
