"""Small images with coloured rectangles, and their labels in the formats of Ultralytics' data YAMLs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

SIDE, COUNT = 64, 4
NAMES = ("red", "green")
KEYPOINTS = 17


def make_data(folder: Path, task: str, keypoints: int = KEYPOINTS) -> Path:
    """Write images and labels; return the data YAML, or the folder for classification."""
    random = np.random.default_rng(0)
    for number in range(COUNT):
        cls = number % 2
        pixels = random.integers(0, 60, (SIDE, SIDE, 3), dtype=np.uint8)
        left, top = (int(v) for v in random.integers(4, 24, 2))
        pixels[top : top + 30, left : left + 24, cls] = 230
        if task == "classify":
            for split in ("train", "val"):
                path = folder / split / NAMES[cls] / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(path)
            continue
        for part in ("images", "labels"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / "images" / f"{number}.png")
        label = _label(task, left / SIDE, top / SIDE, 24 / SIDE, 30 / SIDE, keypoints)
        (folder / "labels" / f"{number}.txt").write_text(f"{cls} {' '.join(f'{v:.5f}' for v in label)}\n")
    if task == "classify":
        return folder
    text = f"path: {folder}\ntrain: images\nval: images\nnames: [{', '.join(NAMES)}]\n"
    text += f"kpt_shape: [{keypoints}, 3]\nflip_idx: {list(range(keypoints))}\n" * (task == "pose")
    (folder / "data.yaml").write_text(text)
    return folder / "data.yaml"


def _label(task: str, left: float, top: float, width: float, height: float, keypoints: int) -> list[float]:
    box = [left + width / 2, top + height / 2, width, height]
    corners = [left, top, left + width, top, left + width, top + height, left, top + height]
    if task in ("segment", "obb"):
        return corners
    return box + ([left, top, 2.0] * keypoints if task == "pose" else [])
