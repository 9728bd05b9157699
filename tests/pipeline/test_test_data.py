"""Test data: dense and pruned network are measured on them at the end, and they choose nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compress
from helpers.digits import FOUR_STEPS, dense, loaders
from helpers.interruption import Interrupted, InterruptedLoader
from helpers.refusals import refused
from helpers.regression import RegressionTask
from helpers.weights import same_weights

Batches = list[tuple[Tensor, Tensor]]


def split_val() -> tuple[Batches, Batches]:
    """The validation images, one half to choose by, and one to test on."""
    images, labels = (torch.cat(parts) for parts in zip(*loaders()[1], strict=True))
    val, test = ([(images[i::2], labels[i::2])] for i in (0, 1))
    return val, [(x, y) for x, y in zip(test[0][0].split(50), test[0][1].split(50), strict=True)]


@torch.no_grad()
def measured(model: nn.Module, batches: Batches) -> dict[str, float]:
    """Accuracy and loss on all images at once."""
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    logits = copy.deepcopy(model).eval()(images)
    accuracy = (logits.argmax(1) == labels).double().mean()
    return {"accuracy": float(accuracy), "loss": float(nn.functional.cross_entropy(logits, labels))}


def pruned_with(test: Any, **given: Any) -> compress.Pruned:
    val, _ = split_val()
    return compress.prune(dense(), FOUR_STEPS, train=loaders(count=256)[0], val=val, test=test, quiet=True, **given)


def test_test_metrics_are_those_of_the_dense_and_the_returned_network() -> None:
    val, test = split_val()
    pruned = pruned_with(test)
    report = pruned.report
    assert report.dense.test == pytest.approx(measured(dense(), test), rel=1e-5)
    assert report.pruned.test == pytest.approx(measured(pruned.model, test), rel=1e-5)
    assert report.pruned.metrics == pytest.approx(measured(pruned.model, val), rel=1e-5)
    assert report.pruned.test["loss"] != pytest.approx(report.pruned.metrics["loss"], rel=1e-5)


def test_result_does_not_depend_on_test_data() -> None:
    _, test = split_val()
    wrong_labels = [(torch.randn_like(x), 9 - y) for x, y in test]
    results = [pruned_with(data) for data in (None, test, wrong_labels)]
    without, one, other = results
    assert not without.report.pruned.test and not without.report.dense.test
    assert one.report.pruned.test != other.report.pruned.test
    for result in (one, other):
        assert result.plan.keep == without.plan.keep
        assert same_weights(result.model, without.model)
        assert result.report.pruned.metrics == without.report.pruned.metrics
        assert result.report.history == without.report.history


class CountedLoader:
    """A loader that counts how often each of its batches is read."""

    def __init__(self, batches: Batches) -> None:
        self.batches, self.reads = batches, [0] * len(batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for i, batch in enumerate(self.batches):
            self.reads[i] += 1
            yield batch


def test_test_data_are_read_once_for_each_network_and_tried_before() -> None:
    loader = CountedLoader(split_val()[1])
    pruned_with(loader)
    assert loader.reads == [3] + [2] * (len(loader.batches) - 1)


@pytest.mark.usefixtures("checkpoint_at_every_step")
def test_resumed_run_is_tested_and_a_finished_one_keeps_its_figures(tmp_path: Path) -> None:
    val, test = split_val()
    given: dict[str, Any] = {"val": val, "workdir": tmp_path, "quiet": True}
    with pytest.raises(Interrupted):
        loader = InterruptedLoader(loaders(count=256)[0], 6)
        compress.prune(dense(), FOUR_STEPS, train=loader, test=test, **given)
    resumed = compress.prune(dense(), FOUR_STEPS, train=loaders(count=256)[0], test=test, resume=True, **given)
    straight = pruned_with(test)
    assert same_weights(resumed.model, straight.model)
    assert resumed.report.pruned.test == straight.report.pruned.test
    assert resumed.report.dense.test == straight.report.dense.test
    finished = compress.prune(dense(), FOUR_STEPS, train=loaders(count=256)[0], resume=True, **given)
    assert finished.report.pruned.test == straight.report.pruned.test


def test_finished_run_without_test_data_is_not_silently_untested(tmp_path: Path) -> None:
    pruned_with(None, workdir=tmp_path)
    with pytest.raises(FileExistsError, match="the run is finished, and it had no test data; leave test out"):
        pruned_with(split_val()[1], workdir=tmp_path, resume=True)


def test_session_tests_what_it_cuts() -> None:
    val, test = split_val()
    train, _ = loaders(count=256)
    session = compress.search_session(dense(), FOUR_STEPS, train=train, val=val, test=test)
    for batch, _ in zip(train, range(4), strict=False):
        session.step(batch)
    pruned = session.finish()
    assert pruned.report.pruned.test == pytest.approx(measured(pruned.model, test), rel=1e-5)
    assert pruned.report.dense.test == pytest.approx(measured(dense(), test), rel=1e-5)


class MeasuredRegression(RegressionTask):
    """A task whose metric is the negative mean squared error over all batches."""

    def __init__(self) -> None:
        self.train = [(torch.randn(8, 6), torch.randn(8, 3)) for _ in range(2)]
        self.val = [(torch.randn(8, 6), torch.randn(8, 3))]

    def evaluate(self, model: nn.Module, batches: Any) -> dict[str, float]:
        errors = [(model(x) - y).square().mean(1) for x, y in batches]
        return {"score": -float(torch.cat(errors).mean())}


@torch.no_grad()
def test_task_of_your_own_is_tested_by_its_own_metrics() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    test = [(torch.randn(n, 6), torch.randn(n, 3)) for n in (8, 5)]
    recipe = {"budget": {"params": "50%"}, "search": {"method": "magnitude"}, "timing": {"repeats": 3}}
    pruned = compress.prune(model, recipe, task=MeasuredRegression(), test=test, quiet=True)
    x, y = (torch.cat(parts) for parts in zip(*test, strict=True))
    for network, numbers in ((model, pruned.report.dense), (pruned.model, pruned.report.pruned)):
        assert numbers.test == {"score": pytest.approx(-float((network(x) - y).square().mean()))}


def test_unlabelled_training_is_tested_on_labels() -> None:
    _, test = split_val()
    images = torch.cat([x for x, _ in loaders(count=256)[0]])
    recipe = {**FOUR_STEPS, "search": {"method": "magnitude"}}
    pruned = compress.prune(dense(), recipe, train=images, test=test, quiet=True)
    assert pruned.report.pruned.test == pytest.approx(measured(pruned.model, test), rel=1e-5)


@pytest.mark.parametrize(
    ("test", "match"),
    [
        (
            [(torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.long))],
            "test: the first batch cannot be evaluated: Run",
        ),
        ([(torch.zeros(4, 1, 8, 8), torch.full((4,), 10))], "test: the first batch cannot be evaluated: .*10"),
        ([torch.zeros(4, 1, 8, 8)], "test: the first batch cannot be evaluated: .*expected batches of"),
        ([], "test: expected at least one batch; the loader gave none"),
        (iter([]), "test: expected a loader that can be read more than once; got an iterator"),
        (64, "test: expected a loader that gives batches; got int"),
    ],
)
def test_test_data_that_do_not_fit_are_refused_before_the_run(test: Any, match: str, tmp_path: Path) -> None:
    train, val = loaders()
    refused(match, train=train, val=val, test=test, workdir=tmp_path / "out")
    assert not (tmp_path / "out" / "run.json").exists()


def test_data_that_choose_are_no_test_data() -> None:
    train, val = loaders()
    refused("test: expected data that choose nothing; got the loader that is val", train=train, val=val, test=val)
    refused("test: expected data that choose nothing; got the loader that is train", train=train, test=train)


def test_task_that_reads_its_own_data_is_not_tested() -> None:
    class Reading(MeasuredRegression):
        can_test = False

    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    recipe = {"budget": {"params": "50%"}, "search": {"method": "magnitude"}}
    match = "test: Reading evaluates on its own validation data only; leave test out"
    refused(match, recipe, model, task=Reading(), test=MeasuredRegression().val)
