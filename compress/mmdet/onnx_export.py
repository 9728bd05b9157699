"""Export MMDetection detectors to ONNX: complete detectors, or backbone and neck.

    report = compress.mmdet.onnx_export.export(pruned.model, "detector.onnx", images)

The file takes RGB pixels, uint8, of any height and width; channel order, normalization and padding are part of it. A
complete detector takes one image and returns boxes in its pixels, scores, labels and, if it has a mask head, masks. It
contains standard operators only. It is written only if its detections agree with those of mmdet's own code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.exporters import (
    SCORE_FLOOR,
    TOLERANCE,
    CallSignature,
    DetectionMatch,
    Detections,
    ExportError,
    ExportMetadata,
    ExportReport,
    LoweredModel,
    LoweringOptions,
    OnnxFileWriter,
    OnnxRunner,
    ParityError,
    describe_first_difference,
    eval_copy,
    match_detections,
    need_onnx,
    onnx,
)
from compress.recipe import Timing

from .boxes import paste_masks
from .exportable_detector import ExportableDetector, ExportableFeatures
from .predict import detection_limits, predict

EXPORTABLE_PARTS = ("detector", "features")
MAX_LOCATED_BYTES = 2**26  # in larger files the first difference is not located: all values are kept in memory for it
SIZE_OFFSET = (5, 3)  # subtracted from height and width of the first image: another size, and an odd one


def export(
    detector: nn.Module,
    path: str | Path,
    images: Tensor | Iterable[Tensor],
    *,
    part: str = "detector",
    pasted: bool = True,
    opset: int | None = None,
    slim: bool = True,
    check: bool = True,
    dense: nn.Module | None = None,
    about: ExportMetadata | None = None,
    timing: Timing | None = None,
) -> ExportReport:
    """Write an mmdet detector, pruned or not, to an ONNX file; compare it on `images` and time it.

    Args:
        images: RGB pixels, uint8, (3, height, width), in the size that the detector expects.
        part: "detector", or "features" for backbone and neck only, which take batches of any size.
        pasted: masks have the size of the image; else they are probabilities in the frame of their boxes.
        opset, slim, check, dense, about, timing: as in `compress.exporters.onnx.export`.

    Raises:
        MissingExtra: the packages of the `onnx` extra are not installed.
        ExportError: the images are invalid, a part of the detector is not supported, or nothing is detected on the
            images.
        ParityError: the detections of file and mmdet differ; the message describes the first difference.
        OSError: the file cannot be written.
    """
    need_onnx()
    if part not in EXPORTABLE_PARTS:
        raise ExportError(f"part: expected one of {', '.join(EXPORTABLE_PARTS)}; got {part!r}")
    batches = _as_batches(images)
    timing, about = timing or Timing(repeats=5), about or describe_detector(detector)
    if part == "features":
        return onnx.export(
            ExportableFeatures(detector),
            path,
            batches[0],
            dynamic_size=True,
            opset=opset,
            slim=slim,
            check=check,
            samples=batches[1:],
            dense=None if dense is None else ExportableFeatures(dense),
            about=about,
            timing=timing,
        )

    def check_detections(signature: CallSignature, runner: OnnxRunner, lowered: LoweredModel) -> DetectionMatch:
        return _check_detections(detector, runner, batches, lowered)

    writer = OnnxFileWriter(
        ExportableDetector(detector, pasted),
        path,
        batches[0],
        LoweringOptions(dynamic_batch=False, dynamic_size=True, opset=opset, slim=slim),
        TOLERANCE,
        None if dense is None else ExportableDetector(dense, pasted),
        about,
        timing,
    )
    return writer.write(check_detections if check else None)


def check(detector: nn.Module, path: str | Path, images: Tensor | Iterable[Tensor]) -> DetectionMatch:
    """Compare the detections of a complete detector's file with those of mmdet's own code, as `export` does.

    Raises:
        MissingExtra: the packages of the `onnx` extra are not installed.
        ParityError: they differ.
        ExportError: the images are invalid, nothing is detected on them, or onnxruntime does not load the file.
    """
    need_onnx()
    return _check_detections(detector, OnnxRunner(path), _as_batches(images))


def describe_detector(detector: Any, classes: Sequence[str] | None = None, **fields: Any) -> ExportMetadata:
    """Return the metadata of a detector's file: the meaning of its pixels, and the class names.

    Args:
        classes: class names, used if the detector does not know its own.
        fields: further fields of the metadata.
    """
    own_classes = (getattr(detector, "dataset_meta", None) or {}).get("classes")
    return ExportMetadata(classes=own_classes or classes, more={"compress.pixels": '"RGB, 0 to 255"'}, **fields)


def _check_detections(
    detector: nn.Module, runner: OnnxRunner, batches: Sequence[Tensor], lowered: LoweredModel | None = None
) -> DetectionMatch:
    """Compare the file with mmdet's own code on the images, and on the first one in an odd size.

    Raises:
        ParityError: the detections differ.
        ExportError: nothing is detected on the images.
    """
    reference: Any = eval_copy(detector)
    first = batches[0]
    size = tuple(max(n - offset, 1) for n, offset in zip(first.shape[2:], SIZE_OFFSET, strict=True))
    resized = nn.functional.interpolate(first, size, mode="bilinear", align_corners=False)
    images = {f"image {i}": batch for i, batch in enumerate(batches)}
    expected = {name: predict(reference, image) for name, image in images.items()}
    # If the export pads to more than mmdet does, mmdet's own code runs on multiples only.
    if ExportableFeatures(reference).pixels.divisor == reference.data_preprocessor.pad_size_divisor:
        name = f"image 0 of {size[0]}x{size[1]}"
        expected[name], images[name] = predict(reference, resized), resized
    limits = detection_limits(reference)
    match = match_detections(
        ((name, expected[name], _run_file(runner, image, limits.mask_threshold)) for name, image in images.items()),
        limits,
    )
    if match.wrong:
        name = match.wrong[0].partition(":")[0]
        more = f" (and {len(match.wrong) - 1} more)" if len(match.wrong) > 1 else ""
        origin = _first_difference(lowered, images[name]) if lowered else ""
        tolerance = "The tolerance is 0.5 px, 0.001 of a score and 0.01 of a mask."
        raise ParityError(f"{match.wrong[0]}{more}. {tolerance}{origin}")
    if not match.compared:
        raise ExportError(
            f"images: there is nothing to compare: neither the detector nor the file detects anything with a score "
            f"above {SCORE_FLOOR} on the {len(batches)} given. Give images of its classes (--images FOLDER)"
        )
    return match


def _run_file(runner: OnnxRunner, image: Tensor, mask_threshold: float) -> Detections:
    """Return the file's detections; masks in the frame of their boxes are pasted."""
    outputs = dict(zip(runner.output_names, runner.run([image]), strict=True))
    masks = outputs.get("masks")
    if masks is not None and masks.dtype != torch.bool:
        masks = paste_masks(masks, outputs["boxes"], *image.shape[2:]) >= mask_threshold
    return Detections(outputs["boxes"], outputs["scores"], outputs["labels"], masks)


