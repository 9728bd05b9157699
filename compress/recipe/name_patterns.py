"""Patterns of module names in a recipe: full names, or `re:` and a regular expression, matched in bounded time.

Python's `re` tries one way after the other to match an expression. If repeats are nested, as in `(\\w*\\.?)*!`, the
number of ways grows exponentially with the length of the name. Such expressions are matched here by sets of positions:

    ends(e, start) = the positions at which a match of e that begins at `start` can end
    ends(e f, start) = the union of ends(f, p) over p in ends(e, start)

They are computed once for each part and position, so the time is a polynomial of the lengths of expression and name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

try:
    from re import _constants as opcodes  # type: ignore[attr-defined]
    from re import _parser as parser  # type: ignore[attr-defined]
except ImportError:  # Python 3.10
    import sre_constants as opcodes
    import sre_parse as parser

from .messages import short_repr

PREFIX = "re:"
MAX_WAYS = 10**5  # that `re` may try
MAX_NAME = 100  # characters of a name, about
MAX_DEPTH = 50  # of parentheses in expressions that are matched by sets of positions
REPEATS = (opcodes.MAX_REPEAT, opcodes.MIN_REPEAT)
POSSESSIVE_REPEAT = getattr(opcodes, "POSSESSIVE_REPEAT", None)  # since Python 3.11
CHARACTERS = (opcodes.LITERAL, opcodes.NOT_LITERAL, opcodes.ANY, opcodes.IN)
SUPPORTED = (*REPEATS, *CHARACTERS, opcodes.BRANCH, opcodes.SUBPATTERN, opcodes.AT, opcodes.ASSERT, opcodes.ASSERT_NOT)
CATEGORIES = {
    opcodes.CATEGORY_DIGIT: r"\d",
    opcodes.CATEGORY_NOT_DIGIT: r"\D",
    opcodes.CATEGORY_SPACE: r"\s",
    opcodes.CATEGORY_NOT_SPACE: r"\S",
    opcodes.CATEGORY_WORD: r"\w",
    opcodes.CATEGORY_NOT_WORD: r"\W",
}

Ends = frozenset[int]


class NamePattern:
    """A full name, or `re:` and a regular expression for the whole name.

    >>> NamePattern(r"re:(\\w*\\.?)*!").matches("layer4.2.downsample.0.running_mean.of.a.norm")
    False

    Raises:
        ValueError: this is not a regular expression, or its matching cannot be bounded.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        if not text.startswith(PREFIX):
            text = PREFIX + re.escape(text)
        try:
            self._expression = re.compile(text.removeprefix(PREFIX))
            self._tree = parser.parse(text.removeprefix(PREFIX))
            self._is_fast = _ways(self._tree) <= MAX_WAYS
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{short_repr(self.text)} is not a regular expression: {error}") from error
        if not self._is_fast and (problem := _problem(self._tree)):
            raise ValueError(
                f"{short_repr(self.text)} may take forever to match: expected an expression without nested repeats, or "
                f"one without {problem}. Simplify it, or list the names"
            )

    def matches(self, name: str) -> bool:
        """Return whether the pattern matches the whole name."""
        if self._is_fast:
            return self._expression.fullmatch(name) is not None
        return len(name) in _SetMatcher(name).sequence_ends(self._tree, 0, self._expression.flags)


def _ways(tree: Any, inside_repeat: bool = False) -> float:
    """Return a bound of the ways in which `re` may try to match a name; infinite if it grows exponentially."""
    ways = 1.0
    for op, value in tree:
        parts = list(_parts(op, value))
        if op is opcodes.BRANCH:
            ways *= float("inf") if inside_repeat else len(parts)
        repeats_part = inside_repeat
        if op in (*REPEATS, POSSESSIVE_REPEAT):
            low, high = value[0], int(value[1])
            if low != high:
                ways *= float("inf") if inside_repeat else min(high - low + 1, MAX_NAME)
            repeats_part = inside_repeat or high > 1
        for part in parts:
            ways *= _ways(part, repeats_part)
    return ways


def _parts(op: Any, value: Any) -> Iterator[Any]:
    """Yield the expressions inside a node of the syntax tree."""
    if op in CHARACTERS:
        return
    for item in value if isinstance(value, (tuple, list)) else [value]:
        for part in item if isinstance(item, list) else [item]:
            if isinstance(part, parser.SubPattern):
                yield part


