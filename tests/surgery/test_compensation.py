"""Compensation adds the mean contribution of dropped inputs to the biases of their readers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compress
from cases import CASES, Net, build, distance, example, groups_of, random_keep, randomise_, run, same_bits
from cases.networks_plain import cbr, head
from compress import Plan
from compress.surgery.compensation import compensate_


def images(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 6, 6, generator=torch.Generator().manual_seed(8)).double()


def compensated(model: nn.Module, keep: dict[str, list[int]], batches: list[Any], x: Tensor) -> tuple[nn.Module, Plan]:
    groups = compress.find_groups(model, x)
    plan = Plan.build(model, groups, keep)
    result = copy.deepcopy(model)
    compensate_(result, groups, plan, batches)
    return plan.apply_(result), plan


def constant_(layer: nn.Module, dropped: list[int]) -> None:
    """Make some output channels of a layer constant."""
    with torch.no_grad():
        layer.weight[dropped] = 0


READERS = {
    "1x1": lambda bias: nn.Conv2d(6, 4, 1, bias=bias),
    "3x3 without padding": lambda bias: nn.Conv2d(6, 4, 3, bias=bias),
    "strided and dilated": lambda bias: nn.Conv2d(6, 4, 2, 2, dilation=2, bias=bias),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("reader", READERS)
def test_constant_channels_can_be_dropped_without_loss(reader: str, bias: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 1), nn.Sigmoid(), READERS[reader](bias))
    model = randomise_(model.double()).eval()
    constant_(model[0], [1, 4])
    x = images()
    small, plan = compensated(model, {"0": [0, 2, 3, 5]}, [x], x)
    assert distance(run(model, x), run(small, x)) < 1e-12
    assert distance(run(model, x), run(plan.apply_(copy.deepcopy(model)), x)) > 1e-3
    assert plan.biases == ({} if bias else {"2": 4})


@pytest.mark.parametrize("bias", [True, False])
def test_constant_features_can_be_dropped_without_loss(bias: bool) -> None:
    parts = [nn.Linear(5, 6), nn.Softplus(), nn.Linear(6, 4, bias=bias), nn.Tanh(), nn.Linear(4, 2)]
    model = randomise_(nn.Sequential(*parts).double()).eval()
    constant_(model[0], [0, 3])
    x = torch.randn(7, 5).double()
    small, _ = compensated(model, {"0": [1, 2, 4, 5]}, [x], x)
    assert distance(run(model, x), run(small, x)) < 1e-12


def test_rows_and_columns_are_cut_together() -> None:
    """A reader whose rows are cut too gets the bias of its kept rows."""
    parts = [nn.Conv2d(3, 6, 1), nn.Sigmoid(), nn.Conv2d(6, 5, 1, bias=False), nn.ReLU(), nn.Conv2d(5, 3, 1)]
    model = randomise_(nn.Sequential(*parts).double()).eval()
    constant_(model[0], [1, 4])
    x = images()
    small, plan = compensated(model, {"0": [0, 2, 3, 5], "2": [0, 3, 4]}, [x], x)
    assert plan.biases == {"2": 3} and small[2].bias.shape == (3,)
    with torch.no_grad():  # the exact network: only the rows that are dropped are silent
        columns = model[4].weight.clone()
        columns[:, [1, 2]] = 0
        mean = model[3](model[2](model[1](model[0](x))))[:, [1, 2]].mean((0, 2, 3))
        shift = model[4].weight[:, [1, 2], 0, 0] @ mean
        expected = F.conv2d(model[3](model[2](model[1](model[0](x)))), columns, model[4].bias + shift)
    assert distance([expected], run(small, x)) < 1e-12


def bn_chain(activation: str, reader: nn.Module) -> nn.Module:
    between: list[nn.Module] = {"none": [], "relu": [nn.ReLU()], "relu6": [nn.ReLU6()]}[activation]
    return randomise_(nn.Sequential(nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6), *between, reader).double()).eval()


@pytest.mark.parametrize("activation", ["none", "relu", "relu6"])
def test_closed_form_behind_a_norm_is_the_integral(activation: str) -> None:
    model = bn_chain(activation, nn.Conv2d(6, 4, 1))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([0.5, -2.0, 3.0, 1.0, -0.1, 4.0]))
        model[1].bias.copy_(torch.tensor([0.0, -1.0, 5.0, 2.0, 0.3, -3.0]))
    x = images()
    small, plan = compensated(model, {"0": [0]}, [], x)
    z = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    density = torch.exp(-z.square() / 2) / (2 * torch.pi) ** 0.5
    values = model[1].bias[:, None] + model[1].weight[:, None] * z
    values = {"none": values, "relu": values.relu(), "relu6": values.clamp(0, 6)}[activation]
    means = torch.trapezoid(values * density, z)
    expected = model[-1].bias + model[-1].weight[:, 1:, 0, 0] @ means[1:]
    assert torch.allclose(small[-1].bias, expected, atol=1e-7)
    assert plan.biases == {}


def assigned(y: Tensor, z: Tensor) -> Tensor:
    y[:] = y + z
    return y


def through_a_view(y: Tensor, z: Tensor) -> Tensor:
    y.view(y.shape).add_(z)
    return y


SUMS = {"out of place": torch.add, "in place": Tensor.add_, "assigned": assigned, "through a view": through_a_view}


@pytest.mark.parametrize("how", SUMS)
def test_closed_form_is_not_used_where_something_is_added(how: str) -> None:
    """Behind a sum the norm's shift is not the mean, however the sum is written."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.last(F.relu(SUMS[how](m.norm(m.conv(x)), m.other(x))))

    parts = {"conv": nn.Conv2d(3, 6, 1), "norm": nn.BatchNorm2d(6), "other": nn.Conv2d(3, 6, 1)}
    model = randomise_(Net(forward, **parts, last=nn.Conv2d(6, 4, 1)).double()).eval()
    groups = compress.find_groups(model, images())
    plan = Plan.build(model, groups, {"conv": [0, 1, 2]})
    assert compensate_(copy.deepcopy(model), groups, plan) == []