def _first_difference(lowered: LoweredModel, image: Tensor) -> str:
    """Return a sentence about the first node that differs from the exported program; "" if it cannot be located."""
    if lowered.proto.ByteSize() > MAX_LOCATED_BYTES:
        return ""
    try:
        output = lowered.proto.graph.output[lowered.output_names.index("scores")].name
        sentence = describe_first_difference(lowered, [image], output, TOLERANCE)
    except Exception:  # a program that was traced with detections does not run without any
        return ""
    return f" {sentence}" if sentence else ""


def _as_batches(images: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Return each image as a batch of one on the CPU.

    Raises:
        ExportError: an image is not RGB in uint8, or there is none.
    """
    tensors = [images] if isinstance(images, Tensor) else list(images)
    if not tensors:
        raise ExportError("images: expected at least one; got none")
    for image in tensors:
        is_single = image.ndim == 3 or (image.ndim == 4 and len(image) == 1)
        if image.dtype != torch.uint8 or not is_single or image.shape[-3] != 3:
            kind = f"{str(image.dtype).removeprefix('torch.')}{list(image.shape)}"
            raise ExportError(f"images: expected pixels, uint8, RGB, (3, height, width); got {kind}")
    return [image.detach().cpu().reshape(1, *image.shape[-3:]) for image in tensors]
