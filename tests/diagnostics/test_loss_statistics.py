"""Mean loss and gradient variance against the gradients of single samples, computed one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contracts.test_meta_device import Network, meta_batch
from torch import Tensor, nn

from compress.diagnostics.loss_statistics import LossStatistics
from compress.diagnostics.perturbed_network import PerturbedNetwork
from compress.errors import BatchError
from compress.progress import ProgressDisplay
from compress.training import Classification, Engine
from helpers.regression import RegressionTask

SIZES = (4, 1, 3, 7, 1)


def engine(device: str = "cpu") -> Engine:
    return Engine(torch.device(device), 0, ProgressDisplay(quiet=True))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batches(sizes: tuple[int, ...] = SIZES) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(n, k, generator=random).double() for k in (3, 2)) for n in sizes]  # type: ignore[misc]


def gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = (model(x) - y).square().mean()
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*model.parameters()])])


def test_loss_is_the_mean_over_all_samples_of_batches_of_any_sizes() -> None:
    model, data = network(), batches()
    x, y = (torch.cat([batch[i] for batch in data]) for i in range(2))
    found = LossStatistics(RegressionTask(), engine(), data).mean_loss(model)
    assert float(found) == pytest.approx((model(x) - y).square().mean().item(), rel=1e-12)


def test_variance_of_single_samples_is_their_mean_squared_distance() -> None:
    model, data = network(), batches((1,) * 9)
    gradients = torch.stack([gradient(model, *batch) for batch in data])
    expected = (gradients - gradients.mean(0)).square().sum() / (len(data) - 1)
    found = LossStatistics(RegressionTask(), engine(), data).gradient_variance(model, [*model.parameters()])
    assert float(found) == pytest.approx(expected.item(), rel=1e-12)


def test_variance_from_batches_weighs_them_by_their_sizes() -> None:
    model, data = network(), batches()
    means = [gradient(model, *batch) for batch in data]
    overall = sum(n * g for n, g in zip(SIZES, means, strict=True)) / sum(SIZES)
    expected = sum(n * (g - overall).square().sum() for n, g in zip(SIZES, means, strict=True)) / (len(SIZES) - 1)
    found = LossStatistics(RegressionTask(), engine(), data).gradient_variance(model, [*model.parameters()])
    assert float(found) == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("size", [1, 4, 16])
def test_batches_of_any_size_estimate_the_variance_of_single_samples(size: int) -> None:
    """The noise of gradients is known here: y is noise of variance 1 on an output that does not depend on x."""
    count = 2048
    x = torch.ones(count, 1).double()
    y = torch.randn(count, 1, generator=torch.Generator().manual_seed(0)).double()
    model = nn.Linear(1, 1, bias=False).double()
    statistics = LossStatistics(RegressionTask(), engine(), [*zip(x.split(size), y.split(size), strict=True)])
    found = float(statistics.gradient_variance(model, [model.weight]))
    assert found == pytest.approx(4.0, rel=4 * (2 * size / count) ** 0.5)  # of 2 (w - y); four standard deviations


def test_memory_that_does_not_suffice_halves_the_passes_and_changes_nothing() -> None:
    class Small(RegressionTask):
        most = 100

        def forward(self, model: nn.Module, batch: Any) -> Any:
            if len(batch[0]) > self.most:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return model(batch[0])

    model, data = network(), batches((6, 5, 7))
    found = []
    for Small.most in (100, 2):
        statistics = LossStatistics(Small(), engine(), data)
        found.append(
            (float(statistics.mean_loss(model)), float(statistics.gradient_variance(model, [*model.parameters()])))
        )
    assert found[0] == pytest.approx(found[1], rel=1e-12)


def test_ignored_targets_do_not_count() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    x, y = torch.randn(12, 3).double(), torch.randint(0, 4, (12,))
    y[4:8] = y[1] = -100  # a whole batch, and one more
    statistics = LossStatistics(Classification(), engine(), [*zip(x.split(4), y.split(4), strict=True)])
    assert (statistics.samples, len(statistics.batches)) == (7, 2)
    expected = nn.functional.cross_entropy(model(x), y)
    assert float(statistics.mean_loss(model)) == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize(
    ("data", "message"),
    [([], "the loader gave none"), ([(torch.ones(2, 3), torch.full((2,), -100))], "all targets are ignored")],
)
def test_data_without_targets_are_refused(data: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        LossStatistics(Classification(), engine(), data)


def test_statistics_wait_for_no_device() -> None:
    """On the meta device, whatever reads a value back fails."""
    model = Network().eval()
    direction = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    task = Classification()
    task.count_targets = lambda batch: 16  # type: ignore[method-assign, assignment]  # read once, before
    statistics = LossStatistics(task, engine("meta"), [meta_batch(), meta_batch()])
    perturbed = PerturbedNetwork("dense", model, (direction, direction), torch.device("meta"))
    perturbed.move_to_(0.5, -1.0)
    assert statistics.mean_loss(perturbed.model).is_meta
    assert statistics.gradient_variance(perturbed.model, perturbed.parameters).is_meta
