"""The exporter behind `export: onnx`: one call writes a file that computes what the network computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import compress
from compress.exporters import onnx as exporter
from helpers.exported_runs import RECIPE, digit_loaders, small_network


def test_one_call_goes_from_a_dense_model_to_a_checked_file(exported_run: tuple[compress.Pruned, Path]) -> None:
    pruned, folder = exported_run
    report = exporter.ExportReport.from_dict(pruned.report.export)
    assert report.path == str(folder / "model.onnx")
    assert report.dense is not None and report.file.bytes < report.dense.bytes
    assert report.file.macs == pruned.report.pruned.macs and report.dense.macs == pruned.report.dense.macs
    assert "sample 0" in {d["inputs"] for d in report.differences}
    x = torch.cat([x for x, _ in digit_loaders()[1]])
    network = exporter.OnnxRunner(folder / "model.onnx")
    torch.testing.assert_close(network(x), pruned.model(x).detach(), rtol=1e-4, atol=1e-4)
    assert exporter.check(pruned.model, folder / "model.onnx", x[:3])


def test_an_opset_that_there_is_not_is_known_before_anything_is_spent(tmp_path: Path) -> None:
    class Untouched(list[Any]):
        """Batches of which no more than the first may be read."""

        def __iter__(self) -> Iterator[Any]:
            for number, batch in enumerate(super().__iter__()):
                assert number == 0, "read on"
                yield batch

    data = Untouched([(torch.randn(4, 1, 8, 8), torch.zeros(4, dtype=torch.long))] * 2)
    recipe = RECIPE | {"export": {"opset": 99}}
    with pytest.raises(exporter.ExportError, match=r"opset: 99 is too new for this model.*leave opset out"):
        compress.prune(small_network(), recipe, train=data, val=data, workdir=tmp_path / "out", quiet=True)
