"""The commands: what they print, what they leave behind, how they fail."""

import json
import subprocess
import sys

import pytest
import torch
import torchvision
from commands import run

import compress
from compress import cli

SMALL = ["--model", "torchvision:resnet18", "--input", "1,3,64,64"]


def test_preview_prints_groups_and_whether_the_budget_can_be_met(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "preview", *SMALL, "--recipe", "magnitude_half")
    assert code == 0
    assert "layer1.0.conv1" in out
    assert "budget.macs 50% can be met" in " ".join(out.split())


def test_preview_as_json_is_json(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "preview", *SMALL, "--recipe", "magnitude_half", "--json")
    data = json.loads(out)
    assert code == 0
    assert data["reachable"] is True
    assert data["pruned"]["macs"] <= data["dense"]["macs"] / 2
    assert {row["name"] for row in data["groups"]} >= {"conv1", "layer4.1.conv1"}


def test_preview_of_a_budget_out_of_reach_names_the_smallest_and_exits_1(monkeypatch, capsys, tmp_path):
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text("budget: {macs: 0.1%}\n")
    code, out, _ = run(monkeypatch, capsys, "preview", *SMALL, "--recipe", str(recipe))
    assert code == 1
    assert "cannot be reached; the smallest that can is" in " ".join(out.split())


def test_progress_as_json_is_a_line_for_each_thing_that_happens(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("COMPRESS_PROGRESS", "auto")  # put back afterwards
    recipe = tmp_path / "taylor.yaml"
    recipe.write_text("budget: {macs: 50%}\nsearch: {method: taylor, epochs: 3 steps}\ntiming: {repeats: 3}\n")
    words = ["--model", "compress.quickstart:Network", "--data", "digits", "--recipe", str(recipe)]
    monkeypatch.setattr(sys, "argv", ["compress", "prune", *words, "--workdir", str(tmp_path / "out")])
    sys.argv += ["--progress", "json"]
    with pytest.raises(SystemExit):
        cli.main()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["loss"] > 0 for line in lines if line.get("stage") == "search"] == [True] * 3
    assert lines[-1]["time"] >= lines[0]["time"]
    assert any(line.get("doing") == "search" and line["done"] == line["of"] == 3 for line in lines)


def test_progress_of_no_known_form_is_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("COMPRESS_PROGRESS", "auto")  # put back afterwards
    words = ["--recipe", "magnitude_half", "--workdir", str(tmp_path / "out"), "--progress", "loud"]
    code, _, err = run(monkeypatch, capsys, "prune", *SMALL, *words)
    assert code == 2
    assert "COMPRESS_PROGRESS: expected one of auto, plain, json, off; got 'loud'" in err


def test_prune_leaves_a_directory_that_loads(monkeypatch, capsys, tmp_path):
    torch.manual_seed(0)
    weights = tmp_path / "dense.pt"
    dense = torchvision.models.resnet18()
    torch.save(dense.state_dict(), weights)
    words = [*SMALL, "--weights", str(weights), "--recipe", "magnitude_half", "--workdir", str(tmp_path / "out")]
    code, out, _ = run(monkeypatch, capsys, "prune", *words)
    assert code == 0
    assert "reload with" in out
    compact = compress.load(torchvision.models.resnet18(), tmp_path / "out").eval()
    plan = compress.Plan.load(tmp_path / "out" / "plan.json")
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(compact(x), plan.apply_(dense.eval())(x))


def test_prune_refuses_a_foreign_directory_before_it_starts(monkeypatch, capsys, tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    words = [*SMALL, "--recipe", "magnitude_half", "--workdir", str(tmp_path)]
    code, _, err = run(monkeypatch, capsys, "prune", *words)
    assert code == 2
    assert "it holds other files" in err
    assert (tmp_path / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--model", "resnet18"], "expected torchvision:NAME, timm:NAME or package.module:factory"),
        (["--model", "torchvision:resnet81"], "the nearest are resnet18"),
        (["--model", "timm:resnet_18"], "the nearest are resnet18"),
        (["--model", "no_such_module:factory"], "No module named"),
        (["--model", "compress.files:write_whole_"], "has no attribute"),
        (["--model", "torchvision:resnet18", "--input", "1,3,big"], "expected a shape such as 1,3,224,224"),
        (["--model", "torchvision:resnet18", "--input", "1,4,64,64"], "it stops in conv1"),
        (["--model", "torchvision:resnet18", "--weights", "missing.pt"], "no such file"),
    ],
)
def test_mistakes_are_said_in_a_line_with_exit_code_2(monkeypatch, capsys, words, text):
    code, _, err = run(monkeypatch, capsys, "preview", *words, "--recipe", "magnitude_half")
    assert code == 2
    assert text in err
    assert "Traceback" not in err


