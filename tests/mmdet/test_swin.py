"""Cascade Mask R-CNN with Swin-T at full size: counted, sliced, saved and reloaded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import compress
import compress.mmdet
from compress.modules import compact_form_of
from compress.recipe import Target

# isort: split
from mmdet.models.backbones.swin import WindowMSA
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample

CONFIG = "cascade-mask-rcnn_swin-t-p4-w7_fpn_3x_coco"


def _millions(module: nn.Module) -> float:
    return sum(p.numel() for p in module.parameters()) / 1e6


def _config() -> Any:
    few = {"max_per_img": 4, "nms_pre": 20}
    return compress.mmdet.read(CONFIG, {"model.backbone.init_cfg": None, "model.test_cfg.rpn": few})


@pytest.fixture(scope="module")
def detector() -> Any:
    torch.manual_seed(0)
    return MODELS.build(_config().model).eval()


@pytest.fixture(scope="module")
def groups(detector: Any) -> Any:
    target = Target(channels=False, attention=True, mlp=True, include=("backbone",))
    return compress.find_groups(detector, _image(64, 96), target)


def _image(height: int, width: int, seed: int = 0) -> dict[str, Any]:
    shape = (height, width)
    sample = DetDataSample(metainfo={"img_shape": shape, "ori_shape": shape, "scale_factor": (1.0, 1.0)})
    picture = torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(seed))
    return {"inputs": picture, "data_samples": [sample], "mode": "predict"}


def test_the_config_is_the_detector_of_the_table(detector: Any) -> None:
    assert round(_millions(detector)) == 86
    assert round(_millions(detector.backbone)) == 28
    assert [type(head).__name__ for head in detector.roi_head.bbox_head] == ["ConvFCBBoxHead"] * 3


def test_groups_are_the_dimensions_of_attention_and_mlps_of_the_backbone(groups: Any) -> None:
    assert len(groups) == 24  # two a block, 2 + 2 + 6 + 2 blocks
    assert all(g.name.startswith("backbone.") for g in groups)
    assert {g.width for g in groups if g.kind == "attention"} == {32}
    assert {g.width for g in groups if g.kind == "mlp"} == {384, 768, 1536, 3072}


@pytest.mark.parametrize(("left", "whole", "backbone"), [(0.8, (80, 81), (22, 22.5)), (0.6, (74, 75.5), (16, 17.2))])
def test_sliced_is_zeroed_on_every_level_of_the_pyramid(
    left: float, whole: tuple[float, float], backbone: tuple[float, float], detector: Any, groups: Any, tmp_path: Path
) -> None:
    random = torch.Generator().manual_seed(1)
    keep = {g.name: torch.randperm(g.width, generator=random)[: int(left * g.width)].tolist() for g in groups}
    plan = compress.Plan.build(detector, groups, keep)
    sliced = plan.apply_(copy.deepcopy(detector))
    assert whole[0] <= _millions(sliced) <= whole[1]
    assert backbone[0] <= _millions(sliced.backbone) <= backbone[1]
    zeroed = plan.zero_(copy.deepcopy(detector))
    for model in (sliced, zeroed):
        model.backbone.double()
        model.neck.double()
    with torch.no_grad():
        for size in ((64, 96), (75, 110)):  # windows of 7 fit into neither, and patches of 4 not into the second
            x = _image(*size, seed=2)["inputs"].double()
            for small, full in zip(sliced.extract_feat(x), zeroed.extract_feat(x), strict=True):
                torch.testing.assert_close(small, full, rtol=1e-10, atol=1e-12)
    sliced.float()
    compress.Pruned(sliced, plan, compress.Report.of(groups, keep)).save(tmp_path / "saved")
    fresh = compress.load(MODELS.build(_config().model), tmp_path / "saved")
    fresh.eval()
    image = _image(75, 110)
    with torch.no_grad():
        (mine,), (again,) = sliced(**copy.deepcopy(image)), fresh(**copy.deepcopy(image))
    assert torch.equal(mine.pred_instances.bboxes, again.pred_instances.bboxes)
    assert torch.equal(mine.pred_instances.scores, again.pred_instances.scores)


@pytest.mark.parametrize("masked", [False, True])
def test_the_compact_form_of_window_attention_is_the_same_function(masked: bool) -> None:
    torch.manual_seed(0)
    attention = WindowMSA(24, 3, (4, 4)).double().eval()
    nn.init.normal_(attention.relative_position_bias_table)
    x = torch.randn(6, 16, 24, dtype=torch.float64)
    mask = torch.where(torch.rand(3, 16, 16) < 0.3, -100.0, 0.0).double() if masked else None
    expected = attention(x, mask)
    form = compact_form_of(attention)
    assert form is compress.mmdet.WindowMSA
    attention.__class__ = form
    torch.testing.assert_close(attention(x, mask), expected)
    assert compact_form_of(attention) is form


def test_a_plan_of_another_backbone_is_refused_before_anything_changes(detector: Any, groups: Any) -> None:
    plan = compress.Plan.build(detector, groups, {g.name: range(g.width // 2) for g in groups})
    widths = [48, 96, 192, 384]
    narrow = compress.mmdet.read(_config(), {"model.backbone.embed_dims": 48, "model.neck.in_channels": widths})
    other = MODELS.build(narrow.model)
    before = {name: tuple(p.shape) for name, p in other.named_parameters()}
    with pytest.raises(compress.PlanError, match=r"made for another model.*\n  backbone.stages.0.blocks.0"):
        plan.apply_(other)
    assert before == {name: tuple(p.shape) for name, p in other.named_parameters()}
