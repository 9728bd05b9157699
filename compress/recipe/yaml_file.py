"""Parse a YAML file into plain data, with the position of every key and the problems of its form.

Size, depth and number of values are limited; an alias counts as all the values that it stands for, because a few lines
of aliases of aliases can expand to more than fits into memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from .messages import short_repr

Key = tuple[str, ...]  # full name of a key; an item of a list is named by its index, as text
MAX_BYTES = 1 << 18
MAX_DEPTH = 32
MAX_VALUES = 20_000
TEXT_TAG, MERGE_TAG = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"


class UnreadableYaml(ValueError):
    """The file is not YAML. The message gives the position and the reason."""


class Position(NamedTuple):
    """Position in a text, counted from 1."""

    line: int
    column: int

    def __str__(self) -> str:
        return f"line {self.line}, column {self.column}"


class KeyProblem(NamedTuple):
    """A key that cannot be used."""

    key: Key
    position: Position
    text: str


@dataclass(frozen=True)
class YamlDocument:
    """Data of a YAML file, the position of every key and item, and the keys that cannot be used."""

    data: Any
    positions: dict[Key, Position]
    problems: list[KeyProblem]


def parse_yaml(path: Path) -> YamlDocument:
    """Parse a YAML file.

    Raises:
        UnreadableYaml: the file cannot be read, is too large or is not YAML.
    """
    try:
        size = path.stat().st_size
        raw = path.read_bytes() if size <= MAX_BYTES else b""
    except OSError as error:
        raise UnreadableYaml(f"cannot be read: {error.strerror or error}") from error
    if size > MAX_BYTES:
        raise UnreadableYaml(f"expected a recipe of at most {MAX_BYTES >> 10} kB; got {size} bytes")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        position = _position_at(raw[: error.start].decode("utf-8", "replace"), error.start)
        raise UnreadableYaml(
            f"not YAML: {position}: expected text in UTF-8; got the byte 0x{raw[error.start]:02x}"
        ) from error
    try:
        loader = _BoundedLoader(text)
        root = loader.get_single_node()
        positions: dict[Key, Position] = {}
        problems = list(_check_keys(root, (), positions))
        return YamlDocument(loader.construct_document(root) if root is not None else None, positions, problems)
    except yaml.reader.ReaderError as error:
        raise UnreadableYaml(
            f"not YAML: {_position_at(text, error.position)}: expected text; got {_character(error)}"
        ) from error
    except yaml.MarkedYAMLError as error:
        raise UnreadableYaml(f"not YAML: {_format_yaml_error(error)}") from error


class _BoundedLoader(yaml.SafeLoader):
    """Loader of plain values with limits; every error has a position."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = self.count = 0
        self.sizes: dict[int, int] = {}  # values below each node that is complete

    def compose_node(self, parent: Any, index: Any) -> Any:
        count_before, is_alias = self.count, self.check_event(yaml.AliasEvent)
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        self.depth, self.count = self.depth + 1, self.count + 1
        if self.depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"expected at most {MAX_DEPTH} levels; got more", problem_mark=mark)
        node = super().compose_node(parent, index)
        if is_alias and id(node) not in self.sizes:
            raise yaml.MarkedYAMLError(problem="got an alias of a value that contains it", problem_mark=mark)
        self.count += self.sizes[id(node)] if is_alias else 0
        if self.count > MAX_VALUES:
            raise yaml.MarkedYAMLError(problem=f"expected at most {MAX_VALUES} values; got more", problem_mark=mark)
        self.depth, self.sizes[id(node)] = self.depth - 1, self.count - count_before
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError) as error:
            kind = str(node.tag).rpartition(":")[2]
            raise yaml.MarkedYAMLError(
                problem=f"expected {kind}; got {short_repr(node.value)}", problem_mark=node.start_mark
            ) from error


def _check_keys(node: Any, path: Key, positions: dict[Key, Position]) -> Iterator[KeyProblem]:
    """Record the position of every key; yield keys that are repeated or not text (read as if they were quoted)."""
    positions.setdefault(path, _position_of(node) if node is not None else Position(1, 1))
    if isinstance(node, yaml.MappingNode):
        first_lines: dict[str, int] = {}
        for key_node, value in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue  # the constructor reports it
            name = key_node.value
            key = (*path, name)
            if name in first_lines:
                yield KeyProblem(
                    key, _position_of(key_node), f"appears twice; the first one is in line {first_lines[name]}"
                )
            elif key_node.tag not in (TEXT_TAG, MERGE_TAG):
                text = f'expected text as a key; got {name}. Did you mean "{name}"?'
                yield KeyProblem(key, _position_of(key_node), text)
                key_node.tag = TEXT_TAG
            first_lines.setdefault(name, key_node.start_mark.line + 1)
            positions[key] = _position_of(key_node)
            yield from _check_keys(value, key, positions)
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            yield from _check_keys(value, (*path, str(i)), positions)


def _position_of(node: Any) -> Position:
    return Position(node.start_mark.line + 1, node.start_mark.column + 1)


def _position_at(text: str, offset: int) -> Position:
    before = text[:offset]
    return Position(before.count("\n") + 1, len(before) - before.rfind("\n"))


def _format_yaml_error(error: yaml.MarkedYAMLError) -> str:
    """Return the parser's message on one line."""
    mark = error.problem_mark or error.context_mark
    position = Position(mark.line + 1, mark.column + 1) if mark else Position(1, 1)
    message = f"{position}: {error.problem or error.context}"
    if error.problem and error.context:
        start = error.context_mark
        message += f" ({error.context}" + (f" that begins in line {start.line + 1})" if start else ")")
    return message + (". Indent with spaces, not with tabs" if "'\\t'" in message else "")


def _character(error: yaml.reader.ReaderError) -> str:
    """Return the repr of the character that YAML does not allow."""
    character = error.character
    return repr(chr(character) if isinstance(character, int) else character)
