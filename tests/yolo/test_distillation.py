"""Distillation of heads, against sums that are written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("ultralytics", reason="the extra yolo is not installed")
from compress.yolo.distillation import TaughtCriterion, distillation_loss


def head(seed: int, bins: int = 3, **others: Tensor) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    y = {"boxes": torch.randn(2, 4 * bins, 5, generator=generator), "feats": [torch.zeros(2, 1, 1, 1)]}
    return {**y, "scores": torch.randn(2, 3, 5, generator=generator), **others}


def by_hand(s: dict[str, Any], t: dict[str, Any], temperature: float) -> float:
    total = weights = 0.0
    for image in range(2):
        for i in range(5):
            weight = float(t["scores"][image, :, i].sigmoid().max())
            p = (t["scores"][image, :, i] / temperature).sigmoid()
            q = (s["scores"][image, :, i] / temperature).sigmoid()
            distance = float(-(p * q.log() + (1 - p) * (1 - q).log()).sum())
            for side in range(4):
                p, q = ((y["boxes"][image, 3 * side : 3 * side + 3, i] / temperature).softmax(0) for y in (t, s))
                distance += float((p * (p / q).log()).sum()) / 4
            if "angle" in t:
                distance += float((t["angle"][image, 0, i] - s["angle"][image, 0, i]).abs())
            total, weights = total + weight * distance, weights + weight
    return total / weights


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_loss_is_the_weighted_mean_over_positions(temperature: float) -> None:
    s, t = head(0, angle=torch.rand(2, 1, 5)), head(1, angle=torch.rand(2, 1, 5))
    assert float(distillation_loss(s, t, temperature)) == pytest.approx(by_hand(s, t, temperature), rel=1e-5)
    assert float(distillation_loss((None, s), (None, t), temperature)) == pytest.approx(by_hand(s, t, temperature))


def test_end_to_end_network_is_taught_by_both_heads() -> None:
    s, t = ({"one2many": head(k), "one2one": head(k + 5)} for k in (0, 1))
    expected = (by_hand(s["one2many"], t["one2many"], 1.0) + by_hand(s["one2one"], t["one2one"], 1.0)) / 2
    assert float(distillation_loss(s, t, 1.0)) == pytest.approx(expected, rel=1e-5)


def test_sides_that_are_predicted_directly_have_an_absolute_distance() -> None:
    s, t = head(0, bins=1), head(0, bins=1)
    s["boxes"] = t["boxes"] + 0.5
    with_boxes = float(distillation_loss(s, t, 1.0)) - float(distillation_loss(t, t, 1.0))
    assert with_boxes == pytest.approx(0.5, rel=1e-5)


def test_classifier_is_taught_by_the_divergence_of_its_classes() -> None:
    s, t = torch.randn(4, 3), torch.randn(4, 3)
    expected = (t.softmax(1) * (t.log_softmax(1) - s.log_softmax(1))).sum(1).mean()
    torch.testing.assert_close(distillation_loss(s, t, 1.0), expected)


def test_criterion_adds_the_distance_for_each_image_and_reports_it() -> None:
    s, t = head(0), head(1)

    class Teacher(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return t

    criterion = TaughtCriterion(
        lambda y, batch: (torch.tensor([1.0, 2.0]), {"box": torch.tensor(1.0)}), Teacher(), 3, 1
    )
    total, items = criterion(s, {"img": torch.zeros(2, 3, 8, 8)})
    assert float(total) == pytest.approx(3 + 2 * 3 * by_hand(s, t, 1.0), rel=1e-5)
    assert items.keys() == {"box", "distil"} and float(F.relu(items["distil"])) > 0
    criterion.update()  # a criterion without weights that change
