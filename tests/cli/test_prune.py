"""`compress prune`: what it leaves behind, what it prints, how it fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchvision

import compress
from compress.cli.models import complete_recipe
from compress.cli.quickstart import Network
from compress.data import loaders
from compress.recipe import Data
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


def test_test_data_are_the_validation_part_of_a_source(monkeypatch, capsys, tmp_path, short):
    (tmp_path / "held_out.py").write_text(
        "from compress.data import loaders\nfrom compress.recipe import Data\n"
        "def odd():\n    return None, list(loaders(Data(source='digits', batch_size=90))[1])[1::2]\n"
        "def none():\n    return [], None\n"
    )
    monkeypatch.chdir(tmp_path)
    words = [*TRAINED, "--recipe", short, "--json", "--quiet"]
    code, out, _ = run(monkeypatch, capsys, "prune", *words, "--workdir", "out", "--test", "held_out:odd")
    assert code == 0
    network = compress.load(Network(), "out").eval()
    batches = list(loaders(Data(source="digits", batch_size=90))[1])[1::2]
    hits = [network(x).argmax(1) == y for x, y in batches]
    assert json.loads(out)["pruned"]["test"]["accuracy"] == pytest.approx(float(torch.cat(hits).double().mean()))
    for source, text in (
        ("digits", "--test digits: expected data that choose nothing; these are the data of the run"),
        ("held_out:none", "--test held_out:none: expected a source with validation data; it has none"),
        ("digit", "expected digits, cifar10:FOLDER"),
    ):
        code, _, err = run(monkeypatch, capsys, "prune", *words, "--workdir", "other", "--test", source)
        assert code == 2 and text in " ".join(err.split())
    words = ["--mmdet", "mask-rcnn_r50_fpn_1x_coco", "--recipe", short, "--workdir", "other", "--test", "digits"]
    code, _, err = run(monkeypatch, capsys, "prune", *words)
    assert code == 2 and "--test: not for --mmdet, whose evaluator reads the validation data" in " ".join(err.split())


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


def test_network_with_random_weights_goes_on_with_resume(monkeypatch, capsys, tmp_path):
    """A search of operations starts from random weights: the same command builds the same network again."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("target: {operations: true}\nsearch: {method: magnitude}\ntiming: {repeats: 3}\n")
    words = ["--model", "compress.cells:digits_network", "--input", "1,1,8,8", "--recipe", str(recipe)]
    words += ["--workdir", str(tmp_path / "out"), "--quiet"]
    code, _, err = run(monkeypatch, capsys, "prune", *words, "--seed", "3")
    assert code == 0, err
    torch.manual_seed(7)  # another process
    code, _, err = run(monkeypatch, capsys, "prune", *words, "--seed", "3", "--resume")
    assert code == 0, err


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


def test_teacher_is_named_like_the_model(monkeypatch, capsys, tmp_path):
    recipe, weights = tmp_path / "distilled.yaml", tmp_path / "teacher.pt"
    recipe.write_text(
        "budget: {macs: 60%}\nfinetune: {epochs: 1 steps, distill: {}}\ntiming: {repeats: 3, batch_size: 1}\n"
    )
    from compress.cli.quickstart import Network

    torch.save(Network().state_dict(), weights)
    words = [*TRAINED, "--recipe", str(recipe), "--workdir", str(tmp_path / "out"), "--json"]
    factory = TRAINED[TRAINED.index("--model") + 1]
    code, out, err = run(monkeypatch, capsys, "prune", *words, "--teacher", factory, "--teacher-weights", str(weights))
    assert code == 0, err
    assert any("the teacher was another network: Network" in note for note in json.loads(out)["notes"])
    assert "no --weights" in err
    assert "no --teacher-weights" not in err


def test_weights_without_a_teacher_are_refused(monkeypatch, capsys, tmp_path):
    words = [*RESNET18, "--recipe", "magnitude_half", "--workdir", str(tmp_path), "--teacher-weights", "w.pt"]
    code, _, err = run(monkeypatch, capsys, "prune", *words)
    assert code == 2
    assert "--teacher-weights: whose weights? Give --teacher as well" in err
    code, _, err = run(monkeypatch, capsys, "prune", *words, "--teacher", "timm:resnet18")
    assert code == 2
    assert "--teacher-weights w.pt: no such file" in err


def test_budgets_of_the_command_line_replace_that_of_the_recipe(monkeypatch, capsys, tmp_path):
    words = [*RESNET18, "--recipe", "magnitude_half", "--budget", "macs=60%,params=5M", "--budget", "size=25MB"]
    code, out, err = run(monkeypatch, capsys, "prune", *words, "--json", "--workdir", str(tmp_path / "out"))
    assert code == 0, err
    report = json.loads(out)
    assert report["recipe"]["budget"] == {"macs": 0.6, "params": "5M", "size": "25MB"}
    assert report["pruned"]["macs"] <= 0.6 * report["dense"]["macs"] and report["pruned"]["params"] <= 5e6
    assert (tmp_path / "out" / "model.safetensors").stat().st_size <= 25e6


