"""Detectors as functions of an image: features or detections, in operations that torch.export can trace.

The image is RGB, 0 to 255, of any height and width; channel order, normalization and padding are part of the function.
Boxes are in its pixels. The predict methods of mmdet's heads are reimplemented here with their layers and settings.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from mmdet.models import necks
from torch import Tensor, nn

from compress.exporters import ExportError, pad_to_multiple, roi_align_levels, top_scores
from compress.modules import shared_copy

from .boxes import batched_nms, decode_boxes, larger_than, paste_masks, priors_at
from .dynamic_swin import make_size_dynamic_
from .export_support import pair_stages, unsupported_part

NO_LIMIT = 2**31 - 1
COARSEST_STRIDE = 32


class PixelPreprocessor(nn.Module):
    """The detector's data preprocessor, for an image that is loaded as RGB."""

    def __init__(self, preprocessor: Any) -> None:
        super().__init__()
        self.to_bgr = not preprocessor._channel_conversion  # mmdet loads images as BGR
        normalizes = preprocessor._enable_normalize
        self.mean: Tensor | None
        self.std: Tensor | None
        self.register_buffer("mean", preprocessor.mean.detach().clone() if normalizes else None)
        self.register_buffer("std", preprocessor.std.detach().clone() if normalizes else None)
        self.divisor, self.pad_value = int(preprocessor.pad_size_divisor), float(preprocessor.pad_value)

    def forward(self, image: Tensor) -> Tensor:
        x = image.float()
        x = x.flip(1) if self.to_bgr else x
        x = x if self.mean is None or self.std is None else (x - self.mean) / self.std
        padded: Tensor = pad_to_multiple(x, self.divisor, self.divisor, self.pad_value) if self.divisor > 1 else x
        return padded


class ExportableFeatures(nn.Module):
    """Backbone and neck: images -> feature maps, the finest first."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector: Any = shared_copy(detector)
        self.pixels = PixelPreprocessor(self.detector.data_preprocessor)
        if isinstance(getattr(self.detector, "neck", None), (necks.CSPNeXtPAFPN, necks.YOLOXPAFPN)):
            self.pixels.divisor = max(self.pixels.divisor, COARSEST_STRIDE)  # these necks run on multiples only
        make_size_dynamic_(self.detector)

    def feature_maps(self, image: Tensor) -> list[Tensor]:
        return list(self.detector.extract_feat(self.pixels(image)))

    def forward(self, image: Tensor) -> dict[str, Any]:
        return {"features": self.feature_maps(image)}


class ExportableDetector(ExportableFeatures):
    """One image -> boxes (n, 4), scores (n,), labels (n,) and, with a mask head, masks (n, height, width).

    With `pasted=False`, masks are probabilities in the frame of their boxes, usually (n, 28, 28).

    Raises:
        ExportError: a part of the detector is not supported; the message names it.
    """

    def __init__(self, detector: nn.Module, pasted: bool = True) -> None:
        super().__init__(detector)
        self.pasted = pasted
        if problem := unsupported_part(self.detector):
            raise ExportError(
                f"{problem}. Complete detectors are exported for one-stage heads that predict as mmdet's BaseDenseHead "
                "does, and for Faster, Mask, Cascade and Cascade Mask R-CNN on RoIAlign and plain NMS; export "
                'part="features" instead, and run the heads in mmdet'
            )

    def forward(self, image: Tensor) -> dict[str, Any]:
        size, maps = (image.shape[2], image.shape[3]), self.feature_maps(image)
        if hasattr(self.detector, "bbox_head"):
            boxes, scores, labels = detect_one_stage(self.detector.bbox_head, maps, size)
            return {"boxes": boxes, "scores": scores, "labels": labels}
        head = self.detector.roi_head
        boxes = propose_regions(self.detector.rpn_head, maps, size)
        boxes, scores, labels = detect_two_stage(head, maps, boxes, size)
        detections = {"boxes": boxes, "scores": scores, "labels": labels}
        if head.with_mask:
            masks = predict_masks(head, maps, boxes, labels)
            if self.pasted:
                masks = paste_masks(masks, boxes, *size) >= head.test_cfg.mask_thr_binary
            detections["masks"] = masks
        return detections


def detect_one_stage(head: Any, maps: list[Tensor], size: tuple[Any, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return boxes, scores and labels of a dense head: the best of each level, above the threshold, after NMS."""
    config = head.test_cfg
    best = _best_candidates(head, maps, config.get("nms_pre", -1))
    boxes = decode_boxes(head.bbox_coder, best.priors, best.deltas, size)
    valid = (best.scores > config.get("score_thr", 0)) & larger_than(boxes, config.get("min_bbox_size", -1))
    at = valid.nonzero().flatten()
    boxes, scores, labels = boxes[at], best.scores[at], best.labels[at]
    kept = batched_nms(boxes, scores, labels, config.nms, config.max_per_img)
    return boxes[kept], scores[kept], labels[kept]


