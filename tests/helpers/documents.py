"""Read the documents: their blocks of code and the commands in them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md")), *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True)
class Block:
    """A block of code and where it stands."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def tokens(page: Path) -> list[Token]:
    return MarkdownIt().enable("table").parse(page.read_text())


def blocks() -> Iterator[Block]:
    for page in PAGES:
        for token in tokens(page):
            if token.type in ("fence", "code_block"):
                assert token.map is not None
                yield Block(page, token.map[0] + 1, token.info.strip(), token.content)


def commands(text: str) -> list[list[str]]:
    """The commands of a shell, in words; where their output goes is left out."""
    lines = text.replace("\\\n", " ").splitlines()
    found = [shlex.split(line, comments=True) for line in lines]
    return [words[: words.index(">")] if ">" in words else words for words in found if words]
