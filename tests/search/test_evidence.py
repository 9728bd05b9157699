"""The evidence of bayesnas: its equations, and which groups feed which."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

import compress
from cases import CASES, build, groups_of
from compress.recipe import Target
from compress.search.base import Job, search_class
from compress.search.bayes import curvature
from compress.search.bayes.evidence import (
    ZERO_ENTROPY_VARIANCE,
    Evidence,
    Predecessors,
    find_predecessors,
    harmonic_sum,
    score_evidence,
    significant_gradient,
)
from helpers.regression import RegressionTask


def grid(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_threshold_is_where_the_entropy_is_zero() -> None:
    assert math.log(2 * math.pi * math.e * ZERO_ENTROPY_VARIANCE) / 2 == pytest.approx(0, abs=1e-12)
    assert round(ZERO_ENTROPY_VARIANCE, 4) == 0.0585


def test_evidence_is_equations_17_to_19() -> None:
    """(17) and (18) as they are printed, and the minimum of A.2.12 by brute force."""
    steps = torch.linspace(-4, 4, 160001, dtype=torch.float64)
    for w in (0.9, -0.4, 1.0):
        for g in (0.0, 0.3, -0.2):
            for h in (0.3, 2.0, 40.0):
                for gamma in (1.0, 0.2):
                    c = 1 / (1 / gamma + h)
                    omega = math.sqrt(gamma - c) / gamma
                    target = w - max(-abs(w), min(abs(w), g / h))  # g is not trusted beyond zero and twice w
                    cost = h / 2 * (steps - target) ** 2 + omega * steps.abs()
                    best = float(steps[cost.argmin()])
                    got_omega, s = score_evidence(grid(w), grid(g), grid(h), grid(gamma))
                    assert float(got_omega) == pytest.approx(omega, rel=1e-12)
                    assert float(s) == pytest.approx(abs(best) / omega, abs=1e-3)


def test_what_the_data_do_not_bend_has_no_variance() -> None:
    omega, s = score_evidence(grid(1, 1), grid(0, 5), grid(0, 0), grid(1, 1))
    assert omega.tolist() == s.tolist() == [0, 0]


def test_iterated_evidence_is_sparse_bayesian_regression() -> None:
    """gamma = w'^2 - 1 / H where w'^2 H > 1, and zero elsewhere (Tipping 2001; Faul and Tipping 2002)."""
    w, h = (m.flatten() for m in torch.meshgrid(grid(0.05, 0.3, 1, 2), grid(0.1, 2, 30, 1e4), indexing="ij"))
    gamma = torch.ones_like(w)
    for _ in range(4000):
        _, gamma = score_evidence(w, torch.zeros_like(w), h, gamma)
    expected = (w.square() - 1 / h).clamp_min(0)
    assert torch.allclose(gamma, expected, atol=2e-4)
    variance = gamma / (1 + gamma * h)  # C of (17)
    mean = torch.where(gamma > 0, w - (h / (1 + gamma * h)).sqrt() / h, 0.0)
    live = expected > 0
    assert torch.allclose(gamma[live], (mean.square() + variance)[live], rtol=1e-3), "the EM fixed point"


def test_rule_of_the_entropy_at_the_fixed_point_is_the_one_in_the_guide() -> None:
    """gamma = w'^2 - 1 / H: a score of 0.242 or less is dropped whatever H, a score of 1 if H <= 1.062."""
    w = torch.linspace(0.05, 1.5, 30, dtype=torch.float64)[:, None].expand(30, 40).clone()
    h = torch.logspace(-1, 4, 40, dtype=torch.float64).expand(30, 40).clone()
    gamma = torch.ones_like(w)
    for _ in range(20000):
        gamma = score_evidence(w, torch.zeros_like(w), h, gamma)[1]
    dropped, expected = gamma <= ZERO_ENTROPY_VARIANCE, w**2 - 1 / h <= ZERO_ENTROPY_VARIANCE
    clear = (w**2 - 1 / h - ZERO_ENTROPY_VARIANCE).abs() > 1e-3
    assert torch.equal(dropped[clear], expected[clear])
    assert dropped[w[:, 0] <= 0.24].all() and not dropped[w[:, 0] > 0.25].all(1).any()


