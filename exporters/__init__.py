"""Export models to files: `compress.exporters.onnx` writes, compares, quantizes and times ONNX files.

Importing this package loads none of the packages of the `onnx` extra; each function imports what it needs.
"""

from . import onnx, onnx_exporter  # noqa: F401  (the latter registers `export: onnx`)
from .base import Exporter, ExportJob, exporter_names, get_exporter, register_exporter
from .custom_ops import merge_windows, nms, pad_to_multiple, partition_windows, roi_align_levels, top_scores
from .detection_match import SCORE_FLOOR, DetectionLimits, DetectionMatch, Detections, match_detections
from .errors import ExportError, ParityError
from .export_report import ExportReport
from .file_writer import OnnxFileWriter
from .first_difference import describe_first_difference
from .flat_model import CallSignature, eval_copy
from .lowering import LoweredModel, LoweringOptions, lower_to_onnx
from .metadata import ExportMetadata
from .parity import TOLERANCE
from .requirements import MissingExtra, need_onnx
from .runtime import OnnxRunner

__all__ = [
    "SCORE_FLOOR",
    "TOLERANCE",
    "CallSignature",
    "DetectionLimits",
    "DetectionMatch",
    "Detections",
    "ExportError",
    "ExportJob",
    "ExportMetadata",
    "ExportReport",
    "Exporter",
    "LoweredModel",
    "LoweringOptions",
    "MissingExtra",
    "OnnxFileWriter",
    "OnnxRunner",
    "ParityError",
    "describe_first_difference",
    "eval_copy",
    "exporter_names",
    "get_exporter",
    "lower_to_onnx",
    "match_detections",
    "merge_windows",
    "need_onnx",
    "nms",
    "onnx",
    "pad_to_multiple",
    "partition_windows",
    "register_exporter",
    "roi_align_levels",
    "top_scores",
]
