"""`compress sensitivity`: a table, suggested bounds and files."""

import json

import pytest
import yaml

from compress.recipe import Recipe
from helpers.commands import run


def test_command_prints_a_table_and_bounds_and_writes_files(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("from helpers.digits import dense\n")
    words = ["sensitivity", "--model", "own:dense", "--data", "digits", "--widths", "50%, 25%", "--no-repair"]
    code, out, err = run(monkeypatch, capsys, *words, "--workdir", "out", "--lost", "1%", "--quiet")
    assert code == 0, err
    assert "stage1.0.conv1" in out and "loses more than 1.00 % of accuracy" in out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"sensitivity.json", "sensitivity.html"}
    text = out[out.index("# Each") : out.index("saved in")]
    bounds = Recipe.load(yaml.safe_load(text) | {"budget": "50%"}).target.bounds
    data = json.loads((tmp_path / "out" / "sensitivity.json").read_text())
    fragile = data["groups"][0]
    assert bounds[fragile["name"]].least == fragile["width"]
    code, out, err = run(monkeypatch, capsys, *words, "--json")
    assert code == 0 and "nothing is repaired" not in err, err  # which is what was asked for
    assert json.loads(out) == data


def test_recipe_gives_the_target_and_its_data_and_an_option_replaces_it(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("from helpers.digits import dense\n")
    recipe = "budget: 50%\ndata: {source: digits}\ntarget: {channels: false, residual: true}\n"
    (tmp_path / "mine.yaml").write_text(recipe)
    words = ["sensitivity", "--model", "own:dense", "--recipe", "mine.yaml", "--widths", "50%", "--no-repair"]
    kinds = []
    for more in ((), ("--target", "channels"), ("--target", "channels,residual")):
        code, out, err = run(monkeypatch, capsys, *words, *more, "--json", "--quiet")
        assert code == 0, err
        kinds.append({group["kind"] for group in json.loads(out)["groups"]})
    assert kinds == [{"residual"}, {"channels"}, {"channels", "residual"}]


TASK = """
import helpers.own_task

def make():
    return helpers.own_task.RegressionFromProtocol()
"""


def test_task_is_measured(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_model.py").write_text("from helpers.digits import dense\n")
    (tmp_path / "own_tasks.py").write_text(TASK)
    (tmp_path / "mine.yaml").write_text("budget: 50%\ndata: {source: digits}\n")
    words = ["sensitivity", "--model", "own_model:dense", "--task", "own_tasks:make", "--recipe", "mine.yaml"]
    words += ["--widths", "50%", "--no-repair"]
    code, out, err = run(monkeypatch, capsys, *words, "--json", "--quiet")
    assert code == 0, err
    assert json.loads(out)["metric"] == "quality"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "digits", "--lost", "much"], "--lost: expected what may be lost"),
        ([], "--data: expected data to measure on: digits, cifar10:FOLDER"),
        (["--data", "digits", "--target", "chanels"], "chanels"),
        (["--data", "digits", "--widths", "half"], "widths: expected fractions of a width"),
    ],
)
def test_mistakes_end_with_2(monkeypatch, capsys, words, message) -> None:
    code, _, err = run(monkeypatch, capsys, "sensitivity", "--model", "compress.cli.quickstart:Network", *words)
    assert code == 2
    assert message in err
