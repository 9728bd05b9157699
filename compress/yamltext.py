"""From the text of a YAML file to plain data, where each key of it stands, and what is wrong with its form.

A file is read as one of a bounded size, depth and number of values, aliases counted as what they stand for: what a few
lines of aliases of aliases spell out fits no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

Key = tuple[str, ...]  # items of lists by their number, as text
LARGEST, DEEPEST, MOST = 1 << 18, 32, 20_000  # bytes, levels, values
TEXT, MERGE = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"


class Unreadable(ValueError):
    """A file that is no YAML; the message says where and why."""


def parse(path: Path) -> tuple[Any, dict[Key, tuple[int, int]], list[tuple[Key, tuple[int, int], str]]]:
    """The data, line and column of every key and item, and keys that are wrong: which, where and why.

    Raises:
        Unreadable: it cannot be read.
    """
    try:
        size = path.stat().st_size
        raw = path.read_bytes() if size <= LARGEST else b""
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror or error}") from error
    if size > LARGEST:
        raise Unreadable(f"expected a recipe of at most {LARGEST >> 10} kB; got {size} bytes")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = _place(raw[: error.start].decode("utf-8", "replace"), error.start)
        raise Unreadable(f"not YAML: {where}: expected text in UTF-8; got the byte 0x{raw[error.start]:02x}") from error
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        places: dict[Key, tuple[int, int]] = {}
        wrong = list(_walk(node, (), places))
        return loader.construct_document(node) if node is not None else None, places, wrong
    except yaml.reader.ReaderError as error:
        raise Unreadable(f"not YAML: {_place(text, error.position)}: expected text; got {_character(error)}") from error
    except yaml.MarkedYAMLError as error:
        raise Unreadable(f"not YAML: {_said(error)}") from error


class _Loader(yaml.SafeLoader):
    """Plain values only; whatever is wrong with one has its place."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = self.count = 0
        self.sizes: dict[int, int] = {}  # of nodes that are complete

    def compose_node(self, parent: Any, index: Any) -> Any:
        before, alias = self.count, self.check_event(yaml.AliasEvent)
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        self.depth, self.count = self.depth + 1, self.count + 1
        if self.depth > DEEPEST:
            raise yaml.MarkedYAMLError(problem=f"expected at most {DEEPEST} levels; got more", problem_mark=mark)
        node = super().compose_node(parent, index)
        if alias and id(node) not in self.sizes:
            raise yaml.MarkedYAMLError(problem="got an alias of what it is a part of", problem_mark=mark)
        self.count += self.sizes[id(node)] if alias else 0
        if self.count > MOST:
            raise yaml.MarkedYAMLError(problem=f"expected at most {MOST} values; got more", problem_mark=mark)
        self.depth, self.sizes[id(node)] = self.depth - 1, self.count - before
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError) as error:
            kind = str(node.tag).rpartition(":")[2]
            raise yaml.MarkedYAMLError(
                problem=f"expected {kind}; got {shown(node.value)}", problem_mark=node.start_mark
            ) from error


def shown(value: Any) -> str:
    """A value as a message has it: one line, and not too long."""
    try:
        text = repr(value)
    except Exception:  # such as an integer of more digits than Python prints
        text = f"something of type {type(value).__name__} that cannot be printed"
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text)} characters)"


def dotted(key: tuple[Any, ...]) -> str:
    """The name of a place; what cannot be printed is quoted.

    >>> dotted(("target", "bounds", "0", ""))
    "target.bounds.0.''"
    """
    return ".".join(str(part) if 0 < len(str(part)) <= 80 and str(part).isprintable() else shown(part) for part in key)


def _walk(node: Any, path: Key, places: dict[Key, tuple[int, int]]) -> Iterator[tuple[Key, tuple[int, int], str]]:
    """Note where things stand; keys that are no text count as if they had been quoted."""
    places.setdefault(path, _at(node) if node is not None else (1, 1))
    if isinstance(node, yaml.MappingNode):
        first: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # an error of its own
            here, name = (*path, key.value), key.value
            if name in first:
                yield here, _at(key), f"is given twice, first in line {first[name]}"
            elif key.tag not in (TEXT, MERGE):
                yield here, _at(key), f'expected text as a key; got {name}. Did you mean "{name}"?'
                key.tag = TEXT
            first.setdefault(name, key.start_mark.line + 1)
            places[here] = _at(key)
            yield from _walk(value, here, places)
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            yield from _walk(value, (*path, str(i)), places)


def _at(node: Any) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1


def _place(text: str, position: int) -> str:
    before = text[:position]
    return f"line {before.count(chr(10)) + 1}, column {len(before) - before.rfind(chr(10))}"


def _said(error: yaml.MarkedYAMLError) -> str:
    """The parser's complaint on one line."""
    mark = error.problem_mark or error.context_mark
    place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "line 1, column 1"
    said = f"{place}: {error.problem or error.context}"
    if error.problem and error.context:
        from_ = error.context_mark
        said += f" ({error.context}" + (f" that begins in line {from_.line + 1})" if from_ else ")")
    return said + (". Indent with spaces, not with tabs" if "'\\t'" in said else "")


def plain(data: Any) -> str:
    """What a file holds, in a word.

    >>> plain(None), plain([1]), plain("a")
    ('nothing', 'a list', 'text')
    """
    words = {type(None): "nothing", list: "a list", str: "text", bool: "true or false"}
    number = isinstance(data, (int, float)) and not isinstance(data, bool)
    return "keys" if isinstance(data, Mapping) else "a number" if number else words.get(type(data), type(data).__name__)


def _character(error: yaml.reader.ReaderError) -> str:
    found = error.character
    return repr(chr(found) if isinstance(found, int) else found)
