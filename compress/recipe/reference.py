"""Write the reference page of recipes from the schema: python -m compress.recipe.reference > docs/recipe.md."""

from __future__ import annotations

import json
from typing import Any

from .schema import Recipe
from .search_config import config_class, search_names

JsonSchema = dict[str, Any]

INTRODUCTION = """# Recipes, key by key

Generated from the schema by `python -m compress.recipe.reference`; `compress recipes --schema` prints the same as a
JSON schema for editors. A key that is left out has its default. `budget` has no default and is required; the default
search is `magnitude`. Lengths are written `10`, `10 epochs` or `500 steps`, fractions `0.5` or `50%`. `extends: NAME`
starts from another recipe, by name or path.
"""
TABLE_HEAD = "| key | value | default | |\n| --- | --- | --- | --- |"
TYPE_NAMES = {"boolean": "`true`, `false`", "integer": "an integer", "number": "a number", "string": "text"}


def reference_page() -> str:
    """Return the page as Markdown."""
    own_searches = [name for name in search_names() if config_class(name).__module__.startswith("compress.")]
    schema = Recipe.schema_for_editors(own_searches)
    definitions = schema["$defs"]
    lines = [INTRODUCTION, "## Top level", "", _table(schema["properties"], definitions)]
    for name, field in schema["properties"].items():
        section = _section_of(field, definitions)
        if name != "search" and section is not None:
            lines += ["", f"## {name}", "", *_section_lines(section, definitions)]
    lines += ["", "## search", "", "One of these, by its `method`."]
    for name in own_searches:
        settings = _section_lines(definitions[f"search_{name}"], definitions, skip=("method",))
        lines += ["", f"### method: {name}", "", *settings]
    return "\n".join(lines) + "\n"


def _section_lines(section: JsonSchema, definitions: JsonSchema, skip: tuple[str, ...] = ()) -> list[str]:
    """Return a section's description, the table of its keys, and a table for each section inside it."""
    text = " ".join(section.get("description", "").split())
    fields = {key: field for key, field in section["properties"].items() if key not in skip}
    lines = ([text, ""] if text else []) + [_table(fields, definitions)]
    for key, field in fields.items():
        nested = _section_of(field, definitions)
        if nested is not None and "properties" in nested:
            lines += ["", f"`{key}` has", "", _table(nested["properties"], definitions)]
    return lines


def _table(fields: JsonSchema, definitions: JsonSchema) -> str:
    rows = [TABLE_HEAD]
    for key, field in fields.items():
        default = field.get("default", "")
        shown_default = "" if default in ("", None) else f"`{json.dumps(default)}`"
        text = " ".join(field.get("description", "").split()).replace("|", "\\|")
        rows.append(f"| `{key}` | {_value_kind(field, definitions)} | {shown_default} | {text} |")
    return "\n".join(rows)


def _section_of(field: JsonSchema, definitions: JsonSchema) -> JsonSchema | None:
    """Return the definition that a field refers to, if it has keys."""
    for option in [field, *field.get("anyOf", [])]:
        if "$ref" in option:
            definition: JsonSchema = definitions[_definition_name(option)]
            options = definition.get("anyOf", [])
            return next((part for part in [definition, *options] if "properties" in part), None)
    return None


def _value_kind(field: JsonSchema, definitions: JsonSchema) -> str:
    """Describe the values that a field accepts."""
    if "const" in field:
        return f"`{json.dumps(field['const']).strip(chr(34))}`"
    if "enum" in field:
        return ", ".join(f"`{json.dumps(value).strip(chr(34))}`" for value in field["enum"])
    if "$ref" in field:
        name = _definition_name(field)
        if name.startswith("search_"):
            return "a method and its settings"
        return (
            "a length"
            if name == "Length"
            else "a section"
            if "properties" in definitions[name]
            else "text or a section"
        )
    if "anyOf" in field:
        kinds = [_value_kind(option, definitions) for option in field["anyOf"] if option.get("type") != "null"]
        # A number may be written as text, because YAML reads `1e-4` as text; only the number is listed.
        is_number = any(kind.startswith(("a number", "an integer")) for kind in kinds)
        return " or ".join(dict.fromkeys(kind for kind in kinds if not is_number or kind != "text"))
    if field.get("type") == "array":
        return f"a list of {_value_kind(field.get('items', {}), definitions)}"
    if "examples" in field:
        return f"`{field['examples'][0]}`"
    minimum = f" >= {field['minimum']}" if "minimum" in field else ""
    return TYPE_NAMES.get(field.get("type", ""), "a mapping") + minimum


def _definition_name(field: JsonSchema) -> str:
    name: str = field["$ref"].rpartition("/")[2]
    return name


if __name__ == "__main__":
    print(reference_page(), end="")
