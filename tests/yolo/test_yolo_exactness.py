"""Every family at random widths: zeroed and sliced networks are one function, and the saved one is loaded bit-equal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import compress
from compress.recipe import Target
from helpers.random_plans import check_random_plans, randomize_

pytest.importorskip("ultralytics", reason="the extra yolo is not installed")
from compress import yolo

PLANS = 1
# The detectors of v10, 11, 12 and 26 are in tests/contracts/test_attention_widths.py.
SPECS = ["yolov5n", "yolov8n-seg", "yolov9t", "yolo11n-pose", "yolo11n-obb", "yolo11n-cls", "rtdetr-resnet50"]


@pytest.mark.parametrize("spec", SPECS)
def test_random_unequal_widths_are_exact(spec: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 64, 64).double()
    model = yolo.build(f"{spec}.yaml").model.double()
    model = model.eval() if "rtdetr" in spec else randomize_(model, x)
    groups = compress.find_groups(model, x[:1], Target(residual=True, attention=["qk", "v"]))
    assert len(groups) > 20
    assert not [r for r in groups.refused if "does not run" in r.reason or "differ" in r.reason]
    check_random_plans(model, x, groups, PLANS, tmp_path)
