"""`compress preview`: the groups, and whether the budget can be met."""

import json

from helpers.commands import RESNET18, run


def test_preview_prints_groups_and_whether_the_budget_can_be_met(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "preview", *RESNET18, "--recipe", "magnitude_half")
    assert code == 0
    assert "layer1.0.conv1" in out
    assert "budget: macs 50% can be met" in " ".join(out.split())


def test_preview_as_json_is_json(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "preview", *RESNET18, "--recipe", "magnitude_half", "--json")
    data = json.loads(out)
    assert code == 0
    assert data["reachable"] is True
    assert data["pruned"]["macs"] <= data["dense"]["macs"] / 2
    assert {row["name"] for row in data["groups"]} >= {"conv1", "layer4.1.conv1"}


def test_preview_of_a_budget_out_of_reach_names_the_smallest_and_exits_1(monkeypatch, capsys, tmp_path):
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text("budget: {macs: 0.1%}\n")
    code, out, _ = run(monkeypatch, capsys, "preview", *RESNET18, "--recipe", str(recipe))
    assert code == 1
    assert "cannot be reached; the smallest that can is" in " ".join(out.split())
