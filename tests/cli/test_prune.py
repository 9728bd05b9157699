"""`compress prune`: what it leaves behind, what it prints, how it fails."""

import json

import pytest
import torch
import torchvision

import compress
from helpers.commands import RESNET18, run


def test_prune_leaves_a_directory_that_loads(monkeypatch, capsys, tmp_path):
    torch.manual_seed(0)
    weights = tmp_path / "dense.pt"
    dense = torchvision.models.resnet18()
    torch.save(dense.state_dict(), weights)
    words = [*RESNET18, "--weights", str(weights), "--recipe", "magnitude_half", "--workdir", str(tmp_path / "out")]
    code, out, _ = run(monkeypatch, capsys, "prune", *words)
    assert code == 0
    assert "reload with" in out
    compact = compress.load(torchvision.models.resnet18(), tmp_path / "out").eval()
    plan = compress.Plan.load(tmp_path / "out" / "plan.json")
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(compact(x), plan.apply_(dense.eval())(x))


def test_prune_refuses_a_foreign_directory_before_it_starts(monkeypatch, capsys, tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    words = [*RESNET18, "--recipe", "magnitude_half", "--workdir", str(tmp_path)]
    code, _, err = run(monkeypatch, capsys, "prune", *words)
    assert code == 2
    assert "it holds other files" in err
    assert (tmp_path / "thesis.txt").read_text() == "precious"


TRAINED = ["--model", "compress.cli.quickstart:Network", "--data", "digits"]


@pytest.fixture
def short(tmp_path):
    path = tmp_path / "short.yaml"
    path.write_text(
        "extends: quickstart\nsearch: {epochs: 6 steps}\nfinetune: {epochs: 6 steps}\n"
        "timing: {repeats: 3, batch_size: 1}\n"
    )
    return str(path)


def test_prune_with_training_leaves_plan_weights_report_and_page(monkeypatch, capsys, tmp_path, short):
    from compress.cli.quickstart import Network

    folder, weights = tmp_path / "out", tmp_path / "dense.pt"
    torch.save(Network().state_dict(), weights)
    words = [*TRAINED, "--recipe", short, "--workdir", str(folder)]
    code, out, err = run(monkeypatch, capsys, "prune", *words, "--weights", str(weights))
    assert code == 0, err
    assert "accuracy" in out
    assert "report.html" in out
    assert {p.name for p in folder.iterdir()} == {
        "plan.json", "model.safetensors", "report.json", "report.html", "run.json"}  # fmt: skip
    compress.load(Network(), folder)
    code, _, err = run(monkeypatch, capsys, "prune", *words, "--weights", str(weights))
    assert code == 2
    assert "it holds a run: continue it with resume=True (--resume), or choose another" in err
    code, _, err = run(monkeypatch, capsys, "prune", *words)  # other random weights
    assert code == 2
    assert "belongs to another run: the model: has the same shapes but other values" in err


def test_prune_as_json_prints_the_report_and_nothing_else(monkeypatch, capsys, tmp_path, short):
    words = [*TRAINED, "--recipe", short, "--workdir", str(tmp_path / "out"), "--json", "--seed", "3"]
    code, out, _ = run(monkeypatch, capsys, "prune", *words)
    data = json.loads(out)
    assert code == 0
    assert data["recipe"]["seed"] == 3
    assert data["pruned"]["macs"] <= 0.5 * data["dense"]["macs"]
    assert data == json.loads((tmp_path / "out" / "report.json").read_text())


def test_interrupted_command_exits_130_and_goes_on_with_resume(monkeypatch, capsys, tmp_path, short):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    weights = tmp_path / "dense.pt"  # the same model both times
    from compress.cli.quickstart import Network

    torch.save(Network().state_dict(), weights)
    words = [*TRAINED, "--weights", str(weights), "--recipe", short, "--workdir", str(tmp_path / "out")]
    with monkeypatch.context() as patch:
        patch.setattr("compress.pipeline.run.fine_tune", stop)
        code, _, err = run(monkeypatch, capsys, "prune", *words)
    assert code == 130
    assert "interrupted in stage finetune; continue with resume=True (--resume)" in err
    code, out, err = run(monkeypatch, capsys, "prune", *words, "--resume")
    assert code == 0, err
    assert "accuracy" in out


def test_budget_out_of_reach_exits_1(monkeypatch, capsys, tmp_path):
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text("budget: {macs: 0.1%}\n")
    words = [*RESNET18, "--recipe", str(recipe), "--workdir", str(tmp_path / "out")]
    code, _, err = run(monkeypatch, capsys, "prune", *words)
    assert code == 1
    assert "cannot be reached" in err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--data", "digit"], "expected digits, cifar10:FOLDER"),
        (["--data", "folder:nowhere"], "train/ is missing"),
        ([], "need training data"),
        ([], "On the command line train=LOADER is --data"),
        (["--recipe", "quickstrt"], "Did you mean quickstart?"),
    ],
)
def test_mistakes_of_prune_exit_2(monkeypatch, capsys, tmp_path, words, text):
    base = ["--model", "torchvision:resnet18", "--recipe", "resnet_cifar_netslim", "--workdir", str(tmp_path / "out")]
    code, _, err = run(monkeypatch, capsys, "prune", *base, *words)
    assert code == 2
    assert text in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--device", "gpu"], "device gpu: not available"),
        (["--input", "1,3,-5,32"], "expected a shape such as 1,3,224,224"),
        (["--seed", "-1"], "seed: input should be greater than or equal to 0"),
        (["--weights", "broken.pt"], "not a state dict that can be read without running code"),
        (["--weights", "broken.safetensors"], "not a state dict that can be read without running code"),
    ],
)
def test_more_mistakes_of_prune_exit_2(monkeypatch, capsys, tmp_path, words, text):
    monkeypatch.chdir(tmp_path)
    for name in ("broken.pt", "broken.safetensors"):
        (tmp_path / name).write_bytes(b"not weights at all")
    base = ["--model", "torchvision:resnet18", "--recipe", "magnitude_half", "--workdir", "out", "--input", "1,3,32,32"]
    code, _, err = run(monkeypatch, capsys, "prune", *base, *words)
    assert code == 2
    assert text in err
    assert "Traceback" not in err
