"""What is not let through: files that compute something else, models and wishes that cannot be exported."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from case import build, example
from cases import CASES
from onnx import numpy_helper
from torch import Tensor, nn

import compress
from compress.exporters import locate, lower
from compress.exporters import onnx as exporter
from compress.exporters.call import Call
from compress.quickstart import Network
from compress.recipe import Timing

BRIEF = Timing(repeats=3)
X = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
HOW: dict[str, Any] = {"dynamic_batch": True, "dynamic_size": False, "opset": None, "slim": True, "half": False}


def network() -> nn.Module:
    torch.manual_seed(0)
    return Network(8).eval()


def patch(proto: Any, name: str, by: float) -> None:
    """Add to one weight of a file."""
    tensor = next(t for t in proto.graph.initializer if t.name == name)
    weights = numpy_helper.to_array(tensor).copy()
    weights.reshape(-1)[0] += by
    tensor.CopyFrom(numpy_helper.from_array(weights, name))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    path = tmp_path_factory.mktemp("exported") / "model.onnx"
    exporter.export(network(), path, X, timing=BRIEF)
    return network(), path


@pytest.mark.parametrize(
    ("weight", "module"), [("stage1.1.conv1.weight", "stage1.1"), ("stage2.0.conv2.weight", "stage2.0")]
)
def test_one_changed_weight_in_the_file_is_caught_and_its_node_is_named(
    exported: tuple[nn.Module, Path], weight: str, module: str, tmp_path: Path
) -> None:
    model, path = exported
    proto = onnx.load(path)
    patch(proto, weight, 0.5)
    onnx.save(proto, tmp_path / "patched.onnx")
    node = next(n for n in proto.graph.node if weight in n.input)
    said = rf"output output: the file is .* off the model .*differs is {node.name} \(Conv\) of module {module}"
    with pytest.raises(exporter.ParityError, match=said):
        exporter.check(model, tmp_path / "patched.onnx", X)


def test_an_export_that_goes_wrong_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The translation itself is at fault: its graph is patched before anybody has seen it."""
    whole = lower.lower

    def broken(*args: Any, **kwargs: Any) -> Any:
        lowered = whole(*args, **kwargs)
        patch(lowered.proto, "head.2.weight", 0.5)
        return lowered

    monkeypatch.setattr(exporter, "lower", broken)
    with pytest.raises(exporter.ParityError, match=r"first node that differs is node_\w+ \(Gemm\) of module head\.2"):
        exporter.export(network(), tmp_path / "model.onnx", X, timing=BRIEF)
    assert not list(tmp_path.iterdir())
    report = exporter.export(network(), tmp_path / "model.onnx", X, check=False, timing=BRIEF)
    assert report.max_abs_diff is None and (tmp_path / "model.onnx").exists()


def test_an_export_that_goes_wrong_leaves_the_file_of_the_one_before(
    exported: tuple[nn.Module, Path],
) -> None:
    model, path = exported
    before = path.read_bytes()
    with pytest.raises(exporter.ParityError, match="at most 1e-12 is let through"):
        exporter.export(model, path, X, tolerance=1e-12, timing=BRIEF)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("name", ["residual_stream", "instance_norm_with_statistics", "operator_nobody_knows"])
def test_no_node_of_a_right_file_is_blamed(name: str) -> None:
    """Also where values inside go by a name that means something else in the program."""
    case = CASES[name]
    model, x = build(case, dtype=torch.float32), example(case, dtype=torch.float32)
    lowered = lower.lower(model, Call.of(model, x), **HOW)
    output = lowered.outputs[0]
    assert locate.locate(lowered.program, lowered.proto, [x], output, 1e-5) == ""


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
    exporter.export(model, path, x, timing=BRIEF)
    proto = onnx.load(path)
    patch(proto, "right.bias", 1.0)
    onnx.save(proto, path)
    with pytest.raises(exporter.ParityError, match=r"^output scores: .* of module right") as caught:
        exporter.check(model, path, x)
    assert "boxes" not in str(caught.value)


def test_a_sample_on_which_the_file_is_off_is_named(exported: tuple[nn.Module, Path]) -> None:
    model, path = exported
    found = exporter.check(model, path, X, samples=[torch.cat([X, X, X])])
    assert [d.inputs for d in found][-1] == "sample 0"
    with pytest.raises(
        exporter.ExportError, match=r"samples: expected inputs like the example's, float32\[2, 1, 8, 8\]"
    ):
        exporter.check(model, path, X, samples=[X.double()])


def test_a_file_of_another_model_is_told(exported: tuple[nn.Module, Path]) -> None:
    _, path = exported
    torch.manual_seed(1)
    other = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    with pytest.raises(
        exporter.ParityError, match=r"output output .*expected torch.float32\[1, 3\].*gives .*\[1, 10\]"
    ):
        exporter.check(other, path, X)


def test_a_compact_file_that_is_not_smaller_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(exporter.ExportError, match=r"not smaller than the dense one.*is `dense` the"):
        exporter.export(network(), tmp_path / "model.onnx", X, dense=network(), timing=BRIEF)
    assert not list(tmp_path.iterdir())


