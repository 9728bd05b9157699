"""YOLO on the command line: every recipe in shortened form, one command from a YAML to a directory, and mistakes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from compress.cli import app as cli
from compress.recipe import Recipe, packaged_recipes
from helpers.documents import blocks, commands
from helpers.yolo_data import make_data

pytest.importorskip("ultralytics", reason="the extra yolo is not installed")
from ultralytics.utils.torch_utils import strip_optimizer

from compress import yolo
from compress.yolo.commands import build_for_command

Data = Callable[[str], Path]
SMALL = ["imgsz=64", "batch=2"]
SHORT = "budget: {macs: 70%}\nsearch: magnitude\nfinetune: {epochs: 1 step}\ntiming: {repeats: 3}\n"


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["compress", *map(str, words)])
    with pytest.raises(SystemExit) as done:
        cli.main()
    streams = capsys.readouterr()
    return int(done.value.code or 0), streams.out, " ".join(streams.err.split())


def test_one_command_leaves_a_directory_that_is_loaded_without_its_yaml(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], yolo_data: Data, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    dense = yolo.build("yolov8n.yaml", classes=2).model
    save_file(dense.state_dict(), tmp_path / "dense.safetensors")
    (tmp_path / "mine.yaml").write_text(SHORT)
    out = tmp_path / "out"
    words = ["prune", "--yolo", "yolov8n.yaml", "--weights", tmp_path / "dense.safetensors", "--workdir", out]
    words += ["--recipe", tmp_path / "mine.yaml", "--data", yolo_data("detect"), "--quiet", "--json"]
    code, text, error = run(monkeypatch, capsys, *words, "--cfg-options", *SMALL)
    assert code == 0, error
    report = json.loads(text)
    assert report["dense"]["params"] == sum(p.numel() for p in dense.parameters())
    compact = yolo.load(out)
    assert sum(p.numel() for p in compact.model.parameters()) == report["pruned"]["params"]
    assert compact.overrides["imgsz"] == 64
    code, _, error = run(monkeypatch, capsys, "export", out, "--onnx", tmp_path / "x.onnx")
    assert code == 2 and ".export(format='onnx')" in error


def test_preview_needs_no_data(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["preview", "--yolo", "yolov8n.yaml", "--recipe", "yolo_half", "--input", "3,64,64", "--json"]
    code, out, error = run(monkeypatch, capsys, *words)
    assert code == 0, error
    preview = json.loads(out)
    assert preview["reachable"] and preview["groups"]
    assert preview["dense"]["params"] == sum(p.numel() for p in yolo.build("yolov8n.yaml").model.parameters())


def test_a_yaml_for_poses_is_built_for_the_keypoints_of_the_data(tmp_path: Path) -> None:
    data = str(make_data(tmp_path, "pose", keypoints=5))
    network, task = build_for_command("yolov8n-pose.yaml", data, SMALL, False, 0)
    assert network.model[-1].kpt_shape == [5, 3] and network.names == {0: "red", 1: "green"}  # type: ignore[index]
    built_again: Any = task.architecture.build()
    assert built_again.model[-1].kpt_shape == [5, 3]


def test_the_closing_hint_works_as_it_is_printed() -> None:
    code = "import compress; print(compress.yolo.load.__name__, compress.yolo.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["load", "compress.yolo"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--yolo", "yolov8n.yaml", "--cfg-options", "imgsz=64"], r"--cfg-options: .*Give the size as --input 3,320"),
        (["--yolo", "yolov8n.yaml", "--checkpoint", "x.pth"], r"--checkpoint: only for --mmdet"),
        (["--model", "timm:resnet18", "--trust-pickle"], r"--trust-pickle: only for --yolo"),
    ],
)
def test_mistakes_of_a_preview_are_explained(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = run(monkeypatch, capsys, "preview", "--budget", "50%", *words)
    assert code == 2 and re.search(message, error), error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"--model, --mmdet or --yolo: expected one of the three"),
        (["--yolo", "yolov8n.yaml", "--model", "timm:resnet18"], r"--yolo: expected one of the three"),
        (["--yolo", "yolov8n.yaml"], r"--data: expected a data YAML for --yolo"),
        (
            ["--yolo", "yolov8n.yaml", "--data", "DATA", "--input", "1,3,64,64"],
            r"--input: not for --yolo; see --weights",
        ),
        (["--yolo", "yolov8n.yaml", "--data", "DATA", "--cfg-options", "epochs=3"], r"epochs: is set elsewhere here"),
        (["--yolo", "nowhere.pt", "--data", "DATA"], r"nowhere\.pt: no such file"),
        (["--model", "timm:resnet18", "--trust-pickle"], r"--trust-pickle: only for --yolo"),
    ],
)
def test_mistakes_are_explained(
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    yolo_data: Data,
    tmp_path: Path,
) -> None:
    words = [str(yolo_data("detect")) if word == "DATA" else word for word in words]
    code, _, error = run(monkeypatch, capsys, "prune", "--budget", "50%", "--workdir", tmp_path / "out", *words)
    assert code == 2 and re.search(message, error), error


def test_commands_of_the_guide_run_every_recipe_in_shortened_form(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], yolo_data: Data, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    told = [words for block in blocks() if block.language == "bash" for words in commands(block.text)]
    ours = [words[1:] for words in told if words[:2] == ["compress", "prune"] and "--yolo" in words]
    tried = set()
    for words in ours:
        name = words[words.index("--recipe") + 1]
        weights = words[words.index("--yolo") + 1]
        assert f"--yolo {weights} " in packaged_recipes()[name].read_text()
        task = "segment" if "-seg" in weights else "detect"
        torch.manual_seed(0)
        yolo.build(f"{Path(weights).stem}.yaml", classes=2).save("small.pt")
        strip_optimizer("small.pt")  # as at the end of a training, which freezes all parameters
        short = f"extends: {name}\nsearch: {{epochs: 2 steps}}\nfinetune: {{epochs: 2 steps}}\ntiming: {{repeats: 3}}\n"
        (tmp_path / "mine.yaml").write_text(short)
        swaps = {"--yolo": "small.pt", "--data": str(yolo_data(task)), "--recipe": "mine.yaml", "--workdir": name}
        for option, value in swaps.items():
            words[words.index(option) + 1] = value
        words = words[: words.index("--cfg-options")] if "--cfg-options" in words else words
        code, out, error = run(monkeypatch, capsys, *words, "--quiet", "--json", "--cfg-options", *SMALL)
        assert code == 0, error
        report = json.loads(out)
        assert report["pruned"]["macs"] <= Recipe.load(name).budget.limits["macs"] * report["dense"]["macs"]
        assert [h["step"] for h in report["history"] if h["stage"] == "finetune" and "distil" in h] == [1, 2]
        tried.add(name)
    assert tried == {name for name in packaged_recipes() if name.startswith("yolo_")}
