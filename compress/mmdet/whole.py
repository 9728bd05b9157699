"""Detectors as functions of an image alone: features or detections, in operations that a graph can hold.

The image is RGB, 0 to 255, of any height and width: order of the channels, normalisation and padding are inside. Boxes
are in its pixels. What mmdet's heads do is written anew here; they lend their layers and their settings.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ..exporters.call import ExportError
from ..exporters.operators import padded, regions, top
from ..shell import shell
from .boxes import decode, large, paste, places, suppress
from .sizes import free_

# isort: split
from mmcv.ops import RoIAlign
from mmdet.models import dense_heads, detectors, necks, roi_heads, task_modules
from mmdet.models.dense_heads.base_dense_head import BaseDenseHead
from mmdet.models.roi_heads import bbox_heads, mask_heads, roi_extractors

ALL = 2**31 - 1
STEP = 32  # of the coarsest map


class Pixels(nn.Module):
    """What the detector's preprocessor does to an image that is loaded as RGB."""

    def __init__(self, preprocessor: Any) -> None:
        super().__init__()
        self.turn = not preprocessor._channel_conversion  # mmdet loads BGR
        known = preprocessor._enable_normalize
        self.mean: Tensor | None
        self.std: Tensor | None
        self.register_buffer("mean", preprocessor.mean.detach().clone() if known else None)
        self.register_buffer("std", preprocessor.std.detach().clone() if known else None)
        self.step, self.value = int(preprocessor.pad_size_divisor), float(preprocessor.pad_value)

    def forward(self, image: Tensor) -> Tensor:
        x = image.float()
        x = x.flip(1) if self.turn else x
        x = x if self.mean is None or self.std is None else (x - self.mean) / self.std
        made: Tensor = padded(x, self.step, self.step, self.value) if self.step > 1 else x
        return made


class Features(nn.Module):
    """Backbone and neck: images -> feature maps, the finest first."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector: Any = shell(detector)
        self.pixels = Pixels(self.detector.data_preprocessor)
        if isinstance(getattr(self.detector, "neck", None), (necks.CSPNeXtPAFPN, necks.YOLOXPAFPN)):
            self.pixels.step = max(self.pixels.step, STEP)  # it runs on no other sizes
        free_(self.detector)

    def maps(self, image: Tensor) -> list[Tensor]:
        return list(self.detector.extract_feat(self.pixels(image)))

    def forward(self, image: Tensor) -> dict[str, Any]:
        return {"features": self.maps(image)}


class Detector(Features):
    """One image -> boxes (n, 4), scores (n,), labels (n,), and masks (n, height, width) if it has a mask head.

    With `pasted=False` masks are probabilities in the frame of their boxes, (n, 28, 28) as a rule.

    Raises:
        ExportError: a part of the detector that is not known; it is named.
    """

    def __init__(self, detector: nn.Module, pasted: bool = True) -> None:
        super().__init__(detector)
        self.pasted = pasted
        unknown = _unknown(self.detector)
        if unknown:
            raise ExportError(
                f"{unknown}. Complete detectors are exported for one-stage heads that predict as mmdet's BaseDenseHead "
                "does, and for Faster, Mask, Cascade and Cascade Mask R-CNN on RoIAlign and plain NMS; export "
                'part="features" instead, and run the heads where mmdet is'
            )

    def forward(self, image: Tensor) -> dict[str, Any]:
        size, maps = (image.shape[2], image.shape[3]), self.maps(image)
        if hasattr(self.detector, "bbox_head"):
            boxes, scores, labels = one_stage(self.detector.bbox_head, maps, size)
            return {"boxes": boxes, "scores": scores, "labels": labels}
        head = self.detector.roi_head
        boxes = proposals(self.detector.rpn_head, maps, size)
        boxes, scores, labels = two_stage(head, maps, boxes, size)
        found = {"boxes": boxes, "scores": scores, "labels": labels}
        if head.with_mask:
            masks = segment(head, maps, boxes, labels)
            pasted = paste(masks, boxes, *size) >= head.test_cfg.mask_thr_binary if self.pasted else masks
            found["masks"] = pasted
        return found


def one_stage(head: Any, maps: list[Tensor], size: tuple[Any, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Detections of a dense head: the best of each level, those above the threshold, NMS by class."""
    config = head.test_cfg
    priors, deltas, scores, labels, _ = _best(head, maps, config.get("nms_pre", -1))
    boxes = decode(head.bbox_coder, priors, deltas, size)
    good = (scores > config.get("score_thr", 0)) & large(boxes, config.get("min_bbox_size", -1))
    at = good.nonzero().flatten()
    boxes, scores, labels = boxes[at], scores[at], labels[at]
    kept = suppress(boxes, scores, labels, config.nms, config.max_per_img)
    return boxes[kept], scores[kept], labels[kept]


