"""Check which detectors can be exported completely: those whose heads `exportable_detector.py` reimplements."""

from __future__ import annotations

from typing import Any

from mmcv.ops import RoIAlign
from mmdet.models import dense_heads, detectors, roi_heads, task_modules
from mmdet.models.dense_heads.base_dense_head import BaseDenseHead
from mmdet.models.roi_heads import bbox_heads, mask_heads, roi_extractors
from torch import nn

KNOWN_PRIOR_GENERATORS = (task_modules.AnchorGenerator, task_modules.MlvlPointGenerator)
KNOWN_CODERS = (task_modules.DeltaXYWHBBoxCoder, task_modules.DistancePointBBoxCoder)
KNOWN_NMS_KEYS = {"type", "iou_threshold", "class_agnostic", "split_thr"}


def unsupported_part(detector: Any) -> str:
    """Return a sentence about the first part of a detector that is not supported; "" if all parts are."""
    if type(detector).predict is detectors.SingleStageDetector.predict:
        head = detector.bbox_head
        return _dense_head_problem("bbox_head", head, BaseDenseHead) or _nms_problem(
            "bbox_head.test_cfg", head.test_cfg
        )
    if type(detector).predict is not detectors.TwoStageDetector.predict or not detector.with_rpn:
        return f"the detector: {type(detector).__name__} has its own predict method"
    rpn, roi = detector.rpn_head, detector.roi_head
    if problem := _dense_head_problem("rpn_head", rpn, dense_heads.RPNHead) or _nms_problem(
        "test_cfg.rpn", rpn.test_cfg
    ):
        return problem
    if type(roi) not in (roi_heads.StandardRoIHead, roi_heads.CascadeRoIHead):
        return f"roi_head: {type(roi).__name__} is not supported"
    if roi.with_shared_head:
        return "roi_head.shared_head: heads with shared layers are not supported"
    heads = [("bbox", bbox_heads.BBoxHead), *([("mask", mask_heads.FCNMaskHead)] if roi.with_mask else [])]
    for kind, known_class in heads:
        if problem := _roi_head_problem(roi, kind, known_class):
            return problem
    return _nms_problem("test_cfg.rcnn", roi.test_cfg)


def pair_stages(heads: Any, extractors: Any) -> list[tuple[Any, Any]]:
    """Return (head, RoI extractor) of each stage; a cascade has lists of them, and may share one extractor."""
    is_cascade = isinstance(heads, nn.ModuleList)
    heads, extractors = (list(m) if isinstance(m, nn.ModuleList) else [m] for m in (heads, extractors))
    return list(zip(heads, extractors * (len(heads) if is_cascade and len(extractors) == 1 else 1), strict=True))


def _roi_head_problem(roi: Any, kind: str, known_class: Any) -> str:
    """Check the stages of the box or mask head (`kind`: "bbox" or "mask")."""
    name, extractor_name = f"{kind}_head", f"{kind}_roi_extractor"
    for head, extractor in pair_stages(getattr(roi, name), getattr(roi, extractor_name)):
        if type(head)._predict_by_feat_single is not known_class._predict_by_feat_single:
            return f"roi_head.{name}: {type(head).__name__} is not supported"
        if problem := _extractor_problem(f"roi_head.{extractor_name}", extractor):
            return problem
        if kind == "bbox" and (head.custom_activation or not head.with_reg):
            return f"roi_head.{name}: {type(head).__name__} without boxes or with a custom activation is not supported"
        if kind == "bbox" and (problem := _coder_problem(f"roi_head.{name}", head.bbox_coder)):
            return problem
    return ""


def _dense_head_problem(name: str, head: Any, known_class: Any) -> str:
    methods = ("predict", "predict_by_feat", "_predict_by_feat_single", "_bbox_post_process")
    if any(getattr(type(head), method, None) is not getattr(known_class, method) for method in methods):
        return f"{name}: {type(head).__name__} has its own predict method"
    # RTMDetHead inherits the loss of such a factor, but without objectness it does not predict one.
    ignores_factors = isinstance(head, dense_heads.RTMDetHead) and not head.with_objectness
    if not ignores_factors and any(hasattr(head, factor) for factor in ("loss_centerness", "loss_iou", "loss_obj")):
        return f"{name}: {type(head).__name__} multiplies its scores by another prediction"
    if type(head.prior_generator) not in KNOWN_PRIOR_GENERATORS:
        return f"{name}.prior_generator: {type(head.prior_generator).__name__} is not supported"
    return _coder_problem(name, head.bbox_coder)


def _coder_problem(name: str, coder: Any) -> str:
    if type(coder) not in KNOWN_CODERS or getattr(coder, "add_ctr_clamp", False):
        return f"{name}.bbox_coder: {type(coder).__name__} is not supported"
    return ""


def _extractor_problem(name: str, extractor: Any) -> str:
    if type(extractor) is not roi_extractors.SingleRoIExtractor:
        return f"{name}: {type(extractor).__name__} is not supported"
    for layer in extractor.roi_layers:
        is_square = isinstance(layer, RoIAlign) and layer.output_size[0] == layer.output_size[1]
        if not is_square or layer.pool_mode != "avg":
            return f"{name}: expected RoIAlign with square outputs and average pooling; it has {layer}"
    return ""


def _nms_problem(name: str, config: Any) -> str:
    settings = dict(config.get("nms") or {})
    if settings.get("type", "nms") != "nms" or not set(settings) <= KNOWN_NMS_KEYS:
        return f"{name}.nms: expected plain NMS with an iou_threshold; it has {settings}"
    return ""
