"""`export` in a recipe, `compress export`, `compress bench`, int8, and what a file says of itself."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from commands import run
from onnx import numpy_helper
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import compress
from compress.data import Data, loaders
from compress.exporters import onnx as exporter
from compress.quickstart import Network
from compress.recipe import Timing

BRIEF = Timing(repeats=6)
RECIPE: dict[str, Any] = {"budget": {"macs": "50%"}, "timing": {"repeats": 3}}
MODEL = "test_export:small"


def small() -> nn.Module:
    torch.manual_seed(0)
    return Network(12).eval()


@pytest.fixture(scope="module")
def digits() -> tuple[Any, Any]:
    return loaders(Data(source="digits", batch_size=64))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, digits: tuple[Any, Any]) -> tuple[compress.Pruned, Path]:
    """One call from a dense model to checked files."""
    folder = tmp_path_factory.mktemp("run") / "out"
    recipe = RECIPE | {"export": {"int8": True}}
    train, val = digits
    return compress.prune(small(), recipe, train=train, val=val, workdir=folder, quiet=True), folder


def test_one_call_goes_from_a_dense_model_to_a_checked_file(
    exported: tuple[compress.Pruned, Path], digits: tuple[Any, Any]
) -> None:
    pruned, folder = exported
    report = exporter.ExportReport.from_dict(pruned.report.export)
    assert report.path == str(folder / "model.onnx")
    assert report.dense is not None and report.file.bytes < report.dense.bytes
    assert report.file.macs == pruned.report.pruned.macs and report.dense.macs == pruned.report.dense.macs
    assert "sample 0" in {d["inputs"] for d in report.differences}
    x = torch.cat([x for x, _ in digits[1]])
    network = exporter.Runner(folder / "model.onnx")
    torch.testing.assert_close(network(x), pruned.model(x).detach(), rtol=1e-4, atol=1e-4)
    assert exporter.check(pruned.model, folder / "model.onnx", x[:3])


def test_the_report_shows_the_file_in_the_table_and_on_the_page(exported: tuple[compress.Pruned, Path]) -> None:
    pruned, folder = exported
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(pruned.report)
    text, page = console.export_text(), (folder / "report.html").read_text()
    for shown in ("onnxruntime", "off the model by", "int8: accuracy", "opset 20"):
        assert shown in text and shown in page
    assert json.loads((folder / "report.json").read_text())["export"] == pruned.report.export


def test_int8_has_a_smaller_file_and_an_accuracy_of_its_own(
    exported: tuple[compress.Pruned, Path], digits: tuple[Any, Any]
) -> None:
    pruned, folder = exported
    found = exporter.ExportReport.from_dict(pruned.report.export).int8
    assert found is not None
    assert found.bytes == (folder / "model.int8.onnx").stat().st_size < 0.5 * (folder / "model.onnx").stat().st_size
    assert found.calibrated_on == 16 * 64
    network, task = exporter.Runner(folder / "model.int8.onnx"), compress.Classification(*digits)
    assert task.evaluate(network, digits[1]) == found.metrics
    assert task.evaluate(pruned.model, digits[1])["accuracy"] == pytest.approx(found.float_metrics["accuracy"])
    file = onnx.load(folder / "model.int8.onnx")
    kinds = {t.data_type for t in file.graph.initializer if t.name.endswith("weight_quantized")}
    assert kinds == {onnx.TensorProto.INT8}
    assert exporter.read_metadata(folder / "model.int8.onnx") == exporter.read_metadata(folder / "model.onnx")


def test_the_file_says_what_it_is(exported: tuple[compress.Pruned, Path]) -> None:
    pruned, folder = exported
    found = exporter.read_metadata(folder / "model.onnx")
    assert found["recipe"] == pruned.report.recipe
    assert found["inputs"] == {"input": {"shape": ["batch", 1, 8, 8]}}
    saved = compress.Plan.load(folder / "plan.json")
    assert found["plan"] == exporter.plan_hash(saved) == exporter.plan_hash(pruned.plan)
    saved.keep[next(iter(saved.keep))] = [0]
    assert exporter.plan_hash(saved) != found["plan"]


def test_normalisation_and_class_names_come_from_the_loader() -> None:
    from torchvision import transforms

    class Pictures(TensorDataset):
        classes = ("cat", "dog")
        transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5, 0.4), (0.3, 0.2))])

    loader = DataLoader(Subset(Pictures(torch.randn(4, 2)), [0, 1]))
    about = exporter.About.of_loader(loader)
    entries = about.entries({"x": ["batch", 2]})
    assert json.loads(entries["compress.classes"]) == ["cat", "dog"]
    assert json.loads(entries["compress.inputs"]) == {
        "x": {"shape": ["batch", 2], "mean": [0.5, 0.4], "std": [0.3, 0.2]}
    }
    assert set(exporter.About.of_loader(None).entries({})) == {"compress.version", "compress.inputs"}


def test_a_finished_run_comes_back_with_its_file_and_saves_it_along(
    exported: tuple[compress.Pruned, Path], digits: tuple[Any, Any]
) -> None:
    _, folder = exported
    train, val = digits
    recipe = RECIPE | {"export": {"int8": True}}
    before = (folder / "model.onnx").read_bytes()
    again = compress.prune(small(), recipe, train=train, val=val, workdir=folder, resume=True, quiet=True)
    assert again.report.export["path"] == str(folder / "model.onnx")
    again.save(folder)
    assert (folder / "model.onnx").read_bytes() == before


class Refuses(nn.Sequential):
    """Runs and prunes, and has no translation as long as it is told so."""

    stubborn = True

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out.lgamma() if self.stubborn else out


def test_an_export_that_fails_loses_nothing_and_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Refuses(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 3)).eval()

    x, recipe = torch.randn(2, 1, 8, 8), RECIPE | {"export": "onnx"}
    given: dict[str, Any] = {"example_inputs": x, "workdir": tmp_path / "out", "quiet": True}
    with pytest.raises(exporter.ExportError, match="lgamma has no translation to ONNX"):
        compress.prune(make(), recipe, **given)
    assert not (tmp_path / "out" / "plan.json").exists()  # it is known before anything is spent
    with monkeypatch.context() as patch, pytest.raises(exporter.ExportError, match="lgamma has no translation to ONNX"):
        patch.setattr(compress.api, "try_export", lambda *_: None)
        compress.prune(make(), recipe, **given)
    assert not (tmp_path / "out" / "model.onnx").exists()
    compress.load(make(), tmp_path / "out")
    monkeypatch.setattr(Refuses, "stubborn", False)
    given["resume"] = True
    pruned = compress.prune(make(), recipe | {"export": {"slim": False}, "timing": {"repeats": 3}}, **given)
    assert (tmp_path / "out" / "model.onnx").exists() and pruned.report.export["opset"] >= 18
    with pytest.raises(FileExistsError, match=r"(?s)`compress export`:\n  export.slim: was False, is True"):
        compress.prune(make(), recipe, **given)


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
        compress.prune(small(), recipe, train=data, val=data, workdir=tmp_path / "out", quiet=True)


@pytest.mark.parametrize(
    ("recipe", "given", "said"),
    [
        ({"export": "onnx"}, {}, "export: the file goes into the working directory, and there is none"),
        ({"export": {"int8": True}}, {"workdir": True}, "train: export.int8 measures ranges on training data"),
        ({"export": {"int8": True, "half": True}}, {}, "export: expected half or int8"),
        ({"export": "tflite"}, {}, "export.*: expected one of onnx; got 'tflite'"),
        ({"export": {"opsett": 3}}, {}, "export.opsett: expected one of .*opset.* Did you mean opset"),
    ],
)
def test_wishes_that_cannot_be_met_are_told_before_the_start(
    recipe: dict[str, Any], given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    place = {"workdir": tmp_path / "out"} if given else {}
    with pytest.raises(ValueError, match=said):
        compress.prune(small(), RECIPE | recipe, example_inputs=torch.randn(1, 1, 8, 8), quiet=True, **place)


def test_the_command_exports_what_was_saved(
    exported: tuple[compress.Pruned, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pruned, folder = exported
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    words = ["export", str(folder), "--model", MODEL, "--onnx", str(tmp_path / "a.onnx"), "--data", "digits"]
    code, out, err = run(monkeypatch, capsys, *words, "--int8", str(tmp_path / "b.onnx"), "--opset", "19", "--json")
    assert code == 0, err
    data = json.loads(out)
    assert data["opset"] == 19 and data["max_rel_diff"] < 1e-4 and data["realised"] > 0
    assert 0 < data["int8"]["metrics"]["accuracy"] <= 1 and (tmp_path / "b.onnx").exists()
    exporter.check(pruned.model, tmp_path / "a.onnx", torch.randn(2, 1, 8, 8))


@pytest.mark.parametrize("source", ["digits", "cifar10:nowhere"])
def test_the_command_takes_the_input_from_the_recipes_data_if_they_are_here(
    source: str,
    exported: tuple[compress.Pruned, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    exported[0].save(tmp_path / "run")
    said = json.loads((tmp_path / "run" / "report.json").read_text())
    said["recipe"]["data"] = {"source": source, "batch_size": 64}
    (tmp_path / "run" / "report.json").write_text(json.dumps(said))
    words = ["export", str(tmp_path / "run"), "--model", MODEL, "--onnx", str(tmp_path / "a.onnx")]
    code, _, err = run(monkeypatch, capsys, *words, "--static")
    if source == "digits":
        assert code == 0, err
        assert exporter.read_metadata(tmp_path / "a.onnx")["inputs"] == {"input": {"shape": [1, 1, 8, 8]}}
    else:
        assert code == 2 and "expected input[1, 3, 224, 224] to have 1 channels" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--onnx", "a.onnx", "--int8", "b.onnx"], "--int8 b.onnx: its ranges are measured on data; give --data"),
        (["--onnx", "a.onnx", "--int8", "./a.onnx"], "--int8 a.onnx: expected another file than --onnx"),
        (["--onnx", "missing/a.onnx", "--input", "1,1,8,8"], "missing/a.onnx: expected an existing directory"),
        (["--onnx", "a.onnx", "--input", "1,3,8,8"], "example_inputs: the model does not run on"),
        (["--onnx", "a.onnx"], "On the command line example_inputs is --input, as a shape such as 1,3,224,224"),
    ],
)
def test_the_command_says_what_to_mend(
    words: list[str],
    said: str,
    exported: tuple[compress.Pruned, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    code, _, err = run(monkeypatch, capsys, "export", str(exported[1]), "--model", MODEL, *words)
    assert code == 2 and said in err


def test_bench_compares_files_in_a_table_and_as_json(
    exported: tuple[compress.Pruned, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(exported[1] / name) for name in ("model.onnx", "model.int8.onnx")]
    words = ["bench", *files, "--batch", "3", "--repeats", "6", "--threads", "1"]
    code, out, _ = run(monkeypatch, capsys, *words, "--json")
    found = json.loads(out)
    assert code == 0 and [entry["path"] for entry in found["files"]] == files
    assert found["inputs"] == {"input": [3, 1, 8, 8]} and found["threads"] == 1 and found["repeats"] == 6
    assert found["files"][0]["ratio"] == [1, 1, 1] and all(entry["latency_ms"] > 0 for entry in found["files"])
    code, out, _ = run(monkeypatch, capsys, *words)
    assert code == 0 and "1 thread, 6 runs of each in turn" in " ".join(out.split())


def test_bench_asks_for_what_it_cannot_know(exported: tuple[compress.Pruned, Path], tmp_path: Path) -> None:
    free, other = tmp_path / "free.onnx", tmp_path / "other.onnx"
    exporter.export(small(), free, torch.randn(1, 1, 8, 8), dynamic_size=True, timing=BRIEF)
    exporter.export(nn.Linear(3, 2), other, torch.randn(1, 3), timing=BRIEF)
    with pytest.raises(exporter.ExportError, match=r"input: its shape is \['batch', 1, 'height', 'width'\]: say which"):
        exporter.bench([free])
    assert exporter.bench([free], shape=[1, 1, 9, 9], repeats=6).inputs == {"input": [1, 1, 9, 9]}
    with pytest.raises(exporter.ExportError, match=r"--input: expected a shape of input.*got \[1, 2, 9, 9\]"):
        exporter.bench([free], shape=[1, 2, 9, 9])
    with pytest.raises(exporter.ExportError, match=r"other.onnx: expected the inputs of .*model.onnx"):
        exporter.bench([exported[1] / "model.onnx", other])
    with pytest.raises(exporter.ExportError, match=r"nowhere.onnx: no such file"):
        exporter.bench([tmp_path / "nowhere.onnx"])


def test_quantising_without_data_is_an_error(exported: tuple[compress.Pruned, Path], tmp_path: Path) -> None:
    source = exported[1] / "model.onnx"
    with pytest.raises(exporter.ExportError, match="calibration: expected at least one batch; got none"):
        exporter.quantise(source, tmp_path / "int8.onnx", [])
    with pytest.raises(exporter.ExportError, match=r"onnxruntime fails on input\[2, 3, 8, 8\]"):
        exporter.quantise(source, tmp_path / "int8.onnx", [torch.randn(2, 3, 8, 8)])
    assert not list(tmp_path.iterdir())


def test_a_linear_layer_in_int8_is_off_by_no_more_than_its_steps(tmp_path: Path) -> None:
    """Weights and inputs are off by half a step at most: 1/254 of their ranges, times what they are multiplied with."""
    torch.manual_seed(0)
    model, x = nn.Linear(16, 4, bias=False), torch.rand(64, 16) * 2 - 1
    exporter.export(model, tmp_path / "a.onnx", x, timing=BRIEF)
    exporter.quantise(tmp_path / "a.onnx", tmp_path / "b.onnx", [x], timing=BRIEF)
    off = (exporter.Runner(tmp_path / "b.onnx")(x) - model(x).detach()).abs().max()
    weight = model.weight.detach()
    step = weight.abs().max() / 127 / 2 * x.abs().sum(1).max() + 2 / 255 / 2 * weight.abs().sum(1).max()
    step += (model(x).max() - model(x).min()).detach() / 255  # of the output
    assert 0 < off < 1.1 * step
    kept = [t for t in onnx.load(tmp_path / "b.onnx").graph.initializer if t.data_type == onnx.TensorProto.INT8]
    assert max(numpy_helper.to_array(t).size for t in kept) == weight.numel()
