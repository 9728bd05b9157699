"""Mistyped recipes, and files that are no recipes, give an error with the place and never a traceback."""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compress import Recipe, RecipeError
from compress.cli import app as cli
from compress.recipe import packaged_recipes

TEXTS = {name: path.read_text() for name, path in packaged_recipes().items()}
DATA = {name: yaml.safe_load(text) for name, text in TEXTS.items()}
FIXED = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

numbers = st.integers() | st.floats() | st.sampled_from([10**400, -1, 0, 2**63, 1e-320])
words = st.text(max_size=8) | st.sampled_from(["auto", "50%", "1e-4", "re:(", "netslim", "10 steps", "\ud800", "a\nb"])
leaves = st.none() | st.booleans() | numbers | words
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3), max_leaves=6
)
names = st.sampled_from(sorted(DATA))
PLACE = re.compile(r"line \d+, column \d+|^  [^ ].*?: |: extends", re.MULTILINE)


def tried(source: Any) -> Recipe | str:
    """The recipe, or what is said about it; anything but a RecipeError is a failure."""
    try:
        recipe = Recipe.load(source)
    except RecipeError as error:
        text = str(error)
        assert len(text) < 20_000
        text.encode()  # can be printed
        assert re.search(r"\d+ problems?\n  \S|not YAML: line|expected", text), text
        return text
    again = recipe.model_dump(mode="json", exclude_none=True)
    assert Recipe.load(again) == recipe
    return recipe


def spots(data: Any) -> list[tuple[Any, Any]]:
    """Every container and key of a recipe."""
    found = []
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        found += [(data, key), *spots(value)]
    return found


@FIXED
@given(name=names, draw=st.data())
def test_recipes_with_changed_keys_and_values_load_or_name_the_key(name: str, draw: st.DataObject) -> None:
    data = copy.deepcopy(DATA[name])
    for _ in range(draw.draw(st.integers(1, 3))):
        if not (found := spots(data)):
            break
        container, key = found[draw.draw(st.integers(0, 10**6)) % len(found)]
        how = draw.draw(st.sampled_from(["delete", "rename", "replace", "junk"]))
        if how == "junk" and isinstance(container, dict):
            container[draw.draw(words)] = draw.draw(values)
        elif how == "rename" and isinstance(container, dict):
            container[draw.draw(st.sampled_from([f"{key}s", str(key)[:-1], str(key).upper()]))] = container.pop(key)
        elif how == "delete":
            del container[key]
        else:
            container[key] = draw.draw(values)
    said = tried(data)
    assert isinstance(said, Recipe) or PLACE.search(said), said


@FIXED
@given(name=names, key=st.integers(0, 10**6), value=values)
def test_replaced_value_is_named_by_its_line(name: str, key: int, value: Any, tmp_path_factory: Any) -> None:
    """The same recipe as a file: what is said has the line that was changed, or that of the section around it."""
    data = copy.deepcopy(DATA[name])
    found = spots(data)
    container, at = found[key % len(found)]
    container[at] = value
    path = tmp_path_factory.mktemp("fuzz") / "recipe.yaml"
    path.write_text(yaml.safe_dump(data, allow_unicode=False), encoding="utf-8")
    said = tried(path)
    assert isinstance(said, Recipe) or re.search(r"\(line \d+, column \d+\)|not YAML: line|required", said), said


