"""The drawn shapes of benchmarks/detector_pruning.py: their boxes, areas and pixels, and files in COCO's format."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from benchmarks.shapes import CLASSES, SIZE, annotate, draw_image, outline, write_shapes

BOX = (10.0, 20.0, 50.0, 50.0)


@pytest.mark.parametrize(("name", "part"), [("rectangle", 1.0), ("triangle", 0.5), ("ellipse", math.pi / 4)])
def test_shape_fills_its_part_of_the_box(name: str, part: float) -> None:
    category = CLASSES.index(name)
    annotation = annotate(category, outline(category, BOX, 0.3))
    assert annotation["bbox"] == pytest.approx([10, 20, 40, 30], abs=1e-9)
    assert annotation["area"] == pytest.approx(part * 40 * 30, rel=0.01)
    mask = Image.new("1", (8 * SIZE, 8 * SIZE))
    points = annotation["segmentation"][0]
    ImageDraw.Draw(mask).polygon([8 * value for value in points], 1)
    assert np.asarray(mask).sum() / 64 == pytest.approx(annotation["area"], rel=0.02)


def test_shapes_differ_from_the_background_and_do_not_overlap() -> None:
    generator = np.random.default_rng(0)
    counts = []
    for _ in range(30):
        _, shapes = draw_image(generator)
        boxes = [annotate(*shape)["bbox"] for shape in shapes]
        counts.append(len(boxes))
        for i, (x, y, w, h) in enumerate(boxes):
            assert x >= 0 and y >= 0 and x + w <= SIZE and y + h <= SIZE
            assert all(x + w <= u or u + a <= x or y + h <= v or v + b <= y for u, v, a, b in boxes[:i])
    assert set(counts) == {1, 2, 3}


def test_images_and_annotations_are_written_once_and_a_longer_split_begins_alike(tmp_path: Path) -> None:
    write_shapes(tmp_path / "a", {"val": (3, 1)})
    first = (tmp_path / "a" / "val.json").read_text("utf-8")
    write_shapes(tmp_path / "a", {"val": (9, 5)})
    assert (tmp_path / "a" / "val.json").read_text("utf-8") == first
    write_shapes(tmp_path / "b", {"val": (5, 1)})
    longer = json.loads((tmp_path / "b" / "val.json").read_text("utf-8"))
    content = json.loads(first)
    assert content["annotations"] == [a for a in longer["annotations"] if a["image_id"] < 3]
    assert {a["image_id"] for a in content["annotations"]} == {0, 1, 2}
    assert [image["file_name"] for image in content["images"]] == ["0.png", "1.png", "2.png"]
    assert np.asarray(Image.open(tmp_path / "a" / "val" / "2.png")).shape == (SIZE, SIZE, 3)
