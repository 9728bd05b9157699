"""A pruned network is a YOLO again: exported, trained and validated at its widths, saved and loaded without pickle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import compress

pytest.importorskip("ultralytics", reason="the extra yolo is not installed")
from compress import yolo
from helpers.random_plans import randomize_

Data = Callable[[str], Path]
SMALL = {"imgsz": 64, "batch": 2, "device": "cpu", "workers": 0, "plots": False, "verbose": False}


def prune(spec: str, classes: int = 2) -> Any:
    torch.manual_seed(0)
    network = yolo.build(spec, classes=classes).model
    randomize_(network, torch.rand(2, 3, 64, 64))
    recipe = {"budget": "60%", "search": "magnitude", "timing": {"repeats": 3}}
    return compress.prune(network, recipe, example_inputs=torch.rand(1, 3, 64, 64), quiet=True)


def count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def same_bits(a: nn.Module, b: nn.Module) -> bool:
    theirs = b.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in a.state_dict().items())


@pytest.fixture(scope="module")
def pruned() -> Any:
    return prune("yolov8n.yaml")


@pytest.mark.filterwarnings("ignore:You are using the legacy TorchScript-based ONNX export")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("spec", ["yolov8n", "yolov10n", "yolo11n-seg", "yolo26n"])
def test_exported_file_computes_what_the_network_computes(spec: str, tmp_path: Path) -> None:
    """C2f is exported by other code than runs in training, with an attribute that holds its width."""
    runtime = pytest.importorskip("onnxruntime")
    network: Any = prune(f"{spec}.yaml").model
    network.pt_path = str(tmp_path / "pruned.pt")  # the file is written beside it
    file = yolo.PrunedYOLO(network).export(format="onnx", imgsz=64, device="cpu", simplify=False, end2end=False)
    images = torch.rand(1, 3, 64, 64)
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    got = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    network.eval()
    network.model[-1].end2end = False
    with torch.no_grad():
        expected = network(images)[0]
    expected = expected if isinstance(expected, (list, tuple)) else [expected]
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


def test_saved_network_is_loaded_bit_equal_with_and_without_its_yaml(pruned: Any, tmp_path: Path) -> None:
    yolo.save(pruned, tmp_path / "out")
    for model in (None, "yolov8n.yaml", yolo.build("yolov8n.yaml", classes=2)):
        reloaded = yolo.load(tmp_path / "out", model)
        assert same_bits(reloaded.model, pruned.model) and len(reloaded.model.names) == 2
    assert not [path for path in (tmp_path / "out").iterdir() if path.suffix == ".pt"]
    (tmp_path / "out" / "yolo.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"expected the architecture of the network; .*yolo\.load\(directory"):
        yolo.load(tmp_path / "out")
    with pytest.raises(compress.PlanError, match="this plan was made for another model"):
        yolo.load(tmp_path / "out", "yolo11n.yaml")
    with pytest.raises(ValueError, match=r"expected the YAML of the dense network; its weights are in the directory"):
        yolo.load(tmp_path / "out", "yolov8n.pt")


def test_path_without_a_plan_is_no_saved_network(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path / "best.pt"):
        with pytest.raises(FileNotFoundError, match=r"expected a directory written by save\(\).*compress\.yolo\.build"):
            yolo.load(path)


def test_training_of_a_reloaded_network_goes_on_with_its_widths(
    pruned: Any, yolo_data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    yolo.save(pruned, tmp_path / "out")
    model, data = yolo.load(tmp_path / "out"), str(yolo_data("detect"))
    shapes = {name: value.shape for name, value in pruned.model.state_dict().items()}
    model.train(data=data, epochs=1, project=str(tmp_path / "runs"), amp=False, **SMALL)
    assert {name: value.shape for name, value in model.model.state_dict().items()} == shapes
    assert not same_bits(model.model, pruned.model)
    model.train(data=data, epochs=1, project=str(tmp_path / "runs"), amp=False, **SMALL)  # from its own checkpoint
    assert count(model.model) == count(pruned.model)
    assert "metrics/mAP50(B)" in model.val(data=data, **SMALL).results_dict
    assert len(model.predict(torch.rand(1, 3, 64, 64), **SMALL)) == 1
    yolo.save(model, tmp_path / "again")
    assert same_bits(yolo.load(tmp_path / "again").model, model.model)


def test_training_on_other_classes_or_devices_is_refused(
    pruned: Any, yolo_data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = yolo_data("detect").read_text().replace("[red, green]", "[red, green, blue]")
    (tmp_path / "three.yaml").write_text(text)
    model = yolo.PrunedYOLO(pruned.model)
    with pytest.raises(ValueError, match=r"expected 2 classes, those of the network; got 3\. Train the dense network"):
        model.train(data=str(tmp_path / "three.yaml"), epochs=1, project=str(tmp_path), **SMALL)
    with pytest.raises(ValueError, match=r"resume: .*PrunedYOLO\(compress\.yolo\.build\("):
        model.train(data=str(tmp_path / "three.yaml"), resume=True)
    with pytest.raises(ValueError, match="plan: expected the plan that the network was pruned by"):
        yolo.save(model, tmp_path / "out")
