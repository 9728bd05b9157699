"""Change weights in ONNX files."""

from __future__ import annotations

from typing import Any

from onnx import numpy_helper


def change_weight(proto: Any, name: str, by: float) -> None:
    """Add to one weight of a file."""
    tensor = next(t for t in proto.graph.initializer if t.name == name)
    weights = numpy_helper.to_array(tensor).copy()
    weights.reshape(-1)[0] += by
    tensor.CopyFrom(numpy_helper.from_array(weights, name))
