"""Channel-wise distillation of a detector's feature maps."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from mmengine.config import Config

import compress
import compress.mmdet
from compress.mmdet.distill import add_distillation_loss, channelwise_loss, record_feature_maps
from compress.recipe import Distill


def test_channelwise_is_the_divergence_of_each_channels_map() -> None:
    random = torch.Generator().manual_seed(0)
    sizes = [(2, 3, 2, 3), (2, 3, 1, 2)]
    student, teacher = ([torch.randn(s, generator=random, dtype=torch.float64) for s in sizes] for _ in range(2))
    t, levels = 2.5, []
    for s, y in zip(student, teacher, strict=True):
        total = 0.0
        for n in range(2):
            for c in range(3):
                a, b = ([math.exp(v / t) for v in m[n, c].flatten().tolist()] for m in (s, y))
                total += sum(q / sum(b) * math.log(q / sum(b) / (p / sum(a))) for p, q in zip(a, b, strict=True))
        levels.append(t * t * total / 3 / 2)
    assert float(channelwise_loss(student, teacher, t)) == pytest.approx(sum(levels) / 2, rel=1e-5)
    with pytest.raises(ValueError, match=r"distill: the dense detector's maps have shape \[2, 3, 2, 3\], the compact"):
        channelwise_loss([student[0][:, :2]], [teacher[0]], t)


def test_a_taught_student_has_one_more_loss_and_afterwards_no_longer(cfg: Config) -> None:
    torch.manual_seed(0)
    teacher, task = compress.mmdet.build(cfg), compress.mmdet.task(cfg)
    teacher.eval()
    student: Any = copy.deepcopy(teacher)
    with torch.no_grad():
        student.neck.lateral_convs[0].conv.weight += 0.1 * torch.randn(32, 24, 1, 1)
    batch = next(iter(task.train))  # type: ignore[arg-type]
    data = task._prepare(batch)
    with record_feature_maps(student, ["neck"]) as mine, record_feature_maps(teacher, ["neck"]) as given:
        student.extract_feat(data["inputs"])
        teacher.extract_feat(data["inputs"])  # type: ignore[operator]
    with add_distillation_loss(student, teacher, compress.Plan({}, {}), Distill(temperature=1.0, weight=3.0)):
        losses = student(**data, mode="loss")
        assert student.parse_losses(losses)[0] > losses["loss_distil"] > 0
    torch.testing.assert_close(losses["loss_distil"], 3 * channelwise_loss(mine, given))
    assert "loss_distil" not in student(**data, mode="loss")
    with add_distillation_loss(student, teacher, compress.Plan({}, {}), None):
        assert "loss_distil" not in student(**data, mode="loss")


def test_a_teachers_maps_are_compared_on_the_channels_that_are_left(cfg: Config) -> None:
    torch.manual_seed(0)
    detector: Any = compress.mmdet.build(cfg)
    detector.eval()
    name = "neck.fpn_convs.0.conv"
    shapes = {
        f"{name}.{leaf}": tuple(getattr(detector.neck.fpn_convs[0].conv, leaf).shape) for leaf in ("weight", "bias")
    }
    left = torch.arange(1, 32, 2).numpy()
    plan = compress.Plan({}, {}, slices={key: {0: left} for key in shapes}, shapes=shapes)
    student: Any = plan.apply_(copy.deepcopy(detector))
    from compress.mmdet.distill import KeptChannels

    x = torch.randn(1, 3, 64, 64)
    with (
        torch.no_grad(),
        record_feature_maps(student, ["neck"]) as mine,
        record_feature_maps(detector, ["neck"]) as given,
    ):
        student.extract_feat(x)
        detector.extract_feat(x)
    kept = KeptChannels(detector, plan, ["neck"]).select(given, mine, x)
    assert mine[0].shape[1] == 16
    assert torch.equal(kept[0], given[0][:, left])
    assert float(channelwise_loss(mine, kept)) == pytest.approx(0.0, abs=1e-6)
