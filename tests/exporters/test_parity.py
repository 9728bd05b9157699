"""Files that compute something else than the model are refused, with the node that differs first."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from compress.exporters import onnx as exporter
from helpers.exported_runs import IMAGES, SHORT_TIMING, small_network
from helpers.onnx_files import change_weight


@pytest.mark.parametrize(
    ("weight", "module"), [("stage1.1.conv1.weight", "stage1.1"), ("stage2.0.conv2.weight", "stage2.0")]
)
def test_one_changed_weight_in_the_file_is_caught_and_its_node_is_named(
    exported: tuple[nn.Module, Path], weight: str, module: str, tmp_path: Path
) -> None:
    model, path = exported
    proto = onnx.load(path)
    change_weight(proto, weight, 0.5)
    onnx.save(proto, tmp_path / "patched.onnx")
    node = next(n for n in proto.graph.node if weight in n.input)
    said = rf"output output: the file is .* off the model .*differs is {node.name} \(Conv\) of module {module}"
    with pytest.raises(exporter.ParityError, match=said):
        exporter.check(model, tmp_path / "patched.onnx", IMAGES)


def test_a_difference_in_one_of_several_outputs_is_that_outputs(tmp_path: Path) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.left, self.right = nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = self.body(x).relu()
            return {"boxes": self.left(y), "scores": self.right(y)}

    torch.manual_seed(0)
    model, path, x = Heads().eval(), tmp_path / "model.onnx", torch.randn(2, 4)
    exporter.export(model, path, x, timing=SHORT_TIMING)
    proto = onnx.load(path)
    change_weight(proto, "right.bias", 1.0)
    onnx.save(proto, path)
    with pytest.raises(exporter.ParityError, match=r"^output scores: .* of module right") as caught:
        exporter.check(model, path, x)
    assert "boxes" not in str(caught.value)


def test_a_sample_on_which_the_file_is_off_is_named(exported: tuple[nn.Module, Path]) -> None:
    model, path = exported
    found = exporter.check(model, path, IMAGES, samples=[torch.cat([IMAGES, IMAGES, IMAGES])])
    assert [d.inputs for d in found][-1] == "sample 0"
    with pytest.raises(
        exporter.ExportError, match=r"samples: expected inputs like the example's, float32\[2, 1, 8, 8\]"
    ):
        exporter.check(model, path, IMAGES, samples=[IMAGES.double()])


def test_a_file_of_another_model_is_refused(exported: tuple[nn.Module, Path]) -> None:
    _, path = exported
    torch.manual_seed(1)
    other = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    with pytest.raises(
        exporter.ParityError, match=r"output output .*the model returns torch.float32\[1, 3\], the file .*\[1, 10\]"
    ):
        exporter.check(other, path, IMAGES)


def test_a_small_cut_is_exported_though_its_metadata_outweighs_it(tmp_path: Path) -> None:
    """Parameters fell; how much text the file holds beside them does not matter."""
    dense = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10)).eval()
    compact = nn.Sequential(nn.Flatten(), nn.Linear(64, 7), nn.ReLU(), nn.Linear(7, 10)).eval()
    about = exporter.ExportMetadata(classes=[f"class {number} {'x' * 200}" for number in range(10)])
    report = exporter.export(compact, tmp_path / "m.onnx", IMAGES, dense=dense, about=about, timing=SHORT_TIMING)
    assert report.dense is not None and report.file.parameters < report.dense.parameters
    assert report.file.bytes > report.dense.bytes


def test_a_compact_file_that_is_not_smaller_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(exporter.ExportError, match=r"not smaller than the dense one.*is `dense` the"):
        exporter.export(small_network(8), tmp_path / "model.onnx", IMAGES, dense=small_network(8), timing=SHORT_TIMING)
    assert not list(tmp_path.iterdir())


def test_differences_count_infinities_and_nans_as_they_are() -> None:
    from compress.exporters.parity import max_difference

    nan, inf = float("nan"), float("inf")
    assert max_difference(torch.tensor([nan, inf, 2.0]), torch.tensor([nan, inf, 1.0])) == (1.0, 0.5)
    assert max_difference(torch.tensor([1.0]), torch.tensor([nan]))[0] == inf
    assert max_difference(torch.tensor([inf]), torch.tensor([-inf]))[0] == inf
    assert max_difference(torch.tensor([3, 4]), torch.tensor([3, 5])) == (1.0, 0.25)
    assert np.isfinite(max_difference(torch.zeros(0), torch.zeros(0))[0])