@pytest.mark.parametrize("between", [nn.Hardtanh(0, 3), nn.LeakyReLU(), nn.AvgPool2d(2), nn.Dropout(0.5), nn.GELU()])
def test_what_is_between_norm_and_reader_is_respected(between: nn.Module) -> None:
    """On many images measured means agree with closed forms; without a closed form, none is used."""
    parts = [nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6), between, nn.Conv2d(6, 4, 1)]
    model = randomise_(nn.Sequential(*parts).double()).train()
    x = torch.randn(4000, 3, 2, 2, generator=torch.Generator().manual_seed(1)).double()
    with torch.no_grad():  # a linear map of Gaussian noise is Gaussian: running statistics make the norm exact
        model[1].momentum = None
        model[1].reset_running_stats()
        model(x)
    model.eval()
    small, _ = compensated(model, {"0": [0, 1]}, [x], x[:1])
    seen = []
    model[3].register_forward_pre_hook(lambda m, inputs: seen.append(inputs[0].mean((0, 2, 3))))
    run(model, x)
    expected = model[3].bias + model[3].weight[:, 2:, 0, 0] @ seen[0][2:]
    assert torch.allclose(small[3].bias, expected, atol=0.05)


def test_means_are_measured_over_all_batches() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 1), nn.Sigmoid(), nn.Conv2d(6, 4, 3, bias=False))
    model = randomise_(model.double()).eval()
    batches = [images(2), images(5) * 3]
    small, _ = compensated(model, {"0": [0, 1, 2]}, batches, images())
    with torch.no_grad():
        mean = torch.cat([model[1](model[0](b)) for b in batches]).mean((0, 2, 3))
    expected = model[2].weight[:, 3:].sum((2, 3)) @ mean[3:]
    assert torch.allclose(small[2].bias, expected, atol=1e-12)