class Odd(nn.Module):
    """A module whose code stands in the way."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.conv, self.run = nn.Conv2d(1, 4, 3), run

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.run(self.conv(x))
        return out


class Around(nn.Module):
    def __init__(self, run: Any) -> None:
        super().__init__()
        self.inner = Odd(run)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (torch.lgamma, r"^inner: the operator prims\.lgamma has no translation to ONNX\. Write that module"),
        (lambda x: x if x.sum() > 0 else -x, "^inner: its code branches on the values of its activations"),
        (lambda x: x.reshape(2, -1), "^dynamic_batch: the model's code holds a dimension .* dynamic_batch=False"),
        (lambda x: str(x.shape), "^the model returns str, in which there is no tensor"),
    ],
)
def test_code_that_cannot_be_exported_is_named_by_its_module(run: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(exporter.ExportError, match=said):
        exporter.export(Around(run).eval(), tmp_path / "model.onnx", X, timing=BRIEF)
    assert not list(tmp_path.iterdir())


def test_a_fixed_batch_is_exported_where_the_code_asks_for_one(tmp_path: Path) -> None:
    model = Around(lambda x: x.reshape(2, -1)).eval()
    report = exporter.export(model, tmp_path / "model.onnx", X, dynamic_batch=False, timing=BRIEF)
    assert report.inputs == {"x": [2, 1, 8, 8]} and report.batch_size == 2


@pytest.mark.parametrize("opset", [7, 11, 99])
def test_an_opset_that_the_model_cannot_have_is_an_error(opset: int, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(2), nn.LayerNorm(64)).eval()
    said = f"^opset: {opset} is too {'old' if opset < 18 else 'new'} for this model; .* leave opset out"
    with pytest.raises(exporter.ExportError, match=said):
        exporter.export(model, tmp_path / "model.onnx", X, opset=opset, timing=BRIEF)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (torch.randn(2, 3, 8, 8), r"^example_inputs: the model does not run on float32\[2, 3, 8, 8\]"),
        ((), "^example_inputs: expected at least one tensor"),
        ([torch.randn(1, 8, 8)], "^dynamic_batch: it is not plain which dimension"),
        (3, "^example_inputs: expected a tensor, a tuple of arguments"),
    ],
)
def test_example_inputs_that_do_not_fit_are_told(inputs: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises((exporter.ExportError, TypeError), match=said):
        exporter.export(network(), tmp_path / "model.onnx", inputs, timing=BRIEF)


def test_a_model_in_double_precision_is_asked_to_be_single(tmp_path: Path) -> None:
    with pytest.raises(exporter.ExportError, match=r"^stem\.0\.weight: expected float32; got torch\.float64"):
        exporter.export(network().double(), tmp_path / "model.onnx", X.double(), timing=BRIEF)


def test_a_place_where_nothing_can_be_written_is_told_before_anything_is_spent(tmp_path: Path) -> None:
    class Never(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("the model was run")

    with pytest.raises(
        FileNotFoundError, match=r"expected an existing directory; there is no .*missing. Make it first"
    ):
        exporter.export(Never(), tmp_path / "missing" / "model.onnx", X)
    with pytest.raises(IsADirectoryError, match=r"expected the name of a file such as model.onnx"):
        exporter.export(Never(), tmp_path, X)
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0o500)
    closed = locked if os.geteuid() else Path("/proc/self")  # nothing is locked for root, but nobody writes there
    with pytest.raises(OSError, match=r"nothing can be written in .*choose another directory"):
        exporter.export(Never(), closed / "model.onnx", X)


def test_a_file_that_is_not_onnx_is_told(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"not a graph")
    with pytest.raises(exporter.ExportError, match=r"model.onnx: onnxruntime .* does not load it"):
        exporter.Runner(tmp_path / "model.onnx")


def test_a_runner_called_with_other_inputs_says_which_it_has(exported: tuple[nn.Module, Path]) -> None:
    runner = exporter.Runner(exported[1])
    with pytest.raises(exporter.ExportError, match=r"^expected 1 tensors, input; got 2"):
        runner(X, X)
    with pytest.raises(exporter.ExportError, match=r"^onnxruntime fails on input\[2, 3, 8, 8\]"):
        runner(torch.randn(2, 3, 8, 8))


def test_without_the_extra_it_is_missed_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxslim" else found(name))
    with pytest.raises(exporter.MissingExtra, match=r"^ONNX needs onnxslim: .*pip install 'compress\[onnx\]'"):
        exporter.export(network(), tmp_path / "model.onnx", X)
    with pytest.raises(ImportError, match=r"compress\[onnx\]"):
        compress.prune(
            network(), {"budget": {"macs": "50%"}, "export": "onnx"}, example_inputs=X, workdir=tmp_path / "w"
        )


def test_differences_count_infinities_and_nans_as_they_are() -> None:
    from compress.exporters.parity import apart

    nan, inf = float("nan"), float("inf")
    assert apart(torch.tensor([nan, inf, 2.0]), torch.tensor([nan, inf, 1.0])) == (1.0, 0.5)
    assert apart(torch.tensor([1.0]), torch.tensor([nan]))[0] == inf
    assert apart(torch.tensor([inf]), torch.tensor([-inf]))[0] == inf
    assert apart(torch.tensor([3, 4]), torch.tensor([3, 5])) == (1.0, 0.25)
    assert np.isfinite(apart(torch.zeros(0), torch.zeros(0))[0])
