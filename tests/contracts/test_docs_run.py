"""The commands of the documents, run in their order on small stand-ins for the networks, weights and images."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from compress.cli import app as cli
from compress.cli.quickstart import Network
from compress.exporters import onnx as exporter
from compress.recipe import Recipe, Timing
from helpers.detectors import data_of, make_pictures
from helpers.documents import blocks, commands
from helpers.tiny_detectors import config_of, detector_that_detects

# tests/cli/test_app.py, tests/mmdet/test_detector_files.py, tests/yolo/test_yolo_commands.py
RUN_ELSEWHERE = {"quickstart", "features", "--yolo"}


def told(detectors: bool) -> list[list[str]]:
    """Every command once, of networks or of detectors; those behind launchers are run by test_processes.py."""
    found = [words for block in blocks() if block.language == "bash" for words in commands(block.text)]
    ours = [words[1:] for words in found if words[0] == "compress" and not RUN_ELSEWHERE & {*words}]
    kind = [words for i, words in enumerate(ours) if words not in ours[:i] and ("--mmdet" in words) == detectors]
    return sorted(kind, key=lambda words: words[0] in ("export", "bench"))  # of what the others leave


def swap(words: list[str], **stand_ins: str) -> list[str]:
    """The command with other values of its options."""
    words = [*words]
    for option, value in stand_ins.items():
        if f"--{option}" in words:
            words[words.index(f"--{option}") + 1] = value
    return words


def shortened(name: str, path: Path) -> str:
    """The recipe itself, with a step instead of epochs."""
    full = Recipe.load(name)
    text = f"extends: {name}\ntiming: {{repeats: 3}}\n"
    text += "search: {epochs: 1 steps}\n" * (full.search.length is not None)
    path.write_text(text + "finetune: {epochs: 1 steps}\n" * (full.finetune is not None))
    return str(path)


def run(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", ["compress", *words])
    with pytest.raises(SystemExit) as done:
        cli.main()
    streams = capsys.readouterr()
    assert not done.value.code, f"compress {' '.join(words)}\n{streams.err}"
    return streams.out


def test_commands_for_networks_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    dense = Network().eval()
    save_file(dense.state_dict(), "r50.safetensors")
    exporter.export(dense, "dense.onnx", torch.randn(2, 1, 8, 8), timing=Timing(repeats=3))
    for words in told(detectors=False):
        mine = swap(words, data="digits", calibration="digits")
        if "--task" in words:
            mine = swap(mine, model="helpers.shapes:small_deeplab", task="helpers.shapes:mask_task")
        elif "compress.cells:digits_network" not in words:  # which is small, and has the choices of its recipe
            mine = swap(mine, model="compress.cli.quickstart:Network")
        if "--recipe" in words:
            name = words[words.index("--recipe") + 1]
            mine = swap(mine, recipe=shortened(name, tmp_path / f"{name}.yaml"))
        if words[0] == "landscape":
            mine += ["--resolution", "3", "--variance-resolution", "3"]
        if "--model" in words and not {"--data", "--task"} & {*words}:
            mine += ["--input", "1,1,8,8"]
        run(mine, monkeypatch, capsys)
    left = {path.name for path in tmp_path.rglob("*")}
    assert {"plan.json", "model.safetensors", "report.html", "r50.onnx"} <= left


def test_commands_for_detectors_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    cfg: Any = config_of("RetinaNet")
    pictures = make_pictures(tmp_path / "pictures", count=3)
    (pictures / "boxes.json").write_text(
        (pictures / "boxes.json").read_text().replace('"categories": [', '"categories": [{"id": 2, "name": "ring"}, ')
    )
    cfg.merge_from_dict({**data_of(pictures, masks=False), "custom_hooks": []})
    for loader in (cfg.train_dataloader, cfg.val_dataloader):
        loader.dataset.metainfo = {"classes": ("square", "disc", "ring")}  # as many as it finds
    cfg.dump(tmp_path / "dense.py")
    torch.save({"state_dict": detector_that_detects("RetinaNet").state_dict(), "meta": {}}, "detector.pth")
    channels = "target: {channels: true}\nbudget: {dims: 60%}\nsearch: {method: netslim, epochs: 1 steps, lr: 1e-5}\n"
    Path("mine.yaml").write_text(f"{channels}timing: {{repeats: 3}}\n")  # of a network without attention
    done = [run(swap(words, mmdet="dense.py", recipe="mine.yaml"), monkeypatch, capsys) for words in told(True)]
    assert "detections" in done[-1]
    assert (tmp_path / "detector.onnx").exists()