@pytest.mark.parametrize("words", [["macs"], ["macs=50%", "40%"], ["macs=50%,macs=20M"], ["=5"]])
def test_budget_that_is_no_limit_is_explained(words, monkeypatch, capsys, tmp_path):
    options = [option for word in words for option in ("--budget", word)]
    command = ["prune", *RESNET18, "--recipe", "magnitude_half", "--workdir", str(tmp_path / "out"), *options]
    code, _, err = run(monkeypatch, capsys, *command)
    assert code == 2 and "budget: expected" in err


def test_recipe_names_and_files_are_completed(tmp_path):
    (tmp_path / "mask.yaml").write_text("budget: {macs: 50%}\n")
    (tmp_path / "maps").mkdir()
    (tmp_path / "main.py").touch()
    asked = {"COMP_WORDS": "compress prune --recipe ma", "COMP_CWORD": "3", "_COMPRESS_COMPLETE": "complete_bash"}
    program = "import sys; sys.argv = ['compress']; from compress.cli import app; app.main()"
    path = os.pathsep.join([str(Path(compress.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, **asked, "PYTHONPATH": path}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert {"magnitude_half", "mask.yaml", "maps/"} <= {*result.stdout.split()}, result.stderr
    assert "main.py" not in result.stdout
    assert complete_recipe(f"{tmp_path}/mas") == [f"{tmp_path}/mask.yaml"]


def test_prune_repairs_on_calibration_data(monkeypatch, capsys, tmp_path):
    words = ["--model", "compress.cli.quickstart:Network", "--recipe", "repair_half", "--calibration", "digits"]
    code, _, err = run(monkeypatch, capsys, "prune", *words, "--workdir", str(tmp_path / "out"))
    assert code == 0, err
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert any(layer["error_after"] < layer["error_before"] for layer in report["repair"]["layers"])
    code, _, err = run(
        monkeypatch, capsys, "prune", *words[:-1], "folder:nowhere", "--workdir", str(tmp_path / "other")
    )
    assert code == 2
    assert "--calibration folder:nowhere: expected images" in err


def test_task_brings_its_own_data(monkeypatch, capsys, tmp_path):
    recipe = tmp_path / "taylor.yaml"
    recipe.write_text("budget: {macs: 60%}\nsearch: {method: taylor, epochs: 1 step}\ntiming: {repeats: 3}\n")
    words = ["--model", "helpers.shapes:small_deeplab", "--task", "helpers.shapes:mask_task"]
    words += ["--recipe", str(recipe), "--workdir", str(tmp_path / "out")]
    code, out, err = run(monkeypatch, capsys, "prune", *words, "--json")
    assert code == 0, err
    assert json.loads(out)["pruned"]["metrics"].keys() == {"miou", "pixel_accuracy", "loss"}
    code, _, err = run(monkeypatch, capsys, "prune", *words, "--data", "digits")
    assert code == 2
    assert "--task: a task has its own data; leave --data out" in err


TRAP = """from pathlib import Path
Path("imported").touch()
def make():
    raise ValueError("called")
"""


@pytest.mark.parametrize("command", ["prune", "tradeoff", "sensitivity"])
@pytest.mark.parametrize(
    ("line", "option", "key"),
    [
        ("task: trap_in_a_recipe:make", "--task", "task"),
        ("data: {source: 'trap_in_a_recipe:make'}", "--data", "data.source"),
    ],
)
def test_code_that_a_recipe_names_is_imported_only_if_it_is_typed(
    command, line, option, key, monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "trap_in_a_recipe", raising=False)
    (tmp_path / "trap_in_a_recipe.py").write_text(TRAP)
    (tmp_path / "downloaded.yaml").write_text(f"budget: 50%\n{line}\n")
    (tmp_path / "mine.yaml").write_text("extends: downloaded.yaml\nseed: 3\n")
    words = [command, "--model", "compress.cli.quickstart:Network", "--recipe", "mine.yaml"]
    words += ["--workdir", "out"]
    code, _, err = run(monkeypatch, capsys, *words)
    assert code == 2
    assert f"{key} of recipe mine.yaml: a command imports only code that you type" in err
    assert f"got 'trap_in_a_recipe:make'. If you trust it, add {option} trap_in_a_recipe:make" in err
    assert not (tmp_path / "imported").exists()
    code, _, err = run(monkeypatch, capsys, *words, option, "trap_in_a_recipe:make")
    assert code == 2
    assert "ValueError: called" in err and (tmp_path / "imported").exists()
