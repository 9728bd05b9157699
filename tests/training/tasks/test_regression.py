"""Regression: losses in closed form, metrics against scikit-learn, and shapes that would broadcast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sklearn.metrics import mean_absolute_error, r2_score
from torch import Tensor, nn

import compress
from compress import BatchError, Regression
from compress.data import AccumulatedBatch
from compress.training import GradientComputer
from compress.training.tasks.regression import predictions


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (0.25 + 9 + 0) / 3),
        ({"loss": "l1"}, (0.5 + 3 + 0) / 3),
        ({"loss": "huber"}, (0.125 + (3 - 0.5) + 0) / 3),
        ({"loss": "huber", "delta": 2.0}, (0.125 + 2 * (3 - 1) + 0) / 3),
    ],
)
def test_losses_to_targets_and_to_the_teacher_are_their_closed_forms(settings: Any, expected: float) -> None:
    task = Regression(**settings)
    outputs, target = torch.tensor([[0.5], [-3.0], [2.0]]), torch.tensor([0.0, 0.0, 2.0])
    assert float(task.loss(outputs, (outputs, target))) == pytest.approx(expected)
    assert float(task.distil(outputs, target[:, None], 4.0)) == pytest.approx(expected)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (3, 4, 5)])
def test_metrics_are_those_of_scikit_learn(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)

    class Shift(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 0.3 * x.sin()

    data = [(100 + torch.randn(count, *shape, dtype=torch.float64),) * 2 for count in (4, 7)]
    found = Regression(None, data).evaluate(Shift(), data)
    y, f = (
        torch.cat([(value.movedim(1, -1) if value.ndim > 1 else value[:, None]).flatten(0, -2) for value in values])
        for values in ([y for _, y in data], [Shift()(x) for x, _ in data])
    )
    assert found["r2"] == pytest.approx(r2_score(y.numpy(), f.numpy()), rel=1e-6)
    assert found["mae"] == pytest.approx(mean_absolute_error(y.numpy(), f.numpy()), rel=1e-9)
    assert found["loss"] == pytest.approx(float((y - f).square().mean()), rel=1e-9)
    assert next(iter(found)) == "r2", "the first metric decides"


def test_r2_of_constant_targets_is_that_of_scikit_learn() -> None:
    x = torch.full((5, 1), 0.1, dtype=torch.float64)
    for model in (nn.Identity(), nn.Linear(1, 1).double()):
        expected = r2_score(x.numpy(), model(x).detach().numpy())
        assert Regression().evaluate(model, [(x, x)])["r2"] == expected
    with pytest.raises(BatchError, match="val: expected at least one batch with targets"):
        Regression().evaluate(nn.Identity(), [])


def test_parts_with_different_numbers_of_targets_have_the_gradient_of_the_whole() -> None:
    """The parts are images of different sizes; the oracle is the mean over all numbers."""
    task, layer = Regression(), nn.Conv2d(1, 1, 1).double()
    parts = [(torch.randn(2, 1, n, n).double(), torch.randn(2, 1, n, n).double()) for n in (3, 7)]
    weights = list(layer.parameters())
    errors = torch.cat([(layer(x) - y).flatten() for x, y in parts])
    counts = {"task": task.count_targets}
    found = GradientComputer().gradients(
        lambda part: {"task": task.loss(layer(part[0]), part)}, AccumulatedBatch(parts), weights, counts=counts
    )
    for ours, exact in zip(found.gradients, torch.autograd.grad(errors.square().mean(), weights), strict=True):
        assert torch.allclose(ours, exact, rtol=1e-12)


def test_targets_without_the_last_dimension_do_not_broadcast() -> None:
    outputs, target = torch.arange(4.0)[:, None], torch.arange(4.0)
    assert float(Regression().loss(outputs, (outputs, target))) == 0
    for wrong in (torch.zeros(4, 2), torch.zeros(4, 1, 3)):
        with pytest.raises(BatchError, match=r"expected the shape of the model's output, \[4, 1\]; got"):
            Regression().loss(outputs, (outputs, wrong))


def test_predictions_are_found_and_in_single_precision() -> None:
    values = torch.randn(3, 1)

    class Output:
        pass

    output = Output()
    output.logits = values  # type: ignore[attr-defined]
    for form in (values, {"logits": values}, output, (values, None)):
        assert torch.equal(predictions(form), values)
    assert predictions(values.bfloat16()).dtype == torch.float32
    with pytest.raises(BatchError, match="expected a tensor of predictions, got a dict of 'depth'"):
        predictions({"depth": values})


def test_mistakes_are_named() -> None:
    for settings in ({"loss": "rmse"}, {"delta": 0.0}):
        with pytest.raises(ValueError, match="expected loss='mse' or 'l1' or 'huber' and delta above 0"):
            Regression(**settings)  # type: ignore[arg-type]
    with pytest.raises(BatchError, match="expected batches; got single samples"):
        Regression().split((torch.zeros(3), 0.5))
    with pytest.raises(BatchError, match="there must be a target for each sample"):
        Regression().split((torch.zeros(3, 2), torch.zeros(2)))
    with pytest.raises(ValueError, match="expected outputs of the same shape"):
        Regression().distil(torch.zeros(3, 2), torch.zeros(3, 1), 4.0)


def test_regression_is_pruned_with_the_teacher_and_reports_r2(tmp_path: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 6)
    y = x[:, 0] * x[:, 1] + x[:, 2]
    model = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1))
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(150):
        optimizer.zero_grad()
        (model(x)[:, 0] - y).square().mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    data = list(zip(x.split(64), y.split(64), strict=True))
    recipe = {"budget": "50%", "search": {"method": "netslim", "epochs": "10 steps"}, "timing": {"repeats": 3}}
    recipe |= {"finetune": {"epochs": "60 steps", "optimizer": "adam", "lr": 3e-3}}
    pruned = compress.prune(model, recipe, task=Regression(data, data), test=data[:1], quiet=True)
    assert pruned.report.pruned.metrics["r2"] > 0.8
    assert pruned.report.pruned.test.keys() == {"r2", "mae", "loss"}
    assert any("distil" in entry for entry in pruned.report.history), "the dense network teaches by default"
    pruned.save(tmp_path)
    layers = [nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1)]
    assert torch.equal(compress.load(nn.Sequential(*layers), tmp_path)(x), pruned.model(x))


def test_outputs_of_a_regression_have_no_best_class_to_agree_on() -> None:
    torch.manual_seed(0)
    data = [(torch.randn(8, 4), torch.randn(8, 2))]
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    recipe = {"budget": "50%", "search": {"method": "taylor", "epochs": "1 step"}, "timing": {"repeats": 3}}
    assert not compress.prune(model, recipe, task=Regression(data), quiet=True).report.pruned.metrics
