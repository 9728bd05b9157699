"""The first node that computes something else is named."""

from __future__ import annotations

import pytest
import torch

from cases import CASES, build, example
from compress.exporters import lowering
from compress.exporters.first_difference import describe_first_difference
from compress.exporters.flat_model import CallSignature


@pytest.mark.parametrize("name", ["residual_stream", "instance_norm_with_statistics", "operator_nobody_knows"])
def test_no_node_of_a_right_file_is_blamed(name: str) -> None:
    """Also where values inside go by a name that means something else in the program."""
    case = CASES[name]
    model, x = build(case, dtype=torch.float32), example(case, dtype=torch.float32)
    lowered = lowering.lower_to_onnx(model, CallSignature.from_example(model, x), lowering.LoweringOptions())
    output = lowered.output_names[0]
    assert describe_first_difference(lowered, [x], output, 1e-5) == ""
