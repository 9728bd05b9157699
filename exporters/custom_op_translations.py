"""Translations of the operators in custom_ops.py to standard ONNX operators, for torch's exporter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnxscript import FLOAT, INT64, opset18

op: Any = opset18  # untyped: it also accepts numbers and lists where its annotations say tensors
SLICE_END = 2**31 - 1  # an end index beyond any axis


def top_scores(scores: FLOAT, count: int) -> Any:
    """Return the largest scores and their indices."""
    size = op.Min(op.Shape(scores), _ints(count))
    return op.TopK(scores, size)


def nms(boxes: FLOAT, scores: FLOAT, threshold: float, count: int) -> Any:
    """Apply NonMaxSuppression; return the indices of the boxes that are kept."""
    selected = op.NonMaxSuppression(
        op.Unsqueeze(boxes, [0]),
        op.Unsqueeze(scores, [0, 1]),
        [count],
        [threshold],
    )
    return op.Squeeze(op.Slice(selected, [2], [3], [1]), [1])


def roi_align_levels(
    maps: Sequence[FLOAT],
    boxes: FLOAT,
    levels: INT64,
    scales: Sequence[float],
    size: int,
    samples: int,
    half: bool,
) -> Any:
    """Apply RoiAlign level by level, then restore the order of the boxes."""
    indices, pooled = [], []
    for level, (feature_map, scale) in enumerate(zip(maps, scales, strict=True)):
        at = op.Squeeze(op.NonZero(op.Equal(levels, level)), [0])
        image = op.Expand(0, op.Shape(at))
        mode = "half_pixel" if half else "output_half_pixel"
        pooled.append(
            op.RoiAlign(
                feature_map,
                op.Gather(boxes, at),
                image,
                coordinate_transformation_mode=mode,
                output_height=size,
                output_width=size,
                sampling_ratio=samples,
                spatial_scale=scale,
            )
        )
        indices.append(at)
    if len(pooled) == 1:
        return pooled[0]
    order = op.Concat(*indices, axis=0)
    _, inverse_order = op.TopK(order, op.Shape(order), largest=0)
    return op.Gather(op.Concat(*pooled, axis=0), inverse_order)


def pad_to_multiple(x: FLOAT, down: int, right: int, value: float) -> Any:
    """Pad height and width up to multiples."""
    sizes = op.Slice(op.Shape(x), [2], [4])
    padded_sizes = op.Mul(op.Div(op.Add(sizes, [down - 1, right - 1]), [down, right]), [down, right])
    return op.Pad(x, op.Concat(_ints(0, 0), op.Sub(padded_sizes, sizes), axis=0), value, [2, 3])


def partition_windows(x: FLOAT, side: int, shift: int) -> Any:
    """Partition a map into windows; Reshape infers batch (0) and channels (-1)."""
    sizes, grid = op.Slice(op.Shape(x), [1], [3]), _window_grid(x, side)
    padded_sizes = op.Mul(grid, [side, side])
    x = op.Pad(x, op.Concat(_ints(0, 0), op.Sub(padded_sizes, sizes), axis=0), 0.0, [1, 2])
    x = _roll(_roll(x, 1, shift), 2, shift) if shift else x
    rows, columns = op.Split(grid, axis=0, num_outputs=2)
    x = op.Reshape(x, op.Concat(_ints(0), rows, _ints(side), columns, _ints(side, -1), axis=0))
    width = op.Slice(op.Shape(x), [5], [6])
    x = op.Reshape(op.Transpose(x, perm=[0, 1, 3, 2, 4, 5]), op.Concat(_ints(-1, side * side), width, axis=0))
    if not shift:
        return x, op.Expand(0.0, op.Concat(op.Slice(op.Shape(x), [0], [1]), _ints(1, side * side, side * side), axis=0))
    height, width = (op.Squeeze(length, [0]) for length in op.Split(padded_sizes, axis=0, num_outputs=2))
    region = op.Add(
        op.Mul(op.Unsqueeze(_shift_regions(height, side, shift), [1]), 3), _shift_regions(width, side, shift)
    )
    region = op.Reshape(region, op.Concat(rows, _ints(side), columns, _ints(side), axis=0))
    region = op.Reshape(op.Transpose(region, perm=[0, 2, 1, 3]), [-1, side * side])
    mask = op.Where(op.Equal(op.Unsqueeze(region, [1]), op.Unsqueeze(region, [2])), 0.0, -100.0)
    batch = op.Div(op.Slice(op.Shape(x), [0], [1]), op.Slice(op.Shape(mask), [0], [1]))
    return x, op.Tile(op.Unsqueeze(mask, [1]), op.Concat(batch, _ints(1, 1, 1), axis=0))


def merge_windows(parts: FLOAT, like: FLOAT, side: int, shift: int) -> Any:
    """Merge windows into a map with the shape of `like`."""
    grid, width = _window_grid(like, side), op.Slice(op.Shape(parts), [2], [3])
    x = op.Reshape(parts, op.Concat(_ints(-1), grid, _ints(side, side), width, axis=0))
    x = op.Transpose(x, perm=[0, 1, 3, 2, 4, 5])
    x = op.Reshape(x, op.Concat(_ints(-1), op.Mul(grid, [side, side]), width, axis=0))
    x = _roll(_roll(x, 1, -shift), 2, -shift) if shift else x
    return op.Slice(x, [0, 0], op.Slice(op.Shape(like), [1], [3]), [1, 2])


def _ints(*numbers: int) -> Any:
    return op.Constant(value_ints=list(numbers))


def _window_grid(x: Any, side: int) -> Any:
    """Return the number of windows in a column and in a row."""
    return op.Div(op.Add(op.Slice(op.Shape(x), [1], [3]), [side - 1, side - 1]), [side, side])


def _roll(x: Any, axis: int, by: int) -> Any:
    """Roll towards the front by `by` positions, as `torch.roll(x, -by, axis)`."""
    return op.Concat(op.Slice(x, [by], [SLICE_END], [axis]), op.Slice(x, [0], [by], [axis]), axis=axis)


def _shift_regions(length: Any, side: int, shift: int) -> Any:
    """Return, for each position along a shifted side, which of the three contiguous regions it is in."""
    position = op.Range(0, length, 1)
    beyond = [op.GreaterOrEqual(position, op.Sub(length, n)) for n in (side, shift)]
    return op.Add(*(op.Cast(is_beyond, to=INT64.dtype) for is_beyond in beyond))


TRANSLATIONS = {  # by operator name, as in "compress::top"
    "top": top_scores,
    "nms": nms,
    "regions": roi_align_levels,
    "padded": pad_to_multiple,
    "windows": partition_windows,
    "whole": merge_windows,
}
