"""`compress tradeoff`: a table, files, and the network that --pick names."""

import json

import torch
import torchvision

from helpers.commands import RESNET18, run

WITH_INPUTS = ["--model", "torchvision:resnet18", "--input", "16,3,32,32"]


def test_trade_off_prints_a_table_and_picks(monkeypatch, capsys, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("budget: {macs: 50%}\ntiming: {repeats: 3, batch_size: 1}\n")
    weights = tmp_path / "dense.pt"
    torch.save(torchvision.models.resnet18().state_dict(), weights)
    words = ["tradeoff", *WITH_INPUTS, "--weights", str(weights), "--recipe", str(recipe), "--budgets", "80%, 50%"]
    folder = tmp_path / "curve"
    code, out, err = run(monkeypatch, capsys, *words, "--workdir", str(folder), "--quiet", "--pick", "100%")
    assert code == 0, err
    assert "agreement" in out
    assert "macs 50%, in" in out
    assert {p.name for p in folder.iterdir()} == {"search", "macs_80", "macs_50", "tradeoff.json", "tradeoff.html"}
    code, out, err = run(monkeypatch, capsys, *words, "--workdir", str(folder), "--resume", "--json", "--quiet")
    assert code == 0, err
    assert json.loads(out) == json.loads((folder / "tradeoff.json").read_text())
    code, _, err = run(monkeypatch, capsys, *words, "--workdir", str(folder))
    assert code == 2
    assert "holds a trade-off" in err


def test_pick_that_no_network_meets_ends_with_1(monkeypatch, capsys, tmp_path):
    words = ["tradeoff", *WITH_INPUTS, "--recipe", "magnitude_half", "--budgets", "20%", "--quiet", "--pick", "0%"]
    code, _, err = run(monkeypatch, capsys, *words, "--workdir", str(tmp_path / "curve"))
    assert code == 1, err
    assert "no network loses at most 0%" in err


def test_trade_off_repairs_on_inputs_without_labels_and_is_tested(monkeypatch, capsys, tmp_path):
    (tmp_path / "held_out.py").write_text(
        "from compress.data import loaders\nfrom compress.recipe import Data\n"
        "def odd():\n    return None, list(loaders(Data(source='digits', batch_size=90))[1])[1::2]\n"
    )
    (tmp_path / "r.yaml").write_text("extends: repair_half\ntiming: {repeats: 3, batch_size: 1}\n")
    monkeypatch.chdir(tmp_path)
    words = ["tradeoff", "--model", "compress.cli.quickstart:Network", "--budgets", "70%,50%", "--quiet", "--json"]
    repair = [*words, "--recipe", "r.yaml", "--calibration", "digits"]
    code, out, err = run(monkeypatch, capsys, *repair, "--test", "held_out:odd", "--workdir", "curve")
    assert code == 0, err
    curve = json.loads(out)
    assert curve["metric"] == "agreement" and len(curve["points"]) == 2
    assert all(0 <= network["test"]["accuracy"] <= 1 for network in [curve["dense"], *curve["points"]])
    report = json.loads((tmp_path / "curve" / "macs_50" / "report.json").read_text())
    assert report["repair"]["error_after"] < report["repair"]["error_before"]


def test_trade_off_without_a_recipe_needs_no_data(monkeypatch, capsys, tmp_path):
    words = ["tradeoff", *RESNET18, "--budgets", "70%", "--quiet", "--json", "--workdir", str(tmp_path / "curve")]
    code, out, err = run(monkeypatch, capsys, *words)
    assert code == 0, err
    curve = json.loads(out)
    assert curve["notes"][0] == "magnitude: one search served all budgets"
    assert curve["metric"] is None and "needs outputs with classes, and" in curve["notes"][-1]


def test_pick_that_is_no_loss_is_refused_before_the_first_network(monkeypatch, capsys, tmp_path):
    words = ["tradeoff", *RESNET18, "--recipe", "magnitude_half", "--budgets", "20%", "--quiet", "--pick", "much"]
    code, _, err = run(monkeypatch, capsys, *words, "--workdir", str(tmp_path / "curve"))
    assert code == 2 and "pick: expected what may be lost" in err
    assert not (tmp_path / "curve").exists()
