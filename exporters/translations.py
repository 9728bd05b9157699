"""How the operators of operators.py are written in ONNX's own, for torch's exporter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnxscript import FLOAT, INT64, opset18

op: Any = opset18  # it takes numbers and lists where its types say tensors
LAST = 2**31 - 1  # the end of a slice, wherever it is


def top(scores: FLOAT, count: int) -> Any:
    size = op.Min(op.Shape(scores), _row(count))
    return op.TopK(scores, size)


def nms(boxes: FLOAT, scores: FLOAT, threshold: float, count: int) -> Any:
    found = op.NonMaxSuppression(
        op.Unsqueeze(boxes, [0]),
        op.Unsqueeze(scores, [0, 1]),
        [count],
        [threshold],
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
        at = op.Squeeze(op.NonZero(op.Equal(levels, level)), [0])
        image = op.Expand(0, op.Shape(at))
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
    sizes = op.Slice(op.Shape(x), [2], [4])
    whole = op.Mul(op.Div(op.Add(sizes, [down - 1, right - 1]), [down, right]), [down, right])
    return op.Pad(x, op.Concat(_row(0, 0), op.Sub(whole, sizes), axis=0), value, [2, 3])


def windows(x: FLOAT, side: int, shift: int) -> Any:
    """In the shape of the grid, that -1 and 0 stand for what Reshape knows itself."""
    rest, grid = op.Slice(op.Shape(x), [1], [3]), _grid(x, side)
    whole = op.Mul(grid, [side, side])
    x = op.Pad(x, op.Concat(_row(0, 0), op.Sub(whole, rest), axis=0), 0.0, [1, 2])
    x = _rolled(_rolled(x, 1, shift), 2, shift) if shift else x
    rows, columns = op.Split(grid, axis=0, num_outputs=2)
    x = op.Reshape(x, op.Concat(_row(0), rows, _row(side), columns, _row(side, -1), axis=0))
    width = op.Slice(op.Shape(x), [5], [6])
    x = op.Reshape(op.Transpose(x, perm=[0, 1, 3, 2, 4, 5]), op.Concat(_row(-1, side * side), width, axis=0))
    if not shift:
        return x, op.Expand(0.0, op.Concat(op.Slice(op.Shape(x), [0], [1]), _row(1, side * side, side * side), axis=0))
    down, across = (op.Squeeze(length, [0]) for length in op.Split(whole, axis=0, num_outputs=2))
    part = op.Add(op.Mul(op.Unsqueeze(_parts(down, side, shift), [1]), 3), _parts(across, side, shift))
    part = op.Reshape(part, op.Concat(rows, _row(side), columns, _row(side), axis=0))
    part = op.Reshape(op.Transpose(part, perm=[0, 2, 1, 3]), [-1, side * side])
    apart = op.Where(op.Equal(op.Unsqueeze(part, [1]), op.Unsqueeze(part, [2])), 0.0, -100.0)
    times = op.Div(op.Slice(op.Shape(x), [0], [1]), op.Slice(op.Shape(apart), [0], [1]))
    return x, op.Tile(op.Unsqueeze(apart, [1]), op.Concat(times, _row(1, 1, 1), axis=0))


def whole(parts: FLOAT, like: FLOAT, side: int, shift: int) -> Any:
    grid, width = _grid(like, side), op.Slice(op.Shape(parts), [2], [3])
    x = op.Reshape(parts, op.Concat(_row(-1), grid, _row(side, side), width, axis=0))
    x = op.Transpose(x, perm=[0, 1, 3, 2, 4, 5])
    x = op.Reshape(x, op.Concat(_row(-1), op.Mul(grid, [side, side]), width, axis=0))
    x = _rolled(_rolled(x, 1, -shift), 2, -shift) if shift else x
    return op.Slice(x, [0, 0], op.Slice(op.Shape(like), [1], [3]), [1, 2])


def _row(*numbers: int) -> Any:
    return op.Constant(value_ints=list(numbers))


def _grid(x: Any, side: int) -> Any:
    """How many windows there are downwards and across."""
    return op.Div(op.Add(op.Slice(op.Shape(x), [1], [3]), [side - 1, side - 1]), [side, side])


def _rolled(x: Any, axis: int, by: int) -> Any:
    """So far to the front; what falls off comes in at the end."""
    return op.Concat(op.Slice(x, [by], [LAST], [axis]), op.Slice(x, [0], [by], [axis]), axis=axis)


def _parts(length: Any, side: int, shift: int) -> Any:
    """Which of the three parts of a shifted side a place is in."""
    place = op.Range(0, length, 1)
    far = [op.GreaterOrEqual(place, op.Sub(length, n)) for n in (side, shift)]
    return op.Add(*(op.Cast(where, to=INT64.dtype) for where in far))


TABLE = {"top": top, "nms": nms, "regions": regions, "padded": padded, "windows": windows, "whole": whole}
