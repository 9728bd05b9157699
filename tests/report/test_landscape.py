"""A landscape as JSON and as a table."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from compress import Landscape
from compress.report import Report, Surface
from helpers.pages import made_up


def made(**changes: Any) -> Landscape:
    axis, coarse = np.linspace(-1, 1, 5), np.linspace(-1, 1, 3)
    a, b = np.meshgrid(axis, axis, indexing="ij")
    loss = 0.25 + 3 * a**2 + b**2 + a * b
    compact = 2 * loss
    compact[0, 0] = compact[0, 1] = np.nan
    variance = np.array([[9.0, 4, 9], [4, 1, 4], [9, 4, np.nan]])
    surfaces = Surface("dense", loss, variance), Surface("compact", compact, 4 * variance)
    return Landscape(**{"surfaces": surfaces, "axis": axis, "variance_axis": coarse, **NUMBERS, **changes})


NUMBERS: dict[str, Any] = {"seed": 3, "batches": 8, "samples": 360.0}


def test_json_holds_every_number_and_gaps_as_null(tmp_path: Path) -> None:
    landscape = made()
    landscape.save(tmp_path / "landscape.json")
    data = json.loads((tmp_path / "landscape.json").read_text())
    assert data["surfaces"][1]["loss"][0][:3] == [None, None, float(landscape.surfaces[1].loss[0, 2])]
    again = Landscape.load(tmp_path / "landscape.json")
    for one, other in zip(landscape.surfaces, again.surfaces, strict=True):
        assert one.name == other.name
        assert one.variance is not None and other.variance is not None
        assert np.array_equal(one.loss, other.loss, equal_nan=True)
        assert np.array_equal(one.variance, other.variance, equal_nan=True)
    assert again.to_json() == landscape.to_json()
    assert (again.seed, again.batches, again.samples) == (3, 8, 360)


def test_a_report_keeps_its_landscape(tmp_path: Path) -> None:
    report = made_up(2)
    report.landscape = made().to_dict()
    (tmp_path / "report.json").write_text(report.to_json())
    assert Landscape.from_dict(Report.load(tmp_path / "report.json").landscape).to_json() == made().to_json()


def test_loss_and_variance_are_those_of_the_first_network() -> None:
    landscape = made()
    assert landscape.loss is landscape.surfaces[0].loss
    assert landscape.variance is landscape.surfaces[0].variance
    assert landscape.other is landscape.surfaces[1]
    noise = landscape.surfaces[0].noise
    assert noise is not None and noise[0].tolist() == [3, 2, 3]
    assert repr(landscape) == "Landscape(5 x 5, loss at the weights: dense 0.25, compact 0.5)"


def test_curvature_is_the_mean_of_both_second_derivatives() -> None:
    landscape = made()
    assert landscape.curvature(landscape.surfaces[0]) == pytest.approx((6 + 2) / 2)
    assert landscape.curvature(landscape.surfaces[1]) == pytest.approx(6 + 2)


def test_table_shows_the_weights_the_highest_values_and_the_gaps() -> None:
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(made())
    text = console.export_text()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert cells == [
        ["dense", "0.25", "5.25", "4", "1", "3", "1 of 34"],
        ["compact", "0.5", "10.5", "8", "2", "6", "3 of 34"],
    ]
    assert "8 batches, 360 samples; the plane is -1 to 1" in text
    alone = made(surfaces=(Surface("model", np.full((5, 5), np.nan)),), variance_axis=None)
    console.print(alone)
    assert "gradient noise" not in console.export_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"surfaces": []}, "it has no surface"),
        ({"axis": [-1, 0, 0.5, 1]}, "an odd number of increasing coordinates around 0"),
        ({"axis": [-1, 0.5, 1]}, "an odd number of increasing coordinates around 0"),
        ({"axis": [-1, 0, 1]}, "expected 3 x 3 numbers over the axis"),
        ({"surfaces": [{"name": "dense", "loss": [["a"]], "variance": None}]}, "could not convert"),
        ({"surfaces": [{"name": "dense"}]}, "KeyError: 'loss'"),
        ({"seed": None}, "TypeError"),
    ],
)
def test_damaged_data_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    data = copy.deepcopy(made().to_dict()) | change
    with pytest.raises(ValueError, match=rf"not a landscape, or a damaged one \(.*{message}"):
        Landscape.from_dict(data)
    path = tmp_path / "landscape.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"landscape\.json: not a landscape"):
        Landscape.load(path)
    path.write_text(json.dumps(data)[:40])
    with pytest.raises(ValueError, match=r"landscape\.json: "):
        Landscape.load(path)
