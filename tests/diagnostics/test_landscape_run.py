"""Landscapes against closed forms: a quadratic, linear cells, and the compact network as the masked dense one."""

from __future__ import annotations

import copy
import itertools
import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import compress
from cases import CASES, Net, build, example, random_keep
from cases.families import BOTH, family, random_part
from compress.cli.quickstart import Network
from compress.diagnostics import unfinished_values
from compress.diagnostics.directions import draw_direction
from compress.errors import BatchError, Diverged, NotReady, PlanError
from helpers.digits import loaders
from helpers.regression import RegressionTask
from helpers.snapshots import same_snapshot, snapshot


class MeanOutput(RegressionTask):
    """The loss is the mean of the outputs."""

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return outputs.mean()


class SquaredOutputs(RegressionTask):
    """The loss is half of the squared length of a sample's outputs."""

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return outputs.flatten(1).square().sum(1).mean() / 2


def samples(x: Tensor) -> list[tuple[Tensor]]:
    return [(row[None],) for row in x]


def digits(count: int) -> list[Any]:
    """The first batches of 16 digits."""
    return list(itertools.islice(loaders(batch=16)[0], count))


def around(model: nn.Module, data: Any, **settings: Any) -> compress.Landscape:
    settings = {"resolution": 5, "variance_resolution": 3, "batches": 100, "quiet": True, **settings}
    return compress.landscape(model, data, **settings)


def test_a_quadratic_is_its_closed_form() -> None:
    """With f_i(w) = ||w - x_i||^2 / 2: the gradient's variance is that of x, and s is a quadratic in (a, b).

    Its second derivatives are ||d1||^2 = ||d2||^2 = ||w||^2, whatever the directions are.
    """
    torch.manual_seed(0)
    layer = nn.Linear(3, 4, bias=False).double()
    model = Net(lambda m, x: m.layer.weight.flatten() - x, layer=layer)
    x = torch.randn(6, 12).double()
    found = around(model, samples(x), task=SquaredOutputs(), span=2.0)
    weight = layer.weight.detach().flatten()
    assert found.loss[2, 2] == pytest.approx(float((weight - x).square().sum(1).mean() / 2), rel=1e-12)
    a, b = np.meshgrid(found.axis, found.axis, indexing="ij")
    terms = np.stack([np.ones_like(a), a, b, a * a, a * b, b * b]).reshape(6, -1).T
    fit, residual, *_ = np.linalg.lstsq(terms, found.loss.ravel(), rcond=None)
    assert float(residual.sum()) < 1e-20
    length = float(weight.square().sum())
    assert [2 * fit[3], 2 * fit[5]] == pytest.approx([length, length], rel=1e-10)
    assert found.curvature(found.surfaces[0]) == pytest.approx(length, rel=1e-10)
    variance = float((x - x.mean(0)).square().sum() / 5)
    assert found.variance is not None and found.variance.ravel().tolist() == pytest.approx([variance] * 9, rel=1e-10)


LENGTHS = (1.5, 0.7, 2.0)  # largest singular values of the weights W_i of a cell
DEVIATIONS = (0.5, 1.0, 2.0)  # of the gradients that its nodes get
WIDTH = 4


def linear_cell(is_deep: bool, moving: int | None = None) -> nn.Module:
    """A linear cell: nodes y_i = W_i x side by side, or y_i = W_i .. W_1 x one behind the other.

    Args:
        moving: the only weight; the others are constants. Default: all are weights.
    """
    random = torch.Generator().manual_seed(0)
    orthogonal = [torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=random).double())[0] for _ in LENGTHS]

    def run(m: Any, x: Tensor) -> Tensor:
        y, nodes = x[:, :WIDTH], []
        for i in range(len(LENGTHS)):
            node = (y if is_deep else x[:, :WIDTH]) @ m.get_submodule(f"w{i}").weight.T
            nodes.append(node)
            y = node
        return m.objective(torch.stack(nodes, 1), x[:, WIDTH:])

    layers = {f"w{i}": nn.Linear(WIDTH, WIDTH, bias=False).double() for i in range(len(LENGTHS))}
    for layer, q, length in zip(layers.values(), orthogonal, LENGTHS, strict=True):
        layer.weight = nn.Parameter(length * q)
    model = Net(run, **layers)
    for i in range(len(LENGTHS)):
        if moving is not None and i != moving:
            constant = layers[f"w{i}"].weight.detach()
            del layers[f"w{i}"].weight
            layers[f"w{i}"].register_buffer("weight", constant)
    return model


