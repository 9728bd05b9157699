"""How the operators of operators.py are written in ONNX's own, for torch's exporter."""

# mypy: disable-error-code="no-untyped-call,misc"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnxscript import FLOAT, INT64
from onnxscript import opset18 as op

LAST = 2**31 - 1  # the end of a slice, wherever it is


def top(scores: FLOAT, count: int) -> Any:
    size = op.Min(op.Shape(scores), op.Constant(value_ints=[count]))
    return op.TopK(scores, size)


def nms(boxes: FLOAT, scores: FLOAT, threshold: float, count: int) -> Any:
    found = op.NonMaxSuppression(
        op.Unsqueeze(boxes, [0]),
        op.Unsqueeze(scores, [0, 1]),
        op.Constant(value_ints=[count]),
        op.Constant(value_floats=[threshold]),
    )
    return op.Squeeze(op.Slice(found, [2], [3], [1]), [1])


def regions(
    maps: Sequence[FLOAT],
    boxes: FLOAT,
    levels: INT64,
    scales: Sequence[float],
    size: int,
    samples: int,
    half: bool,
) -> Any:
    """Level by level; the rows are put back in their order."""
    places, parts = [], []
    for level, (source, scale) in enumerate(zip(maps, scales, strict=True)):
        at = op.Squeeze(op.NonZero(op.Equal(levels, op.Constant(value_int=level))), [0])
        image = op.Expand(op.Constant(value_int=0), op.Shape(at))
        mode = "half_pixel" if half else "output_half_pixel"
        parts.append(
            op.RoiAlign(
                source,
                op.Gather(boxes, at),
                image,
                coordinate_transformation_mode=mode,
                output_height=size,
                output_width=size,
                sampling_ratio=samples,
                spatial_scale=scale,
            )
        )
        places.append(at)
    if len(parts) == 1:
        return parts[0]
    order = op.Concat(*places, axis=0)
    _, back = op.TopK(order, op.Shape(order), largest=0)
    return op.Gather(op.Concat(*parts, axis=0), back)


def padded(x: FLOAT, down: int, right: int, value: float) -> Any:
    sides = op.Constant(value_ints=[down, right])
    sizes = op.Slice(op.Shape(x), [2], [4])
    ones = op.Constant(value_ints=[1, 1])
    whole = op.Mul(op.Div(op.Sub(op.Add(sizes, sides), ones), sides), sides)
    pads = op.Concat(op.Constant(value_ints=[0, 0, 0, 0, 0, 0]), op.Sub(whole, sizes), axis=0)
    return op.Pad(x, pads, op.Constant(value_float=value))


def windows(x: FLOAT, side: int, shift: int) -> Any:
    batch, rows, columns = _grid(x, side)
    one, length = op.Constant(value_ints=[side]), op.Constant(value_ints=[side * side])
    high, wide = op.Mul(rows, one), op.Mul(columns, one)
    size = op.Shape(x)
    below, right = op.Sub(high, op.Slice(size, [1], [2])), op.Sub(wide, op.Slice(size, [2], [3]))
    zero = op.Constant(value_ints=[0])
    x = op.Pad(x, op.Concat(zero, zero, zero, zero, zero, below, right, zero, axis=0))
    if shift:
        x = _rolled(_rolled(x, 1, shift), 2, shift)
    channels = op.Slice(size, [3], [4])
    x = op.Reshape(x, op.Concat(batch, rows, one, columns, one, channels, axis=0))
    x = op.Transpose(x, perm=[0, 1, 3, 2, 4, 5])
    x = op.Reshape(x, op.Concat(op.Constant(value_ints=[-1]), length, channels, axis=0))
    down, across = _parts(high, side, shift), _parts(wide, side, shift)
    part = op.Add(op.Mul(op.Unsqueeze(down, [1]), op.Constant(value_int=3)), op.Unsqueeze(across, [0]))
    part = op.Transpose(op.Reshape(part, op.Concat(rows, one, columns, one, axis=0)), perm=[0, 2, 1, 3])
    part = op.Reshape(part, op.Concat(op.Constant(value_ints=[-1]), length, axis=0))
    same = op.Equal(op.Unsqueeze(part, [1]), op.Unsqueeze(part, [2]))
    apart = op.Where(same, op.Constant(value_float=0.0), op.Constant(value_float=-100.0))
    ones = op.Constant(value_ints=[1, 1, 1])
    return x, op.Tile(op.Unsqueeze(apart, [1]), op.Concat(batch, ones, axis=0))


def whole(parts: FLOAT, like: FLOAT, side: int, shift: int) -> Any:
    batch, rows, columns = _grid(like, side)
    one = op.Constant(value_ints=[side])
    channels = op.Slice(op.Shape(parts), [2], [3])
    x = op.Reshape(parts, op.Concat(batch, rows, columns, one, one, channels, axis=0))
    x = op.Transpose(x, perm=[0, 1, 3, 2, 4, 5])
    x = op.Reshape(x, op.Concat(batch, op.Mul(rows, one), op.Mul(columns, one), channels, axis=0))
    if shift:
        x = _rolled(_rolled(x, 1, -shift), 2, -shift)
    return op.Slice(x, [0, 0], op.Slice(op.Shape(like), [1], [3]), [1, 2])


def _grid(x: Any, side: int) -> tuple[Any, Any, Any]:
    """The batch, and how many windows there are downwards and across, each as a row of one number."""
    size = op.Shape(x)
    more, one = op.Constant(value_ints=[side - 1]), op.Constant(value_ints=[side])
    rows, columns = (op.Div(op.Add(op.Slice(size, [i], [i + 1]), more), one) for i in (1, 2))
    return op.Slice(size, [0], [1]), rows, columns


def _rolled(x: Any, axis: int, by: int) -> Any:
    """So far to the front; what falls off comes in at the end."""
    return op.Concat(op.Slice(x, [by], [LAST], [axis]), op.Slice(x, [0], [by], [axis]), axis=axis)


def _parts(length: Any, side: int, shift: int) -> Any:
    size = op.Squeeze(length, [0])
    place = op.Range(op.Constant(value_int=0), size, op.Constant(value_int=1))
    if not shift:
        return op.Mul(place, op.Constant(value_int=0))
    far = [op.GreaterOrEqual(place, op.Sub(size, op.Constant(value_int=n))) for n in (side, shift)]
    return op.Add(*(op.Cast(where, to=INT64.dtype) for where in far))


TABLE = {"top": top, "nms": nms, "regions": regions, "padded": padded, "windows": windows, "whole": whole}