def test_flattened_channels_are_measured_pixel_by_pixel() -> None:
    case = CASES["flatten_before_a_linear_layer"]
    model, x = build(case), example(case)
    small, _ = compensated(model, {"0.0": [0, 2], "3": list(range(7))}, [x], x)
    with torch.no_grad():
        mean = model[2](model[1](model[0](x))).mean(0)
    dropped = [4 * c + p for c in (1, 3, 4, 5) for p in range(4)]
    expected = model[3].bias + model[3].weight[:, dropped] @ mean[dropped]
    assert torch.allclose(small[3].bias, expected, atol=1e-12)


def test_compensation_brings_the_cut_network_nearer_to_the_dense_one() -> None:
    case = CASES["chain"]
    x = example(case, batch=16)
    better = 0
    for seed in range(6):
        model = build(case, seed)
        keep = {n: k.tolist() for n, k in random_keep(groups_of(case.name), 0.6, seed).items()}
        small, plan = compensated(model, keep, [x], x)
        plain = plan.apply_(copy.deepcopy(model))
        dense, a, b = run(model, x)[0], run(small, x)[0], run(plain, x)[0]
        better += float((a - dense).square().mean()) < float((b - dense).square().mean())
    assert better >= 5


def test_model_runs_as_it_did_while_means_are_measured() -> None:
    model = nn.Sequential(cbr(3, 6), nn.Conv2d(6, 5, 1), nn.Sigmoid(), nn.Conv2d(5, 4, 1)).double().train()
    groups = compress.find_groups(model, images())
    before = copy.deepcopy(model[0].state_dict())
    compensate_(model, groups, Plan.build(model, groups, {"1": [0, 1]}), [images()])
    assert model.training and model[0][1].training
    assert all(torch.equal(before[n], t) for n, t in model[0].state_dict().items())
    assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("name", ["chain", "residual_stream", "depthwise_separable", "convolutions_with_bias"])
def test_created_biases_survive_saving(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    recipe = {"budget": {"dims": "60%"}, "target": {"residual": True}, "compensate": "mean"}
    saved = compress.prune(build(case), recipe, example_inputs=example(case))
    x = example(case)
    plain = compress.prune(build(case), recipe | {"compensate": False}, example_inputs=x)
    assert distance(run(saved.model, x), run(plain.model, x)) > 1e-4
    saved.save(tmp_path / "out")
    loaded = compress.load(build(case, seed=5), tmp_path / "out")
    assert same_bits(run(loaded, x), run(saved.model, x))
    assert bool(saved.plan.biases) == (name not in ("convolutions_with_bias",))


def test_compensated_plan_composes_with_a_second_cut() -> None:
    case = CASES["chain"]
    recipe = {"budget": {"dims": "70%"}, "compensate": "mean"}
    model, x = build(case), example(case)
    once = compress.prune(model, recipe, example_inputs=x)
    twice = compress.prune(once.model, recipe, example_inputs=x)
    direct = once.plan.then(twice.plan).apply_(copy.deepcopy(model))
    assert {n: t.shape for n, t in direct.state_dict().items()} == {
        n: t.shape for n, t in twice.model.state_dict().items()
    }
    direct.load_state_dict(twice.model.state_dict())
    assert same_bits(run(direct, x), run(twice.model, x))


def test_report_says_that_means_were_folded() -> None:
    model = nn.Sequential(cbr(3, 6), cbr(6, 5), head(5)).eval()
    recipe = {"budget": {"macs": "50%"}, "compensate": "mean"}
    done = compress.prune(model, recipe, example_inputs=torch.randn(1, 3, 8, 8))
    assert any("means of dropped dimensions" in note for note in done.report.notes)
    assert done.report.pruned.params == sum(p.numel() for p in done.model.parameters())