@FIXED
@given(name=names, draw=st.data())
def test_damaged_text_loads_or_has_a_place(name: str, draw: st.DataObject, tmp_path_factory: Any) -> None:
    raw = TEXTS[name].encode()
    for _ in range(draw.draw(st.integers(1, 3))):
        at = draw.draw(st.integers(0, len(raw)))
        how = draw.draw(st.sampled_from(["cut", "insert", "flip", "swap"]))
        if how == "cut":
            raw = raw[:at]
        elif how == "insert":
            junk = st.binary(max_size=4) | st.sampled_from(
                [b"\t", b"\n", b": ", b"- ", b"&a ", b"*a", b"<<: ", b"{[", b"!!"]
            )
            raw = raw[:at] + draw.draw(junk) + raw[at:]
        elif how == "flip" and at < len(raw):
            raw = raw[:at] + bytes([raw[at] ^ (1 << draw.draw(st.integers(0, 7)))]) + raw[at + 1 :]
        else:
            raw = raw[at:] + raw[:at]
    path = tmp_path_factory.mktemp("fuzz") / "recipe.yaml"
    path.write_bytes(raw)
    said = tried(path)
    assert isinstance(said, Recipe) or "recipe.yaml" in said, said


ALIASES = [b"%c: &%c [%s]\n" % (i, i, b",".join([b"*%c" % (i - 1)] * 9)) for i in range(98, 110)]
BOMB = b"".join([b"a: &a [1,1,1,1]\n", *ALIASES])  # some billions of values


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"budget:\n\tmacs: 50%\n", r"line 2, column 1: .*Indent with spaces, not with tabs"),
        (b"budget: {macs: \xff}\n", "line 1, column 16: expected text in UTF-8; got the byte 0xff"),
        (b"budget: {macs: 50%}\n\x00", "line 2, column 1: expected text; got '.x00'"),
        (BOMB, r"line 5, column \d+: expected at most 20000 values"),
        (b"a: &a {b: *a}\n", "line 1, column 11: got an alias of a value that contains it"),
        (b"a: " + b"[" * 5000, "line 1, column 35: expected at most 32 levels"),
        (b"seed: 2020-13-45\n", "line 1, column 7: expected timestamp; got '2020-13-45'"),
        (b"seed: " + b"9" * 5000, "line 1, column 7: expected int"),
        (b"seed: !!python/object/apply:os.getcwd []", "line 1, column 7: could not determine a constructor"),
        (b"budget: {macs: 50%}\n---\nseed: 3\n", "line 2, column 1: but found another document"),
        (b"? [a]\n: 3\n", "line 1, column 3: found unhashable key"),
    ],
)  # fmt: skip
def test_files_that_are_no_yaml_are_refused_with_the_place(raw: bytes, text: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(raw)
    with pytest.raises(RecipeError, match=rf"recipe\.yaml: not YAML: {text}"):
        Recipe.load(path)


def test_huge_file_and_what_cannot_be_opened_are_refused(tmp_path: Path) -> None:
    huge = tmp_path / "huge.yaml"
    with huge.open("wb") as file:
        file.truncate(1 << 40)  # a terabyte, of which nothing is on the disk
    with pytest.raises(RecipeError, match=r"huge\.yaml: expected a recipe of at most 256 kB; got 1099511627776 bytes"):
        Recipe.load(huge)
    with pytest.raises(
        RecipeError, match=r"expected the path of a YAML file or one of the packaged recipes; got a folder"
    ):
        Recipe.load(tmp_path)
    for name in ("a" * 5000, "a\x00b", ""):
        with pytest.raises(RecipeError, match="expected the path of a YAML file"):
            Recipe.load(name)
    mine = tmp_path / "mine.yaml"
    mine.write_text("seed: 3\nextends: quickstrat\n")
    with pytest.raises(RecipeError, match=r"mine\.yaml: extends \(line 2, column 1\): quickstrat: .*mean quickstart\?"):
        Recipe.load(mine)
    with pytest.raises(RecipeError, match=r"cannot be read: "):
        Recipe.load("/proc/self/mem")


def test_keys_that_are_doubled_or_no_text_are_named_along_with_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "budget: {macs: 50%}\ntarget:\n  round_to: 8\n  bounds: {0.0: {least: 2}}\n  round_to: 4\nseed: -1\nseed: -2\n"
    )
    with pytest.raises(RecipeError) as caught:
        Recipe.load(path)
    assert str(caught.value).splitlines()[1:] == [
        '  target.bounds.0.0 (line 4, column 12): expected text as a key; got 0.0. Did you mean "0.0"?',
        "  target.round_to (line 5, column 3): appears twice; the first one is in line 3",
        "  seed (line 7, column 1): appears twice; the first one is in line 6",
        "  seed (line 7, column 1): input should be greater than or equal to 0; got -2",
    ]


