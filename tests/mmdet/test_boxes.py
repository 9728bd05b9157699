"""Boxes and masks against mmdet's own code and against grid sampling."""

from __future__ import annotations

import torch
from torch import nn

from compress.mmdet.boxes import paste_masks
from compress.mmdet.exportable_detector import ExportableDetector
from helpers.tiny_detectors import (
    detector_that_detects,
    random_image,
)


def test_masks_in_the_frame_of_their_boxes_are_pasted_to_the_same_maps() -> None:
    detector, image = detector_that_detects("Mask R-CNN"), random_image(75, 101)
    with torch.no_grad():
        found, pasted = ExportableDetector(detector, pasted=False)(image), ExportableDetector(detector)(image)
    assert found["masks"].shape == (len(found["boxes"]), 28, 28)
    assert torch.equal(paste_masks(found["masks"], found["boxes"], 75, 101) >= 0.5, pasted["masks"])


def test_a_pasted_mask_is_what_grid_sampling_gives() -> None:
    torch.manual_seed(0)
    masks, boxes = torch.rand(3, 28, 28), torch.tensor([[3.2, 4.1, 30.7, 20.0], [0, 0, 40, 24], [10, 10, 10.0, 15]])
    place = [torch.arange(n) + 0.5 for n in (24, 40)]
    corner, extent = boxes[:, :2], boxes[:, 2:] - boxes[:, :2]
    y, x = ((place[i] - corner[:, 1 - i, None]) / extent[:, 1 - i, None] * 2 - 1 for i in (0, 1))
    grid = torch.stack([x[:, None].expand(3, 24, 40), y[:, :, None].expand(3, 24, 40)], 3)
    right = nn.functional.grid_sample(masks[:, None], grid, align_corners=False)[:, 0]
    torch.testing.assert_close(paste_masks(masks, boxes, 24, 40)[:2], right[:2], rtol=1e-4, atol=1e-5)
    assert bool(paste_masks(masks, boxes, 24, 40)[2].isfinite().all())