def test_gradient_variance_of_linear_cells_is_that_of_theorem_4_3() -> None:
    """Shu et al. 4.3: with a linear objective and independent gradients c_k of the nodes, the terms of their bound

    (sigma_k / lambda_i prod_{j <= k} lambda_j)^2, k >= i, add up to the variance itself, for orthogonal W_i / lambda_i.
    """
    x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(1)).double()
    signs = list(itertools.product((-1.0, 1.0), repeat=len(LENGTHS)))  # all of them: nothing is correlated
    data = samples(torch.stack([torch.cat([x, torch.tensor(row).double()]) for row in signs]))
    units = torch.nn.functional.normalize(torch.randn(len(LENGTHS), WIDTH).double(), dim=1)
    gradients = units * torch.tensor(DEVIATIONS).double()[:, None]
    found = {}
    for is_deep in (False, True):
        model = linear_cell(is_deep)
        model.objective = lambda nodes, row: (nodes * gradients * row[:, :, None]).sum((1, 2))
        landscape = around(model, data, task=MeanOutput())
        assert landscape.variance is not None
        found[is_deep] = float(landscape.variance[1, 1]) * (len(signs) - 1) / len(signs) / float(x @ x)
    n = range(len(LENGTHS))
    terms = [[(DEVIATIONS[k] / LENGTHS[i] * math.prod(LENGTHS[: k + 1])) ** 2 if k >= i else 0.0 for k in n] for i in n]
    assert found[False] == pytest.approx(sum(sigma**2 for sigma in DEVIATIONS), rel=1e-10)
    assert found[True] == pytest.approx(sum(map(sum, terms)), rel=1e-10)
    assert found[True] <= len(LENGTHS) * sum(map(sum, terms))  # the bound


@pytest.mark.parametrize("moving", range(len(LENGTHS)))
def test_curvature_of_a_deep_cell_is_scaled_by_the_weights_before(moving: int) -> None:
    """Theorem 4.2 in the blocks W_i: with f = |y_i|^2 / 2, the factor is prod_{j < i} lambda_j, squared.

    Once because the gradient passes through the weights before, as printed, and once because y_i moves by as much.
    """
    data = [(torch.eye(WIDTH).double(),)]  # all axes, so that it does not matter how the weights before turn them
    curvatures = []
    for is_deep in (False, True):
        model = linear_cell(is_deep, moving)
        model.objective = lambda nodes, row: nodes[:, moving]
        found = around(model, data, task=SquaredOutputs(), variance_resolution=None)
        curvatures.append(found.curvature(found.surfaces[0]))
    assert curvatures[1] / curvatures[0] == pytest.approx(math.prod(LENGTHS[:moving]) ** 2, rel=1e-9)


def masked(model: nn.Module, plan: compress.Plan, coordinates: tuple[float, float]) -> nn.Module:
    """The dense network at a point of its plane, with zeros where the plan cuts."""
    generator = torch.Generator().manual_seed(0)
    directions = [draw_direction(model, generator) for _ in coordinates]
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in moved.named_parameters():
            for coordinate, direction in zip(coordinates, directions, strict=True):
                parameter += coordinate * direction[name]
    return plan.zero_(moved)


NETWORKS = [
    *("chain", "residual_stream_with_projection", "squeeze_and_excite", "tied_weights", "layer_scale"),
    *("transposed_convolution_in_few_large_groups", "weights_with_a_parametrization_of_their_own"),
    *("timm vit", "torchvision swin", "own"),
]


def cut_network(name: str) -> tuple[nn.Module, compress.Plan, Tensor]:
    if name in CASES:
        model, x = build(CASES[name]), example(CASES[name])
        groups = compress.find_groups(model, x)
        return model, compress.Plan.build(model, groups, random_keep(groups, 0.5)), x
    model, x = family(name)
    groups = compress.find_groups(model, x, BOTH)
    return model, compress.Plan.build(model, groups, random_part(groups)), x


@pytest.mark.parametrize("name", NETWORKS)
def test_the_compact_network_is_the_masked_dense_one_at_every_point_of_the_plane(name: str) -> None:
    model, plan, x = cut_network(name)
    compact = plan.apply_(copy.deepcopy(model))
    task = SquaredOutputs()
    found = around(model, [(x,)], other=(compact, plan), task=task, resolution=3, variance_resolution=None, span=0.4)
    assert found.other is not None
    for i, j in itertools.product(range(3), repeat=2):
        point = (float(found.axis[i]), float(found.axis[j]))
        with torch.no_grad():
            expected = float(task.loss(masked(model, plan, point)(x), None))
        assert found.other.loss[i, j] == pytest.approx(expected, rel=1e-8)
    assert not np.allclose(found.loss, found.other.loss, rtol=1e-3)