def test_contradictions_are_named_along_with_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("budget: auto\nsteps: 3\ncompensate: mean\ntarget: {branches: true}\n")
    with pytest.raises(RecipeError) as caught:
        Recipe.load(path)
    places = [line.partition(":")[0] for line in str(caught.value).splitlines()[1:]]
    assert places == ["  budget (line 1, column 1)", "  compensate (line 3, column 1)", "  steps (line 2, column 1)"]
    path.write_text("budget: auto\nseach: 3\ntarget: {branches: true}\ncompensate: mean\nsearch: {method: netslm}\n")
    with pytest.raises(RecipeError, match="3 problems") as caught:  # whether netslm fits auto nobody can say
        Recipe.load(path)
    assert "compensate (line 4, column 1): a branch that is removed has no reader" in str(caught.value)
    path.write_text("budget: {macs: 50, flops: 50%}\n")
    with pytest.raises(RecipeError, match=r'(?s)2 problems.*macs \(line 1, column 10\): .*mean "50%".*flops'):
        Recipe.load(path)


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"finetune": {"epochs": 3, "milestones": [0.9, 0.1]}}, r"finetune\.milestones: expected increasing fractions"),
        ({"finetune": {"epochs": {"count": -3, "unit": "steps"}}}, r"finetune\.epochs: expected a length of more"),
        ({"finetune": {"epochs": 10**400}}, r"finetune\.epochs: expected a number of epochs"),
        ({"finetune": {"epochs": 1, "lr": 10**400}}, r"finetune\.lr: expected a number"),
        ({"finetune": True}, r"finetune: expected a section with some of epochs, .*; got True"),
        ({"target": {"exclude": "stem"}}, r"target\.exclude: expected a list; got 'stem'"),
        ({"target": {"attention": ["qk", "hedas"]}}, r"target\.attention: .*Did you mean heads\?"),
        ({"target": {"round_to": 10**30}}, r"target\.round_to: expected auto, or a number .*; got 10+$"),
        ({"budget": "atuo"}, r"budget: expected auto, .*Did you mean auto\?"),
        ({"budget": "150%"}, r"budget: expected auto, or what is left, as 50% .*; got '150%'"),
        ({"seed": 2**63}, "seed: input should be less than"),
        ({"seed": 10**9999}, "seed: .*; got something of type int that cannot be printed"),
        ({"extends": "quickstart", "search": None}, "^recipe: 1 problem\n  search: expected a method"),
    ],
)  # fmt: skip
def test_impossible_values_are_refused(section: dict[str, Any], text: str) -> None:
    with pytest.raises(RecipeError, match=text):
        Recipe.load({"budget": {"macs": 0.5}} | section)


@pytest.mark.parametrize(
    "raw", [b"", b"\xff\xfe", b"budget: [", b"budget: {macs: 50}\nseed: !!int x", b"task: 3\n'a\\nb': \"\\ud800\"\n"]
)
def test_bad_recipes_end_the_command_with_code_2_and_no_traceback(
    raw: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(raw)
    for extra in ([], ["--seed", "3"], ["--data", "digits"]):
        words = [
            "--recipe",
            str(path),
            "--model",
            "compress.cli.quickstart:Network",
            "--workdir",
            str(tmp_path / "out"),
        ]
        monkeypatch.setattr(sys, "argv", ["compress", "prune", *words, *extra])
        with pytest.raises(SystemExit) as done:
            cli.main()
        said = capsys.readouterr().err
        assert done.value.code == 2
        assert "recipe.yaml" in said.replace("\n", "") and "Traceback" not in said
        assert not (tmp_path / "out").exists()