def test_recipes_are_listed_and_their_schema_is_json(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "recipes")
    assert code == 0
    assert "magnitude_half" in out
    code, out, _ = run(monkeypatch, capsys, "recipes", "--schema")
    assert set(json.loads(out)["properties"]) == {*compress.Recipe.model_fields, "extends"}


def test_every_packaged_recipe_loads_and_opens_with_its_command():
    from compress.reading import packaged

    assert packaged()
    for name, path in packaged().items():
        assert compress.Recipe.load(name).budget.left <= 1
        head = [line for line in path.read_text().splitlines() if line.startswith("#")]
        assert any("compress prune" in line and f"--recipe {name}" in line for line in head)


def test_quickstart_keeps_every_promise(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "compress", "quickstart", "--workdir", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
        env={"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("kept") >= 4
    assert "BROKEN" not in done.stdout
    assert (tmp_path / "out" / "report.html").exists()


def test_quickstart_refuses_a_used_folder_before_it_trains(monkeypatch, capsys, tmp_path):
    (tmp_path / "run.json").write_text("{}")
    code, out, err = run(monkeypatch, capsys, "quickstart", "--workdir", str(tmp_path))
    assert code == 2
    assert "expected an empty or missing directory, as the tour starts anew each time; choose another" in err
    assert "train a residual network" not in out


TRAINED = ["--model", "compress.quickstart:Network", "--data", "digits"]


@pytest.fixture
def short(tmp_path):
    path = tmp_path / "short.yaml"
    path.write_text(
        "extends: quickstart\nsearch: {epochs: 6 steps}\nfinetune: {epochs: 6 steps}\n"
        "timing: {repeats: 3, batch_size: 1}\n"
    )
    return str(path)


def test_prune_with_training_leaves_plan_weights_report_and_page(monkeypatch, capsys, tmp_path, short):
    from compress.quickstart import Network

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
    assert "it holds a run: go on with resume=True (--resume), or choose another" in err
    code, _, err = run(monkeypatch, capsys, "prune", *words)  # other random weights
    assert code == 2
    assert "belongs to another run: the model: has the same shapes and other numbers" in err


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
    from compress.quickstart import Network

    torch.save(Network().state_dict(), weights)
    words = [*TRAINED, "--weights", str(weights), "--recipe", short, "--workdir", str(tmp_path / "out")]
    with monkeypatch.context() as patch:
        patch.setattr("compress.run.finetune", stop)
        code, _, err = run(monkeypatch, capsys, "prune", *words)
    assert code == 130
    assert "interrupted in stage finetune; go on with resume=True (--resume)" in err
    code, out, err = run(monkeypatch, capsys, "prune", *words, "--resume")
    assert code == 0, err
    assert "accuracy" in out


def test_budget_out_of_reach_exits_1(monkeypatch, capsys, tmp_path):
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text("budget: {macs: 0.1%}\n")
    words = [*SMALL, "--recipe", str(recipe), "--workdir", str(tmp_path / "out")]
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


def test_recipe_is_printed_by_name_and_listed_as_json(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "recipes", "quickstart")
    assert code == 0
    assert out.startswith("# Digits in two minutes")
    code, out, _ = run(monkeypatch, capsys, "recipes", "--json")
    assert json.loads(out).keys() >= {"quickstart", "magnitude_half", "resnet50_imagenet_netslim"}


def test_help_has_examples(monkeypatch, capsys):
    for command in ("prune", "preview", "recipes"):
        code, out, _ = run(monkeypatch, capsys, command, "--help")
        assert code == 0
        assert f"compress {command}" in out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--device", "gpu"], "device gpu: not to be had here"),
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
