"""`compress landscape`: a table, landscape.json and a section of the page; what is wrong is said before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import compress
from compress.cli.quickstart import Network
from compress.report import Report
from compress.storage import lock_directory
from helpers.commands import run
from helpers.digits import loaders

SMALL = ["--resolution", "3", "--variance-resolution", "3", "--batches", "2", "--batch-size", "32"]


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A pruned network, and the words of a command for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("own_network.py").write_text(
        "from compress.cli.quickstart import Network\ndef make():\n    return Network(4).eval()\n"
    )
    torch.manual_seed(0)
    model = Network(4).eval()
    torch.save(model.state_dict(), "dense.pt")
    recipe: dict[str, Any] = {"budget": {"macs": "60%"}, "timing": {"repeats": 3}}
    compress.prune(model, recipe, example_inputs=torch.randn(1, 1, 8, 8), quiet=True).save("out")
    return ["landscape", "out", "--model", "own_network:make", "--weights", "dense.pt"]


def test_landscape_writes_json_and_a_section_of_the_page(
    saved: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*saved, "--data", "digits", *SMALL]
    code, out, err = run(monkeypatch, capsys, *words, "--range", "0.5")
    assert code == 0, err
    assert "saved in out/landscape.json; open out/report.html" in out
    assert {p.name for p in Path("out").iterdir()} == {
        *("plan.json", "model.safetensors", "report.json", "report.html", "landscape.json"),
    }
    found = compress.Landscape.load("out/landscape.json")
    assert [surface.name for surface in found.surfaces] == ["dense", "compact"]
    assert (found.axis.tolist(), found.samples) == ([-0.5, 0, 0.5], 64)
    dense = Network(4)
    dense.load_state_dict(torch.load("dense.pt"))
    compact = compress.load(Network(4), "out")
    images, classes = (torch.cat(parts) for parts in zip(*[(x, y) for x, y in loaders()[1]], strict=True))
    for model, surface in ((dense, found.surfaces[0]), (compact, found.surfaces[1])):
        with torch.no_grad():
            expected = torch.nn.functional.cross_entropy(model.eval()(images[:64]), classes[:64])
        assert surface.loss[1, 1] == pytest.approx(float(expected), rel=1e-5)
    assert Report.load("out/report.json").landscape == found.to_dict()
    assert "<h2>Loss landscape</h2>" in Path("out/report.html").read_text()
    code, out, err = run(monkeypatch, capsys, *words, "--json", "--variance-resolution", "0", "--quiet")
    assert code == 0 and err == "", err
    data = json.loads(out)
    assert data["surfaces"][0]["variance"] is None and out.strip() == Path("out/landscape.json").read_text()
    compress.prune(
        dense.eval(), {"budget": "60%", "timing": {"repeats": 3}}, example_inputs=images[:1], quiet=True
    ).save("out")
    assert not Path("out/landscape.json").exists(), "it was that of another network"


def test_result_without_a_report_gets_json_alone(
    saved: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("out/report.json").unlink()
    code, out, err = run(monkeypatch, capsys, *saved, "--data", "digits", "--train", *SMALL)
    assert code == 0, err
    assert out.splitlines()[-1] == "saved in out/landscape.json"


def with_recipe(**sections: Any) -> None:
    report = Report.load("out/report.json")
    report.recipe |= sections
    Path("out/report.json").write_text(report.to_json())


@pytest.mark.parametrize(
    ("words", "recipe", "message"),
    [
        (["--data", "digits", "--resolution", "4"], {}, "resolution: expected an odd number from 3"),
        (
            ["--data", "digits", "--range", "0"],
            {},
            "such as 1.0; got 0.0 On the command line span: is --range",
        ),
        (["--data", "digits", "--batches", "1"], {}, "batches: expected at least 2"),
        (["--data", "letters"], {}, "data.source 'letters': expected digits, cifar10:FOLDER"),
        ([], {}, "--data: expected the data on which the loss is evaluated: digits"),
        ([], {"data": {"source": "evil:make"}}, "its data factory 'evil:make' is not called; to use it, type --data"),
        (["--data", "digits"], {"task": "evil:make"}, "a task of its own, 'evil:make', whose code is not called"),
        (["--data", "own_data:make"], {}, "--data own_data:make: it has no validation data; choose the other part"),
        (["--data", "digits", "--model", "torchvision:resnet18"], {}, "expected the 122 tensors of the model"),
    ],
)
def test_what_is_wrong_is_said(
    words: list[str],
    recipe: dict[str, Any],
    message: str,
    saved: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("own_data.py").write_text("def make():\n    return [1], None\n")
    Path("evil.py").write_text("raise SystemExit(99)\n")
    with_recipe(**recipe)
    before = {p.name: p.read_bytes() for p in Path("out").iterdir()}
    code, _, err = run(monkeypatch, capsys, *saved, *words)
    assert code == 2
    assert message in err
    assert before == {p.name: p.read_bytes() for p in Path("out").iterdir()}


def test_folder_without_a_plan_or_in_use_is_refused(
    saved: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with lock_directory(Path("out")):
        code, _, err = run(monkeypatch, capsys, *saved, "--data", "digits", *SMALL)
    assert code == 2
    assert "out: in use by another run" in err
    code, _, err = run(monkeypatch, capsys, "landscape", "nowhere", *saved[2:], "--data", "digits")
    assert code == 2
    assert "nowhere: expected a folder written by compress prune or Pruned.save; it has no plan.json" in err
    assert not Path("nowhere").exists()


def test_interrupted_command_continues(
    saved: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*saved, "--data", "digits", *SMALL]
    calls = []
    original = compress.Classification.loss

    def interrupted(self: Any, outputs: Any, batch: Any) -> Any:
        calls.append(1)
        if len(calls) == 20:
            raise KeyboardInterrupt
        return original(self, outputs, batch)

    monkeypatch.setattr(compress.Classification, "loss", interrupted)
    code, _, err = run(monkeypatch, capsys, *words)
    assert code == 130
    assert "the same command continues from here" in err
    assert Path("out/landscape.part.json").exists() and not Path("out/.lock").exists()
    code, _, err = run(monkeypatch, capsys, *words)
    assert code == 0, err
    assert "landscape: 9 of 36 values are those of an interrupted call" in err
    assert len(calls) == 2 * 36 + 20 - 2 * 9
    assert not Path("out/landscape.part.json").exists()
