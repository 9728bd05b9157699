"""An exported network and its file."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    from compress.exporters import onnx
    from helpers.exported_runs import IMAGES, SHORT_TIMING, small_network

    path = tmp_path_factory.mktemp("exported") / "model.onnx"
    onnx.export(small_network(8), path, IMAGES, timing=SHORT_TIMING)
    return small_network(8), path