def _problem(tree: Any, depth: int = 0) -> str:
    """Return what the expression uses that sets of positions do not support; empty if nothing."""
    if depth > MAX_DEPTH:
        return f"more than {MAX_DEPTH} nested parentheses"
    for op, value in tree:
        if op in (opcodes.GROUPREF, opcodes.GROUPREF_EXISTS):
            return "references to groups"
        if op in (opcodes.ASSERT, opcodes.ASSERT_NOT) and value[0] < 0:
            return "looking behind"
        if op not in SUPPORTED:
            return f"{str(op).lower().replace('_', ' ')}s"
        for part in _parts(op, value):
            if problem := _problem(part, depth + 1):
                return problem
    return ""


class _SetMatcher:
    """Positions of one name at which parts of an expression can end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.known: dict[tuple[int, int, int], Ends] = {}  # (id of a node, start, flags) -> ends

    def sequence_ends(self, tree: Any, start: int, flags: int) -> Ends:
        """Return the ends of matches of a sequence of nodes."""
        positions: Ends = frozenset([start])
        for node in tree:
            positions = frozenset[int]().union(*(self.node_ends(node, p, flags) for p in positions))
        return positions

    def node_ends(self, node: Any, start: int, flags: int) -> Ends:
        """Return the ends of matches of one node."""
        key = (id(node), start, flags)
        if key not in self.known:
            op, value = node
            self.known[key] = self._find_ends(op, value, start, flags)
        return self.known[key]

    def _find_ends(self, op: Any, value: Any, start: int, flags: int) -> Ends:
        if op in CHARACTERS:
            fits = start < len(self.name) and _fits(op, value, self.name[start], flags)
            return frozenset([start + 1]) if fits else frozenset()
        if op is opcodes.BRANCH:
            return frozenset[int]().union(*(self.sequence_ends(part, start, flags) for part in value[1]))
        if op is opcodes.SUBPATTERN:
            return self.sequence_ends(value[3], start, (flags | value[1]) & ~value[2])
        if op in REPEATS:
            return self._repeat_ends(value[2], value[0], int(value[1]), start, flags)
        if op is opcodes.AT:
            holds = self._is_at(value, start, flags)
        else:
            holds = bool(self.sequence_ends(value[1], start, flags)) == (op is opcodes.ASSERT)
        return frozenset([start]) if holds else frozenset()

    def _repeat_ends(self, tree: Any, low: int, high: int, start: int, flags: int) -> Ends:
        """Return the ends of matches of a repeat; more rounds than the name has characters find no further ends."""
        if len(tree) == 1 and tree[0][0] in CHARACTERS:  # the most common case: the ends are a range
            (op, value), last = tree[0], start
            while last - start < high and last < len(self.name) and _fits(op, value, self.name[last], flags):
                last += 1
            return frozenset(range(start + low, last + 1))
        positions, ends = frozenset([start]), set[int]()
        low, rounds = min(low, len(self.name) + 1), len(self.name) + 1
        for count in range(min(high, low + rounds) + 1):
            if count >= low:
                ends |= positions
            positions = frozenset[int]().union(*(self.sequence_ends(tree, p, flags) for p in positions))
            if not positions or (count >= low and positions <= ends):
                break
        return frozenset(ends)

    def _is_at(self, place: Any, position: int, flags: int) -> bool:
        if place in (opcodes.AT_BEGINNING, opcodes.AT_BEGINNING_STRING):
            return position == 0
        if place in (opcodes.AT_END, opcodes.AT_END_STRING):
            return position == len(self.name)
        around = self.name[max(position - 1, 0) : position], self.name[position : position + 1]
        before, after = (bool(re.match(r"\w", c, flags & re.ASCII)) for c in around)
        return (before != after) == (place is opcodes.AT_BOUNDARY)


def _fits(op: Any, value: Any, character: str, flags: int) -> bool:
    """Return whether a node of the syntax tree that stands for one character matches it."""
    if op is opcodes.ANY:
        return character != "\n" or bool(flags & re.DOTALL)
    if op is opcodes.NOT_LITERAL:
        return not _fits(opcodes.LITERAL, value, character, flags)
    variants = {character, character.lower(), character.upper()} if flags & re.IGNORECASE else {character}
    codes = {ord(variant) for variant in variants if len(variant) == 1}
    if op is opcodes.LITERAL:
        return value in codes
    negated = bool(value) and value[0][0] is opcodes.NEGATE
    is_member = False
    for kind, item in value[negated:]:
        if kind is opcodes.LITERAL:
            is_member |= item in codes
        elif kind is opcodes.RANGE:
            is_member |= any(item[0] <= code <= item[1] for code in codes)
        else:
            is_member |= re.match(CATEGORIES[item], character, flags & re.ASCII) is not None
    return is_member != negated
