"""Images of rectangles, ellipses and triangles with boxes and masks in COCO's format, drawn at random."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

CLASSES = ("rectangle", "ellipse", "triangle")
SIZE = 96
SPLITS = {"train": (1200, 0), "val": (100, 1)}  # number of images, seed

Polygon = list[tuple[float, float]]


def write_shapes(folder: Path, splits: dict[str, tuple[int, int]] | None = None) -> None:
    """Write FOLDER/SPLIT/N.png and FOLDER/SPLIT.json for each split that is not there yet."""
    for split, (count, seed) in (splits or SPLITS).items():
        if (folder / f"{split}.json").exists():
            continue
        (folder / split).mkdir(parents=True, exist_ok=True)
        generator, annotations = np.random.default_rng(seed), []
        for index in range(count):
            image, shapes = draw_image(generator)
            image.save(folder / split / f"{index}.png")
            for category, polygon in shapes:
                annotations.append({"id": len(annotations) + 1, "image_id": index} | annotate(category, polygon))
        images = [{"id": i, "file_name": f"{i}.png", "height": SIZE, "width": SIZE} for i in range(count)]
        categories = [{"id": i, "name": name} for i, name in enumerate(CLASSES)]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (folder / f"{split}.json").write_text(json.dumps(content), encoding="utf-8")


def draw_image(generator: np.random.Generator) -> tuple[Image.Image, list[tuple[int, Polygon]]]:
    """Return a noisy image with one to three shapes that do not overlap; colours say nothing about the class."""
    background = generator.integers(40, 216, 3)
    image = Image.fromarray(np.broadcast_to(background.astype(np.uint8), (SIZE, SIZE, 3)).copy())
    draw = ImageDraw.Draw(image)
    for _ in range(4):  # lines that belong to no shape
        draw.line([tuple(generator.integers(0, SIZE, 2)) for _ in range(2)], _colour(generator, background), 1)
    shapes: list[tuple[int, Polygon]] = []
    boxes: list[tuple[float, float, float, float]] = []
    wanted = int(generator.integers(1, 4))
    for _ in range(20):
        if len(shapes) == wanted:
            break
        width, height = generator.uniform(22, 48, 2)
        left, top = generator.uniform(0, SIZE - width), generator.uniform(0, SIZE - height)
        box = (left, top, left + width, top + height)
        if any(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in boxes):
            continue
        category = int(generator.integers(len(CLASSES)))
        polygon = outline(category, box, float(generator.random()))
        draw.polygon(polygon, _colour(generator, background))
        boxes.append(box)
        shapes.append((category, polygon))
    noise = generator.normal(0, 12, (SIZE, SIZE, 3))
    pixels = np.clip(np.asarray(image, dtype=np.float64) + noise, 0, 255).astype(np.uint8)
    return Image.fromarray(pixels), shapes


def outline(category: int, box: tuple[float, float, float, float], apex: float) -> Polygon:
    """Return the polygon of a shape that touches all sides of its box; `apex` places the tip of a triangle."""
    left, top, right, bottom = box
    if CLASSES[category] == "rectangle":
        return [(left, top), (right, top), (right, bottom), (left, bottom)]
    if CLASSES[category] == "triangle":
        return [(left + apex * (right - left), top), (right, bottom), (left, bottom)]
    angles = [2 * math.pi * i / 32 for i in range(32)]
    middle, radii = ((left + right) / 2, (top + bottom) / 2), ((right - left) / 2, (bottom - top) / 2)
    return [(middle[0] + radii[0] * math.cos(a), middle[1] + radii[1] * math.sin(a)) for a in angles]


def annotate(category: int, polygon: Polygon) -> dict[str, Any]:
    """Return box, mask and area of a shape as COCO writes them."""
    xs, ys = [x for x, _ in polygon], [y for _, y in polygon]
    shifted = [*polygon[1:], polygon[0]]
    area = abs(sum(x * v - u * y for (x, y), (u, v) in zip(polygon, shifted, strict=True))) / 2
    return {
        "category_id": category,
        "bbox": [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)],
        "segmentation": [[round(value, 2) for point in polygon for value in point]],
        "area": area,
        "iscrowd": 0,
    }


def _colour(generator: np.random.Generator, background: np.ndarray) -> tuple[int, int, int]:
    """Return a colour that differs from the background by 40 or more in the mean."""
    while True:
        colour = generator.integers(0, 256, 3)
        if abs(colour.astype(int) - background).mean() >= 40:
            return (int(colour[0]), int(colour[1]), int(colour[2]))
