"""A file is written whole, after it was compared, or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from compress.exporters import file_writer, lowering
from compress.exporters import onnx as exporter
from helpers.exported_runs import IMAGES, SHORT_TIMING, small_network
from helpers.onnx_files import change_weight


def test_a_failed_export_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The translation itself is at fault: its graph is patched before anybody has seen it."""
    lower_to_onnx = lowering.lower_to_onnx

    def broken(*args: Any, **kwargs: Any) -> Any:
        lowered = lower_to_onnx(*args, **kwargs)
        change_weight(lowered.proto, "head.2.weight", 0.5)
        return lowered

    monkeypatch.setattr(file_writer, "lower_to_onnx", broken)
    with pytest.raises(exporter.ParityError, match=r"first node that differs is node_\w+ \(Gemm\) of module head\.2"):
        exporter.export(small_network(8), tmp_path / "model.onnx", IMAGES, timing=SHORT_TIMING)
    assert not list(tmp_path.iterdir())
    report = exporter.export(small_network(8), tmp_path / "model.onnx", IMAGES, check=False, timing=SHORT_TIMING)
    assert report.max_abs_diff is None and (tmp_path / "model.onnx").exists()


def test_a_failed_export_leaves_the_previous_file(
    exported: tuple[nn.Module, Path],
) -> None:
    model, path = exported
    before = path.read_bytes()
    with pytest.raises(exporter.ParityError, match="the tolerance is 1e-12"):
        exporter.export(model, path, IMAGES, tolerance=1e-12, timing=SHORT_TIMING)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_path_that_cannot_be_written_is_refused_before_the_export(tmp_path: Path) -> None:
    class Never(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("the model was run")

    with pytest.raises(
        FileNotFoundError, match=r"expected an existing directory; .*missing does not exist. Create it first"
    ):
        exporter.export(Never(), tmp_path / "missing" / "model.onnx", IMAGES)
    with pytest.raises(IsADirectoryError, match=r"expected the name of a file such as model.onnx"):
        exporter.export(Never(), tmp_path, IMAGES)
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0o500)
    closed = locked if os.geteuid() else Path("/proc/self")  # nothing is locked for root, but nobody writes there
    with pytest.raises(OSError, match=r"cannot write in .*choose another directory"):
        exporter.export(Never(), closed / "model.onnx", IMAGES)
