"""The replacements of mmcv's compiled ops against plain PyTorch written from the definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compress.mmdet import mmcv_ops as ext
from compress.mmdet.install_ops import install_mmcv_ops

install_mmcv_ops()

from mmcv.ops import RoIAlign, RoIPool, batched_nms, nms, sigmoid_focal_loss, soft_nms  # noqa: E402


def _boxes(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    corner, size = 60 * torch.rand(count, 2, generator=random), 1 + 30 * torch.rand(count, 2, generator=random)
    return torch.cat([corner, corner + size], 1), torch.randperm(count, generator=random).float().add(1) / count


def _overlap(a: Tensor, b: Tensor, offset: int) -> float:
    wide = max(0.0, float(min(a[2], b[2]) - max(a[0], b[0]) + offset))
    high = max(0.0, float(min(a[3], b[3]) - max(a[1], b[1]) + offset))
    area = [float((t[2] - t[0] + offset) * (t[3] - t[1] + offset)) for t in (a, b)]
    return wide * high / (sum(area) - wide * high)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("threshold", [0.1, 0.5])
def test_nms_keeps_what_no_better_kept_box_overlaps(threshold: float, offset: int) -> None:
    boxes, scores = _boxes(80)
    kept: list[int] = []
    for i in scores.argsort(descending=True).tolist():
        if all(_overlap(boxes[i], boxes[j], offset) <= threshold for j in kept):
            kept.append(i)
    dets, inds = nms(boxes, scores, threshold, offset=offset)
    assert inds.tolist() == kept
    assert torch.equal(dets, torch.cat([boxes, scores[:, None]], 1)[kept])
    assert len(nms(boxes[:0], scores[:0], threshold)[1]) == 0


def test_nms_of_batches_never_compares_classes() -> None:
    boxes, scores = _boxes(40)
    classes = torch.arange(40) % 3
    kept = batched_nms(boxes, scores, classes, {"type": "nms", "iou_threshold": 0.3})[1]
    alone = [torch.where(classes == c)[0][nms(boxes[classes == c], scores[classes == c], 0.3)[1]] for c in range(3)]
    assert sorted(kept.tolist()) == sorted(torch.cat(alone).tolist())


@pytest.mark.parametrize("method", ["naive", "linear", "gaussian"])
def test_soft_nms_lowers_scores_by_overlap(method: str) -> None:
    boxes, scores = _boxes(30)
    left, order = {i: float(s) for i, s in enumerate(scores)}, []
    while left:
        best = max(left, key=left.__getitem__)
        order.append((best, left.pop(best)))
        for i in list(left):
            shared = _overlap(boxes[best], boxes[i], 0)
            hit = 0.0 if method == "naive" else 1 - shared
            left[i] *= (
                float(torch.exp(torch.tensor(-(shared**2) / 0.5)))
                if method == "gaussian"
                else (hit if shared >= 0.3 else 1.0)
            )
            if left[i] < 0.05:
                del left[i]
    dets, inds = soft_nms(boxes, scores, 0.3, sigma=0.5, min_score=0.05, method=method)
    assert inds.tolist() == [i for i, _ in order]
    torch.testing.assert_close(dets[:, 4], torch.tensor([s for _, s in order]))
    assert torch.equal(dets[:, :4], boxes[inds])
    assert len(soft_nms(boxes[:0], scores[:0])[1]) == 0


def _roi_align(x: Tensor, rois: Tensor, size: int, scale: float, ratio: int, aligned: bool) -> Tensor:
    """Each bin is the mean of points on a regular grid, each point interpolated bilinearly."""
    rows = []
    height, width = x.shape[2:]
    for roi in rois:
        image, (x1, y1, x2, y2) = x[int(roi[0])], (roi[1:] * scale - (0.5 if aligned else 0.0)).tolist()
        bins = [max(y2 - y1, 0.0 if aligned else 1.0) / size, max(x2 - x1, 0.0 if aligned else 1.0) / size]
        count = [ratio or max(1, int(-(-b // 1))) for b in bins]
        out = x.new_zeros(x.shape[1], size, size)
        for i in range(size):
            for j in range(size):
                for a in range(count[0]):
                    for b in range(count[1]):
                        y = y1 + bins[0] * (i + (a + 0.5) / count[0])
                        z = x1 + bins[1] * (j + (b + 0.5) / count[1])
                        if not (-1 <= y <= height and -1 <= z <= width):
                            continue
                        y, z = min(max(y, 0.0), height - 1.0), min(max(z, 0.0), width - 1.0)
                        p, q = min(int(y), height - 1), min(int(z), width - 1)
                        r, s = min(p + 1, height - 1), min(q + 1, width - 1)
                        u, v = y - p, z - q
                        top = image[:, p, q] * (1 - v) + image[:, p, s] * v
                        low = image[:, r, q] * (1 - v) + image[:, r, s] * v
                        out[:, i, j] = out[:, i, j] + (top * (1 - u) + low * u) / (count[0] * count[1])
        rows.append(out)
    return torch.stack(rows)


@pytest.mark.parametrize(("ratio", "aligned"), [(0, True), (2, True), (2, False)])
def test_roi_align_and_its_gradient_are_those_of_the_definition(ratio: int, aligned: bool) -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 9, 11, generator=random, dtype=torch.float64, requires_grad=True)
    rois = torch.tensor([[0, 3.0, 5, 30, 33], [1, -6, 2, 14, 9], [1, 20, 20, 60, 50]], dtype=torch.float64)
    got = RoIAlign(3, 0.25, ratio, aligned=aligned)(x, rois)
    expected = _roi_align(x, rois, 3, 0.25, ratio, aligned)
    torch.testing.assert_close(got, expected)
    weight = torch.randn(got.shape, generator=random, dtype=torch.float64)
    (mine,) = torch.autograd.grad((got * weight).sum(), x, retain_graph=True)
    (reference,) = torch.autograd.grad((expected * weight).sum(), x)
    torch.testing.assert_close(mine, reference)
    assert RoIAlign(3, 0.25)(x, rois[:0]).shape == (0, 3, 3, 3)


def test_focal_loss_and_its_gradient_are_those_of_the_formula() -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(12, 4, generator=random, dtype=torch.float64, requires_grad=True)
    target = torch.arange(12) % 5  # 4 is the background
    p = x.sigmoid()
    hit = target[:, None] == torch.arange(4)
    formula = torch.where(hit, -0.25 * (1 - p) ** 2 * p.log(), -0.75 * p**2 * (1 - p).log())
    got = sigmoid_focal_loss(x, target, 2.0, 0.25, None, "none")
    torch.testing.assert_close(got, formula)
    mine, reference = (torch.autograd.grad(t.sum(), x, retain_graph=True)[0] for t in (got, formula))
    torch.testing.assert_close(mine, reference)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x, rois: RoIPool(2, 1.0)(x, rois), "roi_pool_forward"),
        (lambda x, rois: RoIAlign(2, pool_mode="max")(x, rois), "roi_align with pool_mode='max'"),
    ],
)
def test_an_op_without_counterpart_says_its_name_and_how_to_get_it(call: Any, name: str) -> None:
    with pytest.raises(ext.MissingOp, match=f"mmcv.ops: {name} is not implemented .* install mmcv"):
        call(torch.randn(1, 2, 8, 8), torch.tensor([[0.0, 0, 0, 4, 4]]))