def propose_regions(head: Any, maps: list[Tensor], size: tuple[Any, Any]) -> Tensor:
    """Return the boxes of an RPN: the best of each level, after NMS within each level."""
    config = head.test_cfg
    best = _best_candidates(head, maps, config.get("nms_pre", -1))
    boxes = decode_boxes(head.bbox_coder, best.priors, best.deltas, size)
    at = larger_than(boxes, config.get("min_bbox_size", -1)).nonzero().flatten()
    boxes, scores, levels = boxes[at], best.scores[at], best.levels[at]
    return boxes[batched_nms(boxes, scores, levels, config.nms, config.max_per_img)]


def detect_two_stage(
    head: Any, maps: list[Tensor], boxes: Tensor, size: tuple[Any, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return boxes, scores and labels of an R-CNN head from proposals.

    In a cascade, each stage starts from the boxes of the one before; scores come from the mean of the logits.
    """
    stages = pair_stages(head.bbox_head, head.bbox_roi_extractor)
    logits = []
    for i, (stage, extractor) in enumerate(stages):
        stage_logits, deltas = stage(_pool_regions(extractor, maps, boxes))
        logits.append(stage_logits)
        if i < len(stages) - 1:
            if not stage.reg_class_agnostic:
                label = stage_logits[:, :-1].argmax(1)
                deltas = deltas.unflatten(1, (-1, 4)).gather(1, label[:, None, None].expand(-1, 1, 4))[:, 0]
            boxes = decode_boxes(stage.bbox_coder, boxes, deltas, size)
    total: Tensor = sum(logits[1:], logits[0])
    scores = (total / float(len(logits))).softmax(-1)[:, :-1]
    num_classes = scores.shape[1]
    boxes_per_region = 1 if stage.reg_class_agnostic else num_classes
    boxes = boxes[:, None].expand(-1, boxes_per_region, 4).flatten(0, 1)
    boxes = decode_boxes(stage.bbox_coder, boxes, deltas.unflatten(1, (boxes_per_region, 4)).flatten(0, 1), size)
    config, flat_scores = head.test_cfg, scores.flatten()
    at = (flat_scores > config.score_thr).nonzero().flatten()
    labels, scores = at % num_classes, flat_scores[at]
    boxes = boxes[at if boxes_per_region > 1 else at // num_classes]
    kept = batched_nms(boxes, scores, labels, config.nms, config.max_per_img)
    return boxes[kept], scores[kept], labels[kept]


def predict_masks(head: Any, maps: list[Tensor], boxes: Tensor, labels: Tensor) -> Tensor:
    """Return mask probabilities in the frame of the boxes: the mean over the stages of a cascade."""
    probabilities = []
    for stage, extractor in pair_stages(head.mask_head, head.mask_roi_extractor):
        masks = stage(_pool_regions(extractor, maps, boxes)).sigmoid()
        at = (labels * 0 if stage.class_agnostic else labels)[:, None, None, None]
        probabilities.append(masks.gather(1, at.expand(-1, 1, masks.shape[2], masks.shape[3]))[:, 0])
    total: Tensor = sum(probabilities[1:], probabilities[0])
    return total / float(len(probabilities))


class _Candidates(NamedTuple):
    """Predictions of a dense head, one row each."""

    priors: Tensor
    deltas: Tensor
    scores: Tensor
    labels: Tensor
    levels: Tensor


def _best_candidates(head: Any, maps: list[Tensor], count: int) -> _Candidates:
    """Return the `count` best predictions of each level (all if it is not positive), level by level."""
    levels: list[_Candidates] = []
    for level, (logits, deltas) in enumerate(zip(*head(tuple(maps)), strict=True)):
        width = logits.shape[3]
        logits = logits.permute(0, 2, 3, 1).unflatten(3, (-1, head.cls_out_channels))
        scores = logits.sigmoid() if head.use_sigmoid_cls else logits.softmax(-1)[..., :-1]
        best, at = top_scores(scores.flatten(), count if count > 0 else NO_LIMIT)
        num_classes = scores.shape[4]
        prior = at // num_classes
        deltas = deltas.permute(0, 2, 3, 1).unflatten(3, (-1, 4)).flatten(0, 3)[prior]
        priors = priors_at(head.prior_generator, level, prior, width)
        levels.append(_Candidates(priors, deltas, best, at % num_classes, torch.full_like(at, level)))
    return _Candidates(*(torch.cat(parts) for parts in zip(*levels, strict=True)))


def _pool_regions(extractor: Any, maps: list[Tensor], boxes: Tensor) -> Tensor:
    """Return the features of each box from the map of its scale."""
    layers = extractor.roi_layers
    scale = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).sqrt() / extractor.finest_scale + 1e-6
    levels = torch.zeros_like(scale, dtype=torch.long)
    for level in range(1, len(layers)):
        levels = levels + (scale >= 2.0**level).long()
    layer = layers[0]
    pooled: Tensor = roi_align_levels(
        maps[: len(layers)],
        boxes,
        levels,
        [float(one.spatial_scale) for one in layers],
        int(layer.output_size[0]),
        int(layer.sampling_ratio),
        bool(layer.aligned),
    )
    return pooled
