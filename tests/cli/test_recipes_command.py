"""`compress recipes` lists, prints and describes recipes."""

import json

import compress
from helpers.commands import run


def test_recipes_are_listed_and_their_schema_is_json(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "recipes")
    assert code == 0
    assert "magnitude_half" in out
    code, out, _ = run(monkeypatch, capsys, "recipes", "--schema")
    assert set(json.loads(out)["properties"]) == {*compress.Recipe.model_fields, "extends"}


def test_every_packaged_recipe_loads_and_opens_with_its_command():
    from compress.recipe import packaged_recipes

    assert packaged_recipes()
    for name, path in packaged_recipes().items():
        assert str(compress.Recipe.load(name).budget)
        head = [line for line in path.read_text().splitlines() if line.startswith("#")]
        assert any("compress prune" in line and f"--recipe {name}" in line for line in head)


def test_recipe_is_printed_by_name_and_listed_as_json(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "recipes", "quickstart")
    assert code == 0
    assert out.startswith("# Digits in two minutes")
    code, out, _ = run(monkeypatch, capsys, "recipes", "--json")
    assert json.loads(out).keys() >= {"quickstart", "magnitude_half", "resnet50_imagenet_netslim"}