@pytest.fixture(scope="module")
def pruned() -> tuple[nn.Module, compress.Pruned]:
    torch.manual_seed(0)
    model = Network(4).eval()
    train, val = loaders(count=256)
    recipe: dict[str, Any] = {"budget": {"macs": "50%"}, "search": "magnitude", "timing": {"repeats": 3}}
    recipe["finetune"] = {"epochs": "4 steps"}
    return model, compress.prune(model, recipe, train=train, val=val, quiet=True)


def test_at_the_weights_both_losses_are_those_of_the_report(pruned: Any) -> None:
    model, result = pruned
    found = around(model, loaders()[1], other=result, resolution=3, variance_resolution=3)
    assert found.loss[1, 1] == pytest.approx(result.report.dense.metrics["loss"], rel=1e-5)
    assert found.other is not None and found.other.variance is not None
    assert found.other.loss[1, 1] == pytest.approx(result.report.pruned.metrics["loss"], rel=1e-5)
    assert (found.batches, found.samples) == (2, 360)


def test_the_seed_decides(pruned: Any) -> None:
    model, result = pruned
    data = loaders(count=256)[0]  # shuffles
    random = torch.get_rng_state()
    one, two, three = (
        around(model, data, other=result, resolution=3, variance_resolution=None, batches=2, seed=seed)
        for seed in (0, 0, 1)
    )
    assert one.to_json() == two.to_json() != three.to_json()
    assert torch.equal(random, torch.get_rng_state())


class Failing(compress.Classification):
    """Raises an exception in a later call."""

    def __init__(self, error: BaseException, at: int) -> None:
        super().__init__()
        self.error, self.left = error, at

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return super().loss(outputs, batch)


@pytest.mark.parametrize("error", [None, RuntimeError("lost"), KeyboardInterrupt()])
def test_networks_are_not_changed_also_after_an_error(error: BaseException | None, pruned: Any) -> None:
    model, result = copy.deepcopy(pruned[0]).train(), pruned[1]
    model.head[2].weight.grad = torch.ones_like(model.head[2].weight)
    before = snapshot(model), snapshot(result.model)
    task = compress.Classification() if error is None else Failing(error, 9)
    with nullcontext() if error is None else pytest.raises(type(error)):
        around(model, digits(2), other=result, resolution=3, task=task)
    assert same_snapshot(before, (snapshot(model), snapshot(result.model)))


@pytest.mark.parametrize("at", [30, 120])  # in the loss, and in the gradient variance
def test_an_interrupted_call_continues_where_it_was(at: int, pruned: Any, tmp_path: Path) -> None:
    model, result = pruned
    file, data = tmp_path / "landscape.json", digits(2)
    settings = {"other": result, "file": file, "batches": 2}
    complete = around(model, data, **{**settings, "file": None})
    with pytest.raises(KeyboardInterrupt):
        around(model, data, **settings, task=Failing(KeyboardInterrupt(), at))
    assert [path.name for path in tmp_path.iterdir()] == ["landscape.part.json"]
    calls = Failing(RuntimeError(), 0)
    again = around(model, data, **settings, task=calls)
    assert again.to_json() == complete.to_json() == file.read_text()
    assert -calls.left == 2 * (2 * 25 + 2 * 9) - (at - 1) // 2 * 2
    assert [path.name for path in tmp_path.iterdir()] == ["landscape.json"]
    assert compress.Landscape.load(file).to_json() == complete.to_json()


def test_values_of_other_weights_settings_or_damaged_ones_are_not_taken(pruned: Any, tmp_path: Path) -> None:
    model, data = pruned[0], digits(2)
    file = tmp_path / "landscape.json"
    with pytest.raises(KeyboardInterrupt):
        around(model, data, file=file, task=Failing(KeyboardInterrupt(), 20))
    partial = (tmp_path / "landscape.part.json").read_text()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.head[2].weight[0, 0] += 1
    damaged = partial[:-5]
    for text, network, seed in ((partial, other, 0), (partial, model, 1), (damaged, model, 0), ("[1]", model, 0)):
        (tmp_path / "landscape.part.json").write_text(text)
        calls = Failing(RuntimeError(), 0)
        around(network, data, file=file, seed=seed, task=calls, variance_resolution=None)
        assert -calls.left == 2 * 25


def test_a_file_that_cannot_be_written_is_found_before_the_first_value(pruned: Any, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").touch()
    for path, reason in (("taken", "Is a directory"), ("file/landscape.json", "file is a file")):
        calls = Failing(RuntimeError(), 0)
        with pytest.raises(OSError, match=f"{path}: cannot be written: .*{reason}. Choose a directory"):
            around(pruned[0], digits(2), file=tmp_path / path, task=calls)
        assert calls.left == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "taken"]