def test_slope_counts_as_far_as_it_is_sure() -> None:
    assert torch.allclose(
        significant_gradient(grid(1, -1, 0.1, math.nan), grid(4, 4, 4, 4), 0.01), grid(0.6, -0.6, 0, 0)
    )
    assert torch.equal(significant_gradient(grid(0.1), grid(4), 0.0), grid(0.1))


def test_variances_in_a_row_are_as_good_as_the_worst() -> None:
    assert torch.allclose(harmonic_sum(grid(2), grid(2, 0, math.inf)), grid(1, 0, 2))


def test_dependency_is_a_2_14_with_the_switch_of_8() -> None:
    scores = {name: nn.Parameter(torch.ones(2, dtype=torch.float64)) for name in ("a", "b")}
    known = Evidence(scores, {"a": Predecessors([]), "b": Predecessors(["a"])})
    w = {name: grid(1, 1) for name in scores}
    g = {name: grid(0, 0) for name in scores}
    h, switches, units = {"a": grid(50, 2), "b": grid(30, 7)}, grid(90, 60), {"a": grid(1)[0], "b": grid(2)[0]}
    known.update_saliency_(w, g, h, 0.0)
    known.update_(w, g, switches, units, 0.0)
    one = grid(1, 1)
    s = {n: score_evidence(one, 0 * one, h[n] / units[n], one)[1] for n in scores}
    branch = {n: score_evidence(one[:1], 0 * one[:1], switches[i] / units[n], one[:1])[1] for i, n in enumerate(scores)}
    s_a = 1 / (1 / s["a"] + 1 / branch["a"])
    assert torch.allclose(known.gamma["a"], s_a)
    assert torch.allclose(known.gamma["b"], 1 / (1 / s_a.sum() + 1 / s["b"] + 1 / branch["b"]))
    known.update_saliency_(w, g, {"a": grid(0, 0), "b": h["b"]}, 0.0)
    known.update_(w, g, switches, units, 0.0)
    assert known.gamma["b"].tolist() == [0, 0], "a layer whose inputs are all off is off"
    known.predecessors = {"a": Predecessors([]), "b": Predecessors(["a"], unscored=True)}
    known.update_saliency_(w, g, h, 0.0)
    known.update_(w, g, switches, units, 0.0)
    own = score_evidence(one, 0 * one, h["b"] / units["b"], known.gamma["b"])[1]
    known.update_saliency_(w, g, {"a": grid(0, 0), "b": h["b"]}, 0.0)
    known.update_(w, g, switches, units, 0.0)
    assert 0 < float(known.gamma["b"].max()) < float(own.max()), "with the stem as its input it is not"


class Regression(RegressionTask):
    """Gaussian noise of a known size; signs are draws of mean 0 and variance 1."""

    sigma = 0.5

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return (outputs - batch[1]).square().mean() / (2 * self.sigma**2)

    def draw(self, outputs: Any, batch: Any, temperature: float = 1.0) -> Tensor:
        sign = torch.randint_like(outputs, 2) * 2 - 1
        return (outputs * sign).mean() / self.sigma


