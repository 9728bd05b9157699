"""Calibration data: inputs without labels for the repair of a cut network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import compress
from compress.pipeline.calibration import describe_repair
from compress.surgery import AttentionRepair, LayerRepair, Repair
from helpers.digits import dense, loaders
from helpers.refusals import refused

RECIPE: dict[str, Any] = {
    "budget": {"macs": "60%"},
    "search": {"method": "magnitude"},
    "compensate": "least_squares",
    "timing": {"repeats": 3},
}


def images(count: int = 64) -> torch.Tensor:
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(3))


def pruned(calibration: Any, **more: Any) -> compress.Pruned:
    return compress.prune(dense(), RECIPE, calibration=calibration, quiet=True, **more)


def test_tensor_list_and_loader_of_the_same_images_give_the_same_network() -> None:
    x = images()
    labels = torch.zeros(64, dtype=torch.long)
    forms = [
        x,
        [x],
        DataLoader(TensorDataset(x), 64),
        DataLoader(TensorDataset(x, labels), 64),
        [{"image": x, "label": labels}],
    ]
    first, *others = [pruned(form).model.state_dict() for form in forms]
    for other in others:
        assert all(torch.equal(value, other[name]) for name, value in first.items())


def test_inputs_of_the_training_data_are_the_default() -> None:
    train, val = loaders()
    done = compress.prune(dense(), RECIPE, train=train, val=val, quiet=True)
    assert any(layer["error_after"] < layer["error_before"] for layer in done.report.repair["layers"])
    assert any(note.startswith("least squares: ") for note in done.report.notes)
    assert done.report.pruned.params == sum(p.numel() for p in done.model.parameters())
    again = compress.prune(dense(), RECIPE, train=train, val=val, quiet=True)
    assert all(torch.equal(value, again.model.state_dict()[name]) for name, value in done.model.state_dict().items())


def test_repaired_network_is_saved_and_loaded(tmp_path: Path) -> None:
    done = pruned(images())
    done.save(tmp_path / "out")
    loaded = compress.load(dense(), tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(loaded(images(4)), done.model(images(4)))
    assert compress.Report.load(tmp_path / "out" / "report.json").repair == done.report.repair


def test_second_round_aims_at_the_network_before_its_own_cut() -> None:
    done = compress.prune(dense(), {**RECIPE, "steps": 2}, calibration=images(), quiet=True)
    assert done.plan.biases
    assert done.report.pruned.macs <= 0.6 * done.report.dense.macs


def test_missing_or_wrong_calibration_data_are_refused_at_the_start() -> None:
    x = images(4)
    refused("compensate: least_squares needs inputs, and there is none. Give calibration=", RECIPE, example_inputs=x)
    refused("train is an iterator, which is read only once", RECIPE, train=iter(loaders()[0]))
    refused("calibration: expected a loader that gives batches; got int", RECIPE, calibration=3)
    refused("calibration: expected at least one input; got none", RECIPE, calibration=[])
    refused("calibration: expected at least one input; got none", RECIPE, calibration=x[:0])
    refused("calibration: expected inputs that can be read twice; got an iterator", RECIPE, calibration=iter([x, x]))
    refused("calibration: the model does not run on the first batch", RECIPE, calibration=torch.randn(4, 3, 8, 8))
    refused("calibration: expected a batch of inputs", RECIPE, calibration=torch.randn(4))
    x[0, 0, 0, 0] = float("nan")
    refused("calibration: the first batch contains NaN or infinity", RECIPE, calibration=x)


def test_notes_name_what_was_left_and_what_got_worse() -> None:
    layers = [
        LayerRepair("a", 0.5, 0.1, 0.01, is_reader=True, samples=10, unknowns=20),
        LayerRepair("b", 0.5, 0.5, reason="no solution lowers its error", is_reader=True),
        LayerRepair("c", 0.5, 0.5, reason="no solution lowers its error"),
    ]
    notes = describe_repair(Repair(layers, 2, 1, 0.1, 0.2))
    text = "\n".join(notes)
    assert "1 layers were solved; the error of their outputs went from 0.5 to 0.1" in text
    assert "left as they are: b: no solution lowers its error" in text
    assert "1 layers have fewer samples than unknowns, a first" in text
    assert "1 of 3 batches were not used" in text
    assert "further from those before the cut than without it" in text
    agreement = describe_repair(Repair(layers[:1], 2, 0, 0.2, 0.1, 0.5, 0.9))
    assert "50% before, 90% after" in agreement[0]
    attentions = [AttentionRepair("p", 0.4, 0.1, 0.01), AttentionRepair("q", reason="a norm lies between")]
    text = "\n".join(describe_repair(Repair([], 2, attentions=attentions)))
    assert "queries and keys of 1 attentions were solved; the error of their logits went from 0.4 to 0.1" in text
    assert "left as they are: queries and keys of q: a norm lies between" in text


@pytest.mark.parametrize("value", [True, "least-squares", "median", 1])
def test_unknown_compensation_is_refused(value: Any) -> None:
    with pytest.raises(compress.RecipeError, match="compensate: expected least_squares, mean or false; got"):
        compress.Recipe.load({"budget": {"macs": 0.5}, "compensate": value})