def test_values_are_written_now_and_then(pruned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unfinished_values, "SAVE_INTERVAL", -1.0)
    seen = []

    class Looking(compress.Classification):
        def loss(self, outputs: Any, batch: Any) -> Tensor:
            path = tmp_path / "landscape.part.json"
            seen.append(len(json.loads(path.read_text())["values"]) if path.exists() else 0)
            return super().loss(outputs, batch)

    data = digits(1)
    around(pruned[0], data, file=tmp_path / "landscape.json", task=Looking(), resolution=3, variance_resolution=None)
    assert seen == list(range(9))


def overflowing() -> nn.Module:
    """A network whose loss is finite at its weights, and not where they are larger."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, 80.0)
    return Net(lambda m, x: torch.exp(m.layer(x)), layer=layer)


def test_losses_that_are_not_finite_are_gaps(tmp_path: Path) -> None:
    """The one filter has one weight of 80: the directions are +80 and -80, and exp overflows above 88."""
    data = [(torch.ones(2, 1),), (torch.ones(2, 1),)]
    file = tmp_path / "landscape.json"
    found = around(overflowing(), data, task=MeanOutput(), file=file)
    generator = torch.Generator().manual_seed(0)
    signs = [float(draw_direction(overflowing(), generator)["layer.weight"].sign()) for _ in range(2)]
    exponent = 80 * (1 + np.add.outer(signs[0] * found.axis, signs[1] * found.axis))
    assert np.array_equal(np.isnan(found.loss), exponent > 88.8)
    assert np.isnan(found.loss).any() and found.variance is not None and np.isnan(found.variance).any()
    assert np.array_equal(compress.Landscape.load(file).loss, found.loss, equal_nan=True)


def test_a_loss_that_is_not_finite_at_the_weights_is_an_error() -> None:
    model = overflowing()
    nn.init.constant_(model.layer.weight, 100.0)
    with pytest.raises(Diverged, match="loss of the model network is inf at its own weights"):
        around(model, [(torch.ones(2, 1),)] * 2, task=MeanOutput())


def test_wrong_arguments_are_listed_together() -> None:
    with pytest.raises(NotReady) as caught:
        around(nn.Linear(3, 2), 7, resolution=10, variance_resolution=1, span=0, batches=1, other=nn.Linear(3, 2))
    message = str(caught.value)
    for part in (
        "resolution: expected an odd number from 3, so that the weights are in the middle; got 10",
        "variance_resolution: expected an odd number from 3, so that the weights are in the middle; got 1",
        "span: expected a number above 0, such as 1.0; got 0",
        "batches: expected at least 2, which the gradient variance needs; got 1",
        "data: expected a loader that gives batches; got int",
        "other: expected a Pruned, or (compact model, plan); got Linear",
    ):
        assert part in message


X = torch.randn(4, 3)
DATA = [(X, torch.tensor([0, 1, 0, 1]))] * 2


@pytest.mark.parametrize(
    ("model", "data", "settings", "error", "message"),
    [
        (nn.BatchNorm1d(3), DATA, {}, NotReady, "expected weights of linear layers or convolutions"),
        (nn.Linear(3, 2), DATA[:1], {}, BatchError, "needs at least two batches with targets; the loader gave 1"),
        (nn.Linear(3, 2), [], {}, BatchError, "the loader gave none"),
        (nn.Linear(3, 2), [X, X], {}, BatchError, "expected batches of"),
        (nn.Linear(3, 2), [(X, torch.full((4,), 9))] * 2, {}, BatchError, "expected classes 0 to 1"),
        (nn.Linear(3, 2), DATA, {"device": "nowhere"}, ValueError, "device nowhere: not available"),
        (nn.Linear(3, 2), DATA, {"task": 3}, TypeError, "expected a compress.Task"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    model: nn.Module, data: Any, settings: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        around(model, data, **settings)


def test_another_network_that_the_plan_does_not_leave_is_refused(pruned: Any) -> None:
    model, result = pruned
    with pytest.raises(NotReady, match=r"its model is not what its plan leaves:\n  stage1\.0\.conv1\.weight is"):
        around(model, DATA, other=(model, result.plan))
    with pytest.raises(PlanError, match="made for another model"):
        around(nn.Linear(3, 2), DATA, other=result)
    with pytest.raises(NotReady, match="built anew from a genotype"):
        around(model, DATA, other=(model, compress.Plan({}, {}, network={"cells": 3})))


def test_gradient_variance_can_be_left_out() -> None:
    found = around(nn.Linear(3, 2), DATA[:1], variance_resolution=None, batches=1)
    assert found.variance is None and found.variance_axis is None and found.other is None
