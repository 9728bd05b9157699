"""A detector as a function of an image finds what mmdet finds, to the bit."""

from __future__ import annotations

import pytest
import torch

from compress.mmdet.exportable_detector import ExportableDetector
from compress.mmdet.predict import predict
from helpers.tiny_detectors import (
    CONFIGS,
    detector_that_detects,
    random_image,
)


@pytest.mark.parametrize("name", CONFIGS)
def test_our_path_finds_what_mmdet_finds_to_the_bit(name: str) -> None:
    detector = detector_that_detects(name)
    ours, count = ExportableDetector(detector), 0
    for size in ((64, 64), (96, 128) if name == "RTMDet" else (75, 101)):  # it takes multiples of 32 only
        right, image = predict(detector, random_image(*size)), random_image(*size)
        with torch.no_grad():
            here = ours(image)
        for key in ("boxes", "scores", "labels"):
            assert torch.equal(here[key], getattr(right, key)), key
        assert (right.masks is None) == ("masks" not in here)
        if right.masks is not None:
            assert float((here["masks"] == right.masks).float().mean()) > 0.9999
        count += int((right.scores > 0.05).sum())
    assert count >= 8
