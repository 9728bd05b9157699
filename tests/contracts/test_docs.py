"""Documents: every block of code is run, or read by what it is meant for; every link leads somewhere.

Python runs as doctests (`make test` collects README.md and docs). The rest is here, and a block of a language that is
not in CHECKS fails, so that nothing can be shown that is not checked.
"""

from __future__ import annotations

import argparse
import doctest
import hashlib
import importlib
import importlib.metadata
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from compress import exporters
from compress.cli import app as cli
from compress.recipe import Recipe
from helpers.documents import PAGES, ROOT, Block, blocks, commands, tokens

COLLECTED = ("README.md", "docs")  # what `make test` runs as doctests
# The programs of docs/deploy.md as they were compiled and run by hand, with the headers of onnxruntime 1.23, which come
# with no Python package. A program that changes has to be compiled again:
# ONNXRUNTIME_INCLUDE=... pytest tests/contracts/test_docs.py
COMPILED = {
    "1a711f2bf15a18ab72b4826dda102ee1528f75373b1644ec51d38c602181b55b",
    "3f6f3de9efc666fc956fd150f613ef80e5e2d5620ed6e0db4ed39d3572112b66",
}


class Parsed(Exception):
    """Options were read, and nothing is run."""


def reads(module: str, words: list[str]) -> None:
    """The options of a script are its own: its parser reads them, and it goes no further."""
    real = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, *given: Any) -> None:
        real(self, words)
        raise Parsed

    with mock.patch.object(argparse.ArgumentParser, "parse_args", parse), pytest.raises(Parsed):
        importlib.import_module(module).main()


def is_a_command(words: list[str]) -> None:
    """What stands behind the first word exists and takes these options.

    Raises:
        AssertionError, SystemExit, ValueError: it does not.
    """
    first, rest = words[0], words[1:]
    if first == "compress":
        group = typer.main.get_command(cli.app)
        name, command, rest = group.resolve_command(
            group.make_context("compress", [*rest]), cli.repeat_cfg_options(rest)
        )
        given = command.make_context(name, rest).params
        if given.get("recipe") is not None:
            Recipe.load(given["recipe"])
    elif first == "make":
        known = (ROOT / "Makefile").read_text()
        given = [word.partition("=") for word in rest]
        assert all(f"$({name})" in known if value else re.search(rf"(?m)^{name}:", known) for name, _, value in given)
    elif first == "pip":
        (extras,) = re.findall(r"^install -e \.(?:\[([\w,-]+)\])?$", " ".join(rest))
        known = importlib.metadata.metadata("compress").get_all("Provides-Extra") or []
        assert set(filter(None, extras.split(","))) <= set(known)
    elif first == "torchrun":
        given = get_args_parser().parse_args(rest)
        assert given.module
        is_a_command([given.training_script, *given.training_script_args])
    elif words[:2] == ["accelerate", "launch"]:
        given = launch_command_parser().parse_args(rest[1:])
        assert given.module
        is_a_command([given.training_script, *given.training_script_args])
    elif words[:2] == ["python", "-m"]:
        if rest[1] == "compress.recipe.reference":
            importlib.import_module(rest[1])
        else:
            reads(rest[1], rest[2:])
    elif first == "python":
        assert (ROOT / rest[0]).is_file()
    else:
        raise AssertionError(f"{first}: no command that this test knows")


def python(block: Block) -> None:
    assert block.text.startswith(">>> "), "python runs as doctests: begin with >>>"
    assert str(block.page.relative_to(ROOT)).startswith(COLLECTED)
    assert f" {' '.join(COLLECTED)}\n" in (ROOT / "Makefile").read_text()


def yaml(block: Block, folder: Path) -> None:
    path = folder / "recipe.yaml"
    path.write_text(block.text if "budget:" in block.text else f"budget: {{macs: 50%}}\n{block.text}")
    Recipe.load(path)


def bash(block: Block) -> None:
    found = commands(block.text)
    assert found
    for words in found:
        is_a_command(words)


def cpp(block: Block, folder: Path) -> None:
    if include := os.environ.get("ONNXRUNTIME_INCLUDE"):
        (folder / "main.cpp").write_text(block.text)
        compiler = shutil.which("c++")
        assert compiler
        subprocess.run([compiler, "-std=c++17", "-fsyntax-only", "-I", include, folder / "main.cpp"], check=True)
    digest = hashlib.sha256(block.text.encode()).hexdigest()
    assert digest in COMPILED, f"compile it with ONNXRUNTIME_INCLUDE set, run it, then write down {digest}"


def text(block: Block) -> None:
    """A map, all of whose names exist, or the chain of functions."""
    if block.text.startswith("model ="):
        return
    assert block.text.startswith("compress/"), "text is for maps; what is run has a language"
    folder = ROOT
    for indent, names in re.findall(r"(?m)^((?:  )?)(\w+(?:\.py|/)(?: \w+(?:\.py|/))*)", block.text):
        if not indent:
            folder = ROOT / names
        for name in names.split():
            assert (folder / name if indent else folder).exists(), f"{name} is not in {folder.name}/"