def test_linear_gaussian_model_comes_to_the_fixed_point_of_the_equations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sparse Bayesian regression on orthogonal inputs: scores are the coefficients, and lambda is 1 / N."""
    monkeypatch.setattr(curvature, "SAMPLES_PER_PASS", 1)  # signs square to one: samples one by one are exact
    true, count = grid(1.0, 0.6, 0.35, 0.05, 0.0, -0.8, 0.02, 0.0), 16
    torch.manual_seed(0)
    columns = torch.cat([torch.ones(count, 1), torch.randn(count, 9)], 1)
    q, _ = torch.linalg.qr(columns.double())  # the first is what the bias fits
    x = q[:, 1:9] * count**0.5
    y = (x @ true + 2 * q[:, 9])[:, None]  # with noise that no input explains
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 1)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(8))
        model[1].weight.fill_(1)
    for layer in model:
        layer.weight.requires_grad_(False)
    cls, steps = search_class("bayesnas"), 150
    settings = {"method": "bayesnas", "epochs": f"{steps} steps", "iterations": steps, "samples": count}
    settings |= {"gamma": 1 / count, "lr": 0.1, "momentum": 0, "schedule": "constant"}
    job = Job(model, compress.find_groups(model, x), Regression(), steps, schedule=lambda *_: {})
    search: Any = cls(cls.Config.model_validate(settings), job)
    for _ in range(steps):
        search.step((x, y))
    w, gamma = search.alpha[0].detach(), search.evidence.gamma["0"]
    branch = search.evidence.switch_variance[0]
    h = count * torch.ones(8).double() / Regression.sigma**2
    omega = (h / (1 + gamma * h)).sqrt()
    live = gamma > ZERO_ENTROPY_VARIANCE
    assert live.tolist() == [True, True, True, False, False, True, False, False]
    assert torch.allclose(search.evidence.omega["0"], omega, rtol=1e-5)
    assert torch.allclose(w[live], (true - omega / h * true.sign())[live], rtol=1e-5), "(16)"
    assert torch.allclose(gamma[live], 1 / (1 / branch + omega / w.abs())[live], rtol=1e-5), "(18), (19), (8)"
    assert not w[~live].any()
    assert not gamma[~live].any()


@pytest.mark.parametrize("name", ["chain", "residual_stream_with_projection", "dense_connections"])
def test_predecessors_feed_all_that_writes_a_group(name: str) -> None:
    """Every column of the layers that write a group reads one of its predecessors."""
    case = CASES[name]
    model, groups = build(case), groups_of(name)
    found = find_predecessors(model, groups)
    assert set(found) == {g.name for g in groups}
    assert any(before.groups for before in found.values())
    weights = dict(model.named_parameters())
    for group, before in found.items():
        reading = {(s.tensor, s.dim): set() for g in groups for s in g.gated_slots}
        for g in groups:
            for s in g.gated_slots:
                reading[s.tensor, s.dim] |= {(g.name, i) for i in s.index.flatten().tolist()}
        for slot in groups[group].output_slots if before.groups and not before.unscored else ():
            weight = weights.get(slot.tensor)
            if weight is not None and weight.ndim > 1 and weight.shape[1] > 1:
                here = reading[slot.tensor, 1 - slot.dim]
                assert {i for n, i in here if n in before.groups} == set(range(weight.shape[1 - slot.dim]))


def test_predecessors_pass_through_depthwise_layers_and_stop_at_what_else_feeds() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 6, 1)
            self.deep, self.c, self.d = nn.Conv2d(6, 6, 3, groups=6), nn.Conv2d(6, 5, 1), nn.Conv2d(8, 2, 1)
            self.e = nn.Conv2d(2, 2, 1)

        def forward(self, x: Tensor) -> Any:
            c = self.c(self.deep(self.b(self.a(x))))
            return self.e(self.d(torch.cat([c, x[..., 1:-1, 1:-1]], 1)))

    model = Net()
    groups = compress.find_groups(model, torch.randn(1, 3, 8, 8))
    assert find_predecessors(model, groups) == {
        "a": Predecessors([], unscored=True),
        "b": Predecessors(["a"]),
        "c": Predecessors(["b"]),
        "d": Predecessors(["c"], unscored=True),
    }


def test_blocks_of_a_plain_resnet_feed_each_other_through_streams_that_are_not_cut() -> None:
    """A block reads the stem and what all earlier blocks of the network wrote to its stream."""
    model = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [2, 2, 1, 1], num_classes=4).eval()
    for target, count in ((Target(), 6), (Target(residual=True), 10)):
        groups = compress.find_groups(model, torch.randn(1, 3, 32, 32), target)
        found = find_predecessors(model, groups)
        assert len(found) == count
        if not target.residual:
            blocks = [f"layer{i}.{j}.conv1" for i, j in ((1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (4, 0))]
            assert all(before.unscored for before in found.values()), "the stem has no score"
            for i, name in enumerate(blocks):
                assert sorted(found[name].groups) == blocks[:i]
        else:
            assert found["layer2.1.conv1"] == Predecessors(["layer2.0.conv2"])
