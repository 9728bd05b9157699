"""Detections are paired by label and box, and the pairs are compared."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from compress.exporters.detection_match import DetectionLimits, Detections, match_detections


def found(*rows: tuple[float, float, int]) -> Detections:
    """Boxes of ten pixels by where they begin, their score and label."""
    boxes = torch.tensor([[x, 0, x + 10, 10] for x, _, _ in rows]).reshape(-1, 4)
    return Detections(boxes, torch.tensor([s for _, s, _ in rows]), torch.tensor([n for _, _, n in rows]))


@pytest.mark.parametrize(
    ("right", "here", "said"),
    [
        ([(0, 0.9, 1), (5, 0.8, 1)], [(5.2, 0.8, 1), (0.1, 0.9, 1)], ""),
        ([(0, 0.9, 1)], [(0.6, 0.9, 1)], r"the file does not find label 1 at \[0.0, 0.0, 10.0, 10.0\]"),
        ([(0, 0.9, 1)], [(0, 0.9, 2)], "the file does not find label 1"),
        ([(0, 0.9, 1)], [(0, 0.9, 1), (30, 0.4, 0)], "only the file finds label 0"),
        ([(0, 0.9, 1)], [(0, 0.902, 1)], "the score of label 1 .* is 0.9020 in the file"),
        ([(0, 0.9, 1), (30, 0.04, 0)], [(0, 0.9, 1)], ""),
        ([(0, 0.9, 1), (30, 0.0505, 0)], [(0, 0.9, 1)], ""),
        ([(0, 0.9, 1), (30, 0.5, 0)], [(0, 0.9, 1), (60, 0.5, 0)], ""),
        ([], [], ""),
    ],
)
def test_detections_are_paired_in_both_directions(right: Any, here: Any, said: str) -> None:
    matched = match_detections([("image 0", found(*right), found(*here))], DetectionLimits(0.05, 2))
    assert bool(matched.wrong) == bool(said) and re.search(said, " ".join(matched.wrong))


def test_masks_that_share_too_little_are_wrong() -> None:
    mask = torch.zeros(1, 10, 10, dtype=torch.bool)
    mask[:, :5] = True
    one = found((0, 0.9, 1))
    pair = (Detections(one.boxes, one.scores, one.labels, m) for m in (mask, mask.roll(1, 1)))
    matched = match_detections([("image 0", *pair)])
    assert matched.overlap == pytest.approx(40 / 60) and "the mask of label 1" in matched.wrong[0]