CHECKS: dict[str, Callable[..., None]] = {"python": python, "yaml": yaml, "bash": bash, "cpp": cpp, "text": text}


@pytest.mark.parametrize("block", [*blocks()], ids=str)
def test_block_is_what_it_says(block: Block, tmp_path: Path) -> None:
    assert block.language in CHECKS, f"{block.language or 'a block without a language'}: expected one of {[*CHECKS]}"
    check = CHECKS[block.language]
    check(block, tmp_path) if check in (yaml, cpp) else check(block)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_within_sentences_exist(page: Path) -> None:
    programs = r"(compress|make|pip|torchrun|accelerate|python) "
    codes = [child.content for token in tokens(page) for child in token.children or () if child.type == "code_inline"]
    for words in (words for code in codes if re.match(programs, code) for words in commands(code)):
        if words[0] == "compress" and len(words) == 2:  # the name of a command, and not all that it needs
            assert words[1] in typer.main.get_command(cli.app).commands
        elif words != ["accelerate", "launch"]:
            is_a_command(words)


def slugs(page: Path) -> set[str]:
    """Anchors of a page's headings, as they are made where people read it."""
    found, past = set(), False
    for token in tokens(page):
        if past:
            found.add(re.sub(r"[^\w\- ]", "", token.content.lower()).replace(" ", "-"))
        past = token.type == "heading_open"
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_and_picture_leads_somewhere(page: Path) -> None:
    for token in tokens(page):
        for child in token.children or ():
            place = child.attrs.get("href" if child.type == "link_open" else "src")
            if place is None or re.match(r"https?://", str(place)):
                continue
            name, _, anchor = str(place).partition("#")
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), f"{page.name}: {place}"
            assert target.is_relative_to(ROOT)
            assert not anchor or anchor in slugs(target), f"{page.name}: {place}; {target.name} has {slugs(target)}"


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen, new = set[Path](), [ROOT / "README.md"]
    while new:
        page = new.pop()
        seen.add(page)
        for token in tokens(page):
            for child in token.children or ():
                name = str(child.attrs.get("href", "")).partition("#")[0]
                target = (page.parent / name).resolve()
                if name.endswith(".md") and target not in seen:
                    new.append(target)
    assert set(PAGES) <= seen


def test_every_package_is_on_the_map() -> None:
    (chart,) = [block.text for block in blocks() if block.page.name == "CONTRIBUTING.md" and block.language == "text"]
    folders = [path.parent for path in (ROOT / "compress").glob("*/__init__.py")]
    names = {f"{folder.name}/" for folder in folders} | {path.name for path in (ROOT / "compress").glob("*.py")}
    assert {name for name in names if not name.startswith("_")} == set(re.findall(r"(?m)^  (\w+(?:/|\.py))", chart))


NOTICED = (AssertionError, SystemExit, ImportError, ValueError, typer.BadParameter.__base__)  # the last: wrong usage


@pytest.mark.parametrize(
    "command",
    [
        "compress prune --modle timm:resnet50 --recipe magnitude_half --workdir out",
        "compress prune --model timm:resnet50 --recipe no_such_recipe --workdir out",
        "compress squeeze out",
        "make coffee",
        "pip install -e .[everything]",
        "python -m benchmarks.coverage --no-such-option",
        "python -m benchmarks.no_such_table",
        "python examples/no_such_script.py",
        "torchrun --nproc_per_node 2 -m compress prune --recipe magnitude_half",
        "rm -rf out",
    ],
)
def test_command_that_does_not_exist_is_noticed(command: str) -> None:
    with pytest.raises(NOTICED):
        is_a_command(shlex.split(command))


@pytest.mark.parametrize(
    ("language", "content"),
    [
        ("python", "print('never run')\n"),
        ("yaml", "budgets: {macs: 50%}\n"),
        ("bash", "compress prune\n"),
        ("cpp", "int main() {}\n"),
        ("text", "compress/\n  nowhere.py         not there\n"),
        ("rust", "fn main() {}\n"),
        ("", "compress recipes\n"),
    ],
)
def test_block_that_is_not_what_it_says_is_noticed(language: str, content: str, tmp_path: Path) -> None:
    with pytest.raises(NOTICED):
        test_block_is_what_it_says(Block(ROOT / "README.md", 1, language, content), tmp_path)


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(exporters.__path__)])
def test_examples_of_the_exporters_run_under_their_one_name(name: str) -> None:
    """A module of operators that is imported under a second name takes those of the first away (torch frees them)."""
    assert doctest.testmod(importlib.import_module(f"compress.exporters.{name}")).failed == 0
    assert f"exporters.{name}" not in sys.modules
