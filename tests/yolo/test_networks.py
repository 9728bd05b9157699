"""Networks from YAMLs and checkpoints: no file is run, nothing is downloaded, and unknown heads are named."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ultralytics", reason="the extra yolo is not installed")
from ultralytics import YOLO
from ultralytics.utils.torch_utils import strip_optimizer

from compress import yolo
from compress.yolo.families import family_of

Data = Callable[[str], Path]


class Bomb:
    """A pickle that writes a file when it is read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "trained.pt"
    torch.manual_seed(0)
    yolo.build("yolov8n.yaml", classes=2).save(path)
    return path


def test_checkpoint_of_ultralytics_is_read_without_running_its_code(checkpoint: Path) -> None:
    torch.manual_seed(0)
    expected = yolo.build("yolov8n.yaml", classes=2).model.half().float().state_dict()
    network = yolo.build(checkpoint).model
    assert all(torch.equal(value, expected[name]) for name, value in network.state_dict().items())


def test_checkpoint_of_a_finished_training_can_be_trained_again(
    checkpoint: Path, yolo_data: Data, tmp_path: Path
) -> None:
    """Ultralytics freezes every parameter in the checkpoints of finished trainings, such as those it publishes."""
    path = shutil.copy(checkpoint, tmp_path / "best.pt")
    strip_optimizer(path)
    fresh = {name: p.requires_grad for name, p in yolo.build("yolov8n.yaml", classes=2).model.named_parameters()}
    assert {name: p.requires_grad for name, p in yolo.build(path).model.named_parameters()} == fresh
    own = YOLO(path)
    assert not any(p.requires_grad for p in own.model.parameters())
    yolo.task(own, data=yolo_data("detect"), imgsz=64, batch=2)
    assert {name: p.requires_grad for name, p in own.model.named_parameters()} == fresh


def test_pickle_is_run_only_when_the_user_says_so(checkpoint: Path, tmp_path: Path) -> None:
    content = torch.load(checkpoint, weights_only=False)
    content["extra"] = Bomb(str(tmp_path / "ran"))
    torch.save(content, tmp_path / "evil.pt")
    with pytest.raises(
        ValueError, match=r"cannot be read without running code .*because a \.pt file is a pickle.*--trust"
    ):
        yolo.build(tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()
    assert len(yolo.build(tmp_path / "evil.pt", trust_pickle=True).model.names) == 2
    assert (tmp_path / "ran").exists()


def test_file_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.pt").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(ValueError, match="is no checkpoint of a network, or cannot be read"):
        yolo.build(tmp_path / "other.pt")


def test_weights_without_a_network_are_refused_with_the_way_to_use_them(tmp_path: Path) -> None:
    torch.save({"model.0.conv.weight": torch.zeros(2)}, tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=r"expected a checkpoint that Ultralytics saved.*give the YAML .*--weights"):
        yolo.build(tmp_path / "weights.pt")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere.yaml", r"nowhere\.yaml: no such YAML; expected a path, or one that comes with Ultralytics"),
        ("nowhere.pt", r"nowhere\.pt: no such file; .*nothing is downloaded"),
        ("yolo11n", r"yolo11n: expected a YAML such as yolo11n\.yaml, or a checkpoint"),
        ("yolo26n-depth.yaml", r"expected one of the heads Detect.*; got Depth\. Networks for detection"),
        ("yolov8s-world.yaml", r"expected one of the heads Detect.*; got WorldDetect"),
    ],
)
def test_networks_that_cannot_be_built_are_refused(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        yolo.build(spec)


def test_yaml_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.yaml").write_text("train: images\nval: images\n")
    with pytest.raises(ValueError, match=r"data\.yaml: expected the YAML of a network, with backbone and head"):
        yolo.build(tmp_path / "data.yaml")


def test_other_networks_are_refused() -> None:
    from ultralytics.nn.tasks import DepthModel

    with pytest.raises(ValueError, match="expected a YOLO object or its network; got Linear"):
        family_of(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="expected a head that is known; got Depth"):
        family_of(DepthModel("yolo26n-depth.yaml", verbose=False))
