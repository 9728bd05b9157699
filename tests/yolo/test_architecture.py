"""The architecture in a saved directory builds layers, and nothing else that a file may name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ultralytics", reason="the extra yolo is not installed")
from compress import yolo
from compress.yolo.architecture import Architecture


@pytest.fixture(scope="module")
def architecture() -> Architecture:
    return Architecture.of(yolo.build("yolov8n.yaml", classes=2).model, 96)


def test_network_that_is_built_has_the_layers_of_the_first(architecture: Architecture, tmp_path: Path) -> None:
    architecture.save(tmp_path)
    network: Any = Architecture.read(tmp_path).build()
    dense = yolo.build("yolov8n.yaml", classes=2).model
    assert {n: p.shape for n, p in network.named_parameters()} == {n: p.shape for n, p in dense.named_parameters()}
    assert network.names == dense.names and Architecture.read(tmp_path) == architecture


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (
            ("yaml", "backbone", 0, 2),
            "torch_safe_load",
            r"yaml\.backbone\[0\]: expected a layer of Ultralytics or torch",
        ),
        (
            ("yaml", "backbone", 0, 2),
            "nn.functional",
            r"expected a layer of Ultralytics or torch\.nn; got 'nn\.functional'",
        ),
        (("yaml", "backbone", 0, 2), "torchvision.ops.nms", r"expected a layer of Ultralytics"),
        (("yaml", "backbone", 0, 2), "TorchVision", r"expected a layer of Ultralytics"),
        (("yaml", "backbone", 0, 3), [{"a": 1}], r"expected a number of repeats and a list of plain arguments"),
        (("yaml", "backbone", 0), ["x"], r"expected \[from, repeats, layer, arguments\]"),
        (("yaml", "activation"), "__import__('os').system('true')", r"yaml\.activation: expected one of torch"),
        (("yaml", "activation"), "nn.functional(1)", r"yaml\.activation: expected one of torch"),
        (("yaml", "head"), 3, r"expected a dict with backbone and head"),
        (("yaml", "head"), [], r"expected a dict with backbone and head"),
        (("names",), [1], r"names: expected a list of strings"),
        (("image_size",), "big", r"image_size: expected a number of pixels; got 'big'"),
    ],
)
def test_file_that_names_anything_else_is_refused(
    place: tuple[Any, ...], value: Any, message: str, architecture: Architecture, tmp_path: Path
) -> None:
    architecture.save(tmp_path)
    content = json.loads((tmp_path / "yolo.json").read_text())
    owner = content
    for key in place[:-1]:
        owner = owner[key]
    owner[place[-1]] = value
    (tmp_path / "yolo.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        Architecture.read(tmp_path)


def test_activation_of_torch_is_built(architecture: Architecture, tmp_path: Path) -> None:
    yaml = {**copy.deepcopy(architecture.yaml), "activation": "nn.ReLU()"}
    Architecture(yaml, architecture.names).save(tmp_path)
    network: Any = Architecture.read(tmp_path).build()
    assert type(network.model[0].act).__name__ == "ReLU"


@pytest.mark.parametrize(
    ("place", "value"), [(("nc",), "x"), (("head", 0, 0), "x"), (("scales",), 3), (("backbone", 0, 3), ["a", 3, 2])]
)
def test_values_that_do_not_go_together_are_refused_with_the_file(
    place: tuple[Any, ...], value: Any, architecture: Architecture, tmp_path: Path
) -> None:
    yaml = copy.deepcopy(architecture.yaml)
    owner: Any = yaml
    for key in place[:-1]:
        owner = owner[key]
    owner[place[-1]] = value
    Architecture(yaml, architecture.names).save(tmp_path)
    with pytest.raises(ValueError, match=r"yolo\.json: the architecture cannot be built: .*Give the architecture"):
        Architecture.read(tmp_path).build(str(tmp_path / "yolo.json"))


def test_file_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "yolo.json").write_text("[]")
    with pytest.raises(ValueError, match=r"yolo\.json: expected a JSON object; got .*list"):
        Architecture.read(tmp_path)


def test_missing_key_is_named(tmp_path: Path) -> None:
    (tmp_path / "yolo.json").write_text('{"names": []}')
    with pytest.raises(ValueError, match=r"yolo\.json: image_size is missing\. Give the architecture yourself"):
        Architecture.read(tmp_path)