def proposals(head: Any, maps: list[Tensor], size: tuple[Any, Any]) -> Tensor:
    """Boxes of an RPN: the best of each level, NMS within a level."""
    config = head.test_cfg
    priors, deltas, scores, _, levels = _best(head, maps, config.get("nms_pre", -1))
    boxes = decode(head.bbox_coder, priors, deltas, size)
    at = large(boxes, config.get("min_bbox_size", -1)).nonzero().flatten()
    boxes, scores, groups = boxes[at], scores[at], levels[at]
    return boxes[suppress(boxes, scores, groups, config.nms, config.max_per_img)]


def two_stage(head: Any, maps: list[Tensor], boxes: Tensor, size: tuple[Any, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Detections of an R-CNN from proposals; in a cascade each stage starts from the boxes of the one before."""
    stages = _stages(head.bbox_head, head.bbox_roi_extractor)
    logits = []
    for i, (stage, extractor) in enumerate(stages):
        said, deltas = stage(_pooled(extractor, maps, boxes))
        logits.append(said)
        if i < len(stages) - 1:
            if not stage.reg_class_agnostic:
                label = said[:, :-1].argmax(1)
                deltas = deltas.unflatten(1, (-1, 4)).gather(1, label[:, None, None].expand(-1, 1, 4))[:, 0]
            boxes = decode(stage.bbox_coder, boxes, deltas, size)
    total: Tensor = sum(logits[1:], logits[0])
    scores = (total / float(len(logits))).softmax(-1)[:, :-1]
    kinds, each = scores.shape[1], 1 if stage.reg_class_agnostic else scores.shape[1]
    boxes = boxes[:, None].expand(-1, each, 4).flatten(0, 1)
    boxes = decode(stage.bbox_coder, boxes, deltas.unflatten(1, (each, 4)).flatten(0, 1), size)
    config, flat = head.test_cfg, scores.flatten()
    at = (flat > config.score_thr).nonzero().flatten()
    labels, scores = at % kinds, flat[at]
    boxes = boxes[at if each > 1 else at // kinds]
    kept = suppress(boxes, scores, labels, config.nms, config.max_per_img)
    return boxes[kept], scores[kept], labels[kept]


def segment(head: Any, maps: list[Tensor], boxes: Tensor, labels: Tensor) -> Tensor:
    """Probabilities of the masks of boxes, in their frame: the mean over the stages of a cascade."""
    found = []
    for stage, extractor in _stages(head.mask_head, head.mask_roi_extractor):
        masks = stage(_pooled(extractor, maps, boxes)).sigmoid()
        at = (labels * 0 if stage.class_agnostic else labels)[:, None, None, None]
        found.append(masks.gather(1, at.expand(-1, 1, masks.shape[2], masks.shape[3]))[:, 0])
    total: Tensor = sum(found[1:], found[0])
    return total / float(len(found))


def _best(head: Any, maps: list[Tensor], count: int) -> list[Tensor]:
    """Priors, deltas, scores, labels and levels of the best of each level, one level after the other."""
    found: list[list[Tensor]] = []
    for level, (said, deltas) in enumerate(zip(*head(tuple(maps)), strict=True)):
        width = said.shape[3]
        said = said.permute(0, 2, 3, 1).unflatten(3, (-1, head.cls_out_channels))
        scores = said.sigmoid() if head.use_sigmoid_cls else said.softmax(-1)[..., :-1]
        values, at = top(scores.flatten(), count if count > 0 else ALL)
        kinds = scores.shape[4]
        prior = at // kinds
        deltas = deltas.permute(0, 2, 3, 1).unflatten(3, (-1, 4)).flatten(0, 3)[prior]
        priors = places(head.prior_generator, level, prior, width)
        found.append([priors, deltas, values, at % kinds, torch.full_like(at, level)])
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def _pooled(extractor: Any, maps: list[Tensor], boxes: Tensor) -> Tensor:
    """What a box sees of the map of its scale."""
    layers = extractor.roi_layers
    scale = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).sqrt() / extractor.finest_scale + 1e-6
    levels = torch.zeros_like(scale, dtype=torch.long)
    for level in range(1, len(layers)):
        levels = levels + (scale >= 2.0**level).long()
    layer = layers[0]
    scales = [float(one.spatial_scale) for one in layers]
    made: Tensor = regions(
        maps[: len(layers)],
        boxes,
        levels,
        scales,
        int(layer.output_size[0]),
        int(layer.sampling_ratio),
        bool(layer.aligned),
    )
    return made


def _stages(heads: Any, extractors: Any) -> list[tuple[Any, Any]]:
    several = isinstance(heads, nn.ModuleList)
    heads, extractors = (list(m) if isinstance(m, nn.ModuleList) else [m] for m in (heads, extractors))
    return list(zip(heads, extractors * (len(heads) if several and len(extractors) == 1 else 1), strict=True))


def _unknown(detector: Any) -> str:
    """What of a detector has no counterpart here, in words; nothing if all has."""
    if type(detector).predict is detectors.SingleStageDetector.predict:
        head = detector.bbox_head
        return _dense("bbox_head", head, BaseDenseHead) or _nms("bbox_head.test_cfg", head.test_cfg)
    if type(detector).predict is not detectors.TwoStageDetector.predict or not detector.with_rpn:
        return f"the detector: {type(detector).__name__} predicts in a way of its own"
    rpn, roi = detector.rpn_head, detector.roi_head
    if found := _dense("rpn_head", rpn, dense_heads.RPNHead) or _nms("test_cfg.rpn", rpn.test_cfg):
        return found
    if type(roi) not in (roi_heads.StandardRoIHead, roi_heads.CascadeRoIHead):
        return f"roi_head: {type(roi).__name__} is not known"
    if roi.with_shared_head:
        return "roi_head.shared_head: heads with shared layers are not known"
    parts = [("bbox_head", bbox_heads.BBoxHead), *([("mask_head", mask_heads.FCNMaskHead)] if roi.with_mask else [])]
    for name, known in parts:
        extractors = getattr(roi, f"{name.removesuffix('_head')}_roi_extractor")
        for head, extractor in _stages(getattr(roi, name), extractors):
            if type(head)._predict_by_feat_single is not known._predict_by_feat_single:
                return f"roi_head.{name}: {type(head).__name__} is not known"
            if found := _extractor(f"roi_head.{name.removesuffix('_head')}_roi_extractor", extractor):
                return found
            if name == "bbox_head" and (head.custom_activation or not head.with_reg):
                return f"roi_head.bbox_head: {type(head).__name__} without boxes or with a loss of its own is not known"
            if name == "bbox_head" and (found := _coder("roi_head.bbox_head", head.bbox_coder)):
                return found
    return _nms("test_cfg.rcnn", roi.test_cfg)


def _dense(name: str, head: Any, known: Any) -> str:
    methods = ("predict", "predict_by_feat", "_predict_by_feat_single", "_bbox_post_process")
    if any(getattr(type(head), m, None) is not getattr(known, m) for m in methods):
        return f"{name}: {type(head).__name__} predicts in a way of its own"
    plain = isinstance(head, dense_heads.RTMDetHead) and not head.with_objectness  # it has the loss, and no use for it
    if not plain and any(hasattr(head, factor) for factor in ("loss_centerness", "loss_iou", "loss_obj")):
        return f"{name}: {type(head).__name__} weighs its scores with something else that it predicts"
    generators = (
        task_modules.AnchorGenerator,
        task_modules.MlvlPointGenerator,
    )
    if type(head.prior_generator) not in generators:
        return f"{name}.prior_generator: {type(head.prior_generator).__name__} is not known"
    return _coder(name, head.bbox_coder)


def _coder(name: str, coder: Any) -> str:
    known = (task_modules.DeltaXYWHBBoxCoder, task_modules.DistancePointBBoxCoder)
    if type(coder) not in known or getattr(coder, "add_ctr_clamp", False):
        return f"{name}.bbox_coder: {type(coder).__name__} is not known"
    return ""


def _extractor(name: str, extractor: Any) -> str:
    if type(extractor) is not roi_extractors.SingleRoIExtractor:
        return f"{name}: {type(extractor).__name__} is not known"
    for layer in extractor.roi_layers:
        square = isinstance(layer, RoIAlign) and layer.output_size[0] == layer.output_size[1]
        if not square or layer.pool_mode != "avg":
            return f"{name}: {type(layer).__name__} is not known, or takes the largest and not the mean"
    return ""


def _nms(name: str, config: Any) -> str:
    settings = copy.copy(dict(config.get("nms") or {}))
    kind = settings.get("type", "nms")
    if kind != "nms" or not set(settings) <= {"type", "iou_threshold", "class_agnostic", "split_thr"}:
        return f"{name}.nms: expected plain NMS with an iou_threshold; it has {settings}"
    return ""
