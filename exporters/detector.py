"""Detectors of MMDetection as ONNX files: complete, or backbone and neck.

    report = compress.exporters.detector.export(pruned.model, "detector.onnx", images)

The file takes pixels: RGB, uint8, of any height and width; order of channels, normalisation and padding are inside. A
complete detector takes one image and gives boxes in its pixels, scores, labels, and masks if it has them; it has only
standard operators. It is written if it finds what mmdet's own code finds on the images.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.recipe import Timing

from . import onnx
from .about import About
from .call import Call, ExportError, still
from .extra import need_onnx
from .locate import locate
from .lower import Lowered
from .match import FLOOR, Found, Matched, match
from .parity import TOLERANCE, ParityError
from .report import ExportReport
from .runtime import Runner

PARTS = ("detector", "features")
LARGE = 2**26  # bytes of a file whose values are not all kept to find a difference
ODD = (5, 3)  # by how much smaller a copy of the first image is: another size, and an odd one


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
    about: About | None = None,
    timing: Timing | None = None,
) -> ExportReport:
    """Write a detector of mmdet, pruned or not, as an ONNX file that was compared with it on `images`, and timed.

    `images` are pixels, RGB, uint8, (3, height, width), in the size that the detector is to see. `part="features"` is
    backbone and neck alone, for a batch of any size. Masks are maps of the image, or with `pasted=False` probabilities
    in the frame of their boxes.

    Raises:
        ExportError: the images are not such, a part of the detector is not known, or there is nothing to compare.
        ParityError: the file finds something else than mmdet; what and where is said.
        MissingExtra, OSError: as of `compress.exporters.onnx.export`.
    """
    need_onnx()
    from compress.mmdet import whole

    if part not in PARTS:
        raise ExportError(f"part: expected one of {', '.join(PARTS)}; got {part!r}")
    pictures = _pictures(images)
    timing, about = timing or Timing(repeats=5), about or described(detector)
    if part == "features":
        return onnx.export(
            whole.Features(detector),
            path,
            pictures[0],
            dynamic_size=True,
            opset=opset,
            slim=slim,
            check=check,
            samples=pictures[1:],
            dense=None if dense is None else whole.Features(dense),
            about=about,
            timing=timing,
        )

    def gate(call: Call, runner: Runner, lowered: Lowered) -> Matched:
        return _gate(detector, runner, pictures, lowered)

    how = {"dynamic_batch": False, "dynamic_size": True, "opset": opset, "slim": slim, "half": False}
    return onnx.write(
        whole.Detector(detector, pasted),
        path,
        pictures[0],
        how,
        gate if check else None,
        TOLERANCE,
        dense=None if dense is None else whole.Detector(dense, pasted),
        about=about,
        timing=timing,
    )


def check(detector: nn.Module, path: str | Path, images: Tensor | Iterable[Tensor]) -> Matched:
    """Compare what a file of a complete detector finds with what mmdet's own code does, as `export` does.

    Raises:
        ParityError: it finds something else.
        ExportError: there is nothing to compare, or the file is not one of onnxruntime's.
    """
    need_onnx()
    return _gate(detector, Runner(path), _pictures(images))


def described(detector: Any, **known: Any) -> About:
    """What the file is to say of itself: what its pixels are, and the classes' names if the detector knows them."""
    classes = (getattr(detector, "dataset_meta", None) or {}).get("classes")
    return About(classes=classes, more={"compress.pixels": '"RGB, 0 to 255"'}, **known)


def _gate(detector: nn.Module, runner: Runner, pictures: Sequence[Tensor], lowered: Lowered | None = None) -> Matched:
    """The file against mmdet's own code, on the images and on the first in an odd size."""
    from compress.mmdet import whole
    from compress.mmdet.predict import limits, predict

    twin: Any = still(detector)
    first = pictures[0]
    size = tuple(max(n - o, 1) for n, o in zip(first.shape[2:], ODD, strict=True))
    odd = nn.functional.interpolate(first, size, mode="bilinear", align_corners=False)
    inputs = {f"image {i}": picture for i, picture in enumerate(pictures)}
    right = {name: predict(twin, picture) for name, picture in inputs.items()}
    if whole.Features(twin).pixels.step == twin.data_preprocessor.pad_size_divisor:  # else it takes multiples only
        name = f"image 0 of {size[0]}x{size[1]}"
        right[name], inputs[name] = predict(twin, odd), odd
    threshold, least, most = limits(twin)
    found = match(((n, right[n], _run(runner, x, threshold)) for n, x in inputs.items()), least, most)
    if found.wrong:
        name = found.wrong[0].partition(":")[0]
        more = f" (and {len(found.wrong) - 1} more)" if len(found.wrong) > 1 else ""
        where = _where(lowered, inputs[name]) if lowered else ""
        bounds = "At most 0.5 px, 0.001 of a score and 0.01 of a mask are let through."
        raise ParityError(f"{found.wrong[0]}{more}. {bounds}{where}")
    if not found.compared:
        raise ExportError(
            f"images: there is nothing to compare: neither the detector nor the file finds anything above {FLOOR} on "
            f"the {len(pictures)} given. Give images of what it knows, or export with check=False"
        )
    return found


def _run(runner: Runner, image: Tensor, threshold: float) -> Found:
    """What the file finds; masks in the frame of a box are pasted."""
    from compress.mmdet.boxes import paste

    made = dict(zip(runner.outputs, runner.run([image]), strict=True))
    masks = made.get("masks")
    if masks is not None and masks.dtype != torch.bool:
        masks = paste(masks, made["boxes"], *image.shape[2:]) >= threshold
    return Found(made["boxes"], made["scores"], made["labels"], masks)


def _where(lowered: Lowered, image: Tensor) -> str:
    """At which node the file begins to differ from the code it was made of, where that can be said."""
    if lowered.proto.ByteSize() > LARGE:
        return ""
    try:
        output = lowered.proto.graph.output[lowered.outputs.index("scores")].name
        found = locate(lowered.program, lowered.proto, [image], output, TOLERANCE)
    except Exception:  # a program for some detections does not run where there are none
        return ""
    return f" {found}" if found else ""


def _pictures(images: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """
    Raises:
        ExportError: one is not an RGB image in bytes, or there is none.
    """
    given = [images] if isinstance(images, Tensor) else list(images)
    if not given:
        raise ExportError("images: expected at least one; got none")
    for image in given:
        one = image.ndim == 3 or (image.ndim == 4 and len(image) == 1)
        if image.dtype != torch.uint8 or not one or image.shape[-3] != 3:
            kind = f"{str(image.dtype).removeprefix('torch.')}{list(image.shape)}"
            raise ExportError(f"images: expected pixels, uint8, RGB, (3, height, width); got {kind}")
    return [image.detach().cpu().reshape(1, *image.shape[-3:]) for image in given]
