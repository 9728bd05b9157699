"""Data YAMLs that cannot be read are refused before any time is spent, and nothing is downloaded."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ultralytics", reason="the extra yolo is not installed")
from compress import yolo
from helpers.yolo_data import make_data

Build = Callable[[str], Any]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("names: [a, b]\n", r"expected train, val and names .*; it has no train, val"),
        ("train: images\nval: images\n", r"it has no names"),
        (
            "path: /nowhere\ntrain: i\nval: i\nnames: [a, b]\ndownload: https://a.org/b.zip\n",
            r"images not found, missing path '/nowhere/i'\. Set its path: .* best from the root; Ultra",
        ),
        ("path: .\ntrain: nowhere\nval: .\nnames: [a, b]\n", r"train: no such folder or file: .*nowhere"),
        ("train: [unclosed\n", r"not a YAML file"),
        ("path: .\ntrain: .\nval: .\nnames: [a, b]\n", r"data\.yaml: train: train: Error loading data from .*"),
        ("train: .\nval: .\nnc: 3\nnames: [a, b]\n", r"'names' length 2 and 'nc: 3' must match\.*$"),
    ],
)
def test_data_yaml_that_cannot_be_used_is_refused(
    text: str, message: str, yolo_model: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        yolo.task(yolo_model("detect"), data=tmp_path / "data.yaml")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("https://example.org/data.yaml", "expected a data YAML or a folder on this machine; nothing is downloaded"),
        ("nowhere.yaml", "no such file; expected a data YAML with train, val and names"),
    ],
)
def test_data_that_are_not_here_are_refused(data: str, message: str, yolo_model: Build) -> None:
    with pytest.raises(ValueError, match=message):
        yolo.task(yolo_model("detect"), data=data)


def test_folder_of_classes_without_a_training_part_is_refused(yolo_model: Build, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="expected a folder with train/CLASS/IMAGE and val/CLASS/IMAGE; found no train"
    ):
        yolo.task(yolo_model("classify"), data=tmp_path)


@pytest.mark.parametrize(
    ("renamed", "message"), [("", "found no val$"), ("blue", "they have 2 and 2, and differ in blue, red")]
)
def test_folders_of_classes_that_number_the_classes_otherwise_are_refused(
    renamed: str, message: str, yolo_model: Build, tmp_path: Path
) -> None:
    make_data(tmp_path, "classify")
    if renamed:
        (tmp_path / "val" / "red").rename(tmp_path / "val" / renamed)
    else:
        shutil.rmtree(tmp_path / "val")
    with pytest.raises(ValueError, match=message):
        yolo.task(yolo_model("classify"), data=tmp_path)


def test_poses_need_the_number_of_keypoints(yolo_model: Build, tmp_path: Path) -> None:
    (tmp_path / "data.yaml").write_text("train: images\nval: images\nnames: [a, b]\n")
    with pytest.raises(ValueError, match="it has no kpt_shape"):
        yolo.task(yolo_model("pose"), data=tmp_path / "data.yaml")


@pytest.mark.parametrize("part", ["train", "val"])
def test_images_without_labels_are_refused_because_they_measure_nothing(
    part: str, yolo_model: Build, tmp_path: Path
) -> None:
    make_data(tmp_path / "good", "detect")
    shutil.copytree(tmp_path / "good" / "images", tmp_path / "bare" / "images")
    folders = {"train": tmp_path / "good", "val": tmp_path / "good"} | {part: tmp_path / "bare"}
    lines = [f"{name}: {folder / 'images'}\n" for name, folder in folders.items()]
    (tmp_path / "data.yaml").write_text(f"{''.join(lines)}names: [red, green]\n")
    with pytest.raises(ValueError, match=rf"{part}: .*[Ll]abels.* found .*The labels of images/a\.jpg are in labels"):
        yolo.task(yolo_model("detect"), data=tmp_path / "data.yaml")


def test_images_that_are_left_out_are_counted_and_named(yolo_model: Build, tmp_path: Path) -> None:
    data = make_data(tmp_path, "detect")
    (tmp_path / "labels" / "1.txt").write_text("7 0.5 0.5 0.2 0.2\n")
    with pytest.warns(UserWarning, match=r"train: 1 of 4 images are left out, the first with the labels .*1\.txt"):
        yolo.task(yolo_model("detect"), data=data)


def test_message_about_many_damaged_labels_is_short(yolo_model: Build, tmp_path: Path) -> None:
    data = make_data(tmp_path, "detect")
    for file in (tmp_path / "labels").iterdir():
        file.write_text("7 0.5 0.5 0.2 0.2\n")
    with pytest.raises(ValueError, match=r"Label class 7 exceeds dataset class count 2") as error:
        yolo.task(yolo_model("detect"), data=data)
    assert len(str(error.value)) < 700
