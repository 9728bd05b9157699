"""Network slimming: what is applied to the scores, and to nothing else; and that useless channels come last."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from case import build, example, groups_of
from cases import CASES
from torch import Tensor, nn

import compress
from compress.gates import fold_, scores
from compress.search import Job, importance
from compress.search.magnitude import MagnitudeConfig
from compress.search.netslim import Netslim, NetslimConfig
from compress.search.random import RandomConfig


class Plain:
    """Regression on a fixed target: the smallest task there is."""

    train = val = None

    def inputs(self, batch: Any) -> Any:
        return batch[0]

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return (outputs - batch[1]).square().mean()

    def evaluate(self, model: nn.Module, batches: Any) -> dict[str, float]:
        return {}

    def distil(self, outputs: Any, teacher: Any, temperature: float) -> Tensor:
        return (outputs - teacher).square().mean()


def network(norm: bool) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8) if norm else nn.Identity(), nn.ReLU()]
    layers += [nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6) if norm else nn.Identity(), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(5, 3, 9, 9, generator=generator), torch.randn(5, 4, generator=generator)
    return x.double(), y.double()


def started(norm: bool, steps: int = 10, **settings: Any) -> tuple[nn.Module, Netslim]:
    model = network(norm)
    groups = compress.find_groups(model, batch()[0])
    config = NetslimConfig.model_validate({"epochs": f"{steps} steps", "gamma": 1e-4, **settings})
    search = Netslim(config, Job(model, groups, Plain(), steps))
    return model.train(), search


@pytest.mark.parametrize("norm", [True, False])
def test_score_is_the_norms_scale_where_there_is_one_and_a_gate_elsewhere(norm: bool) -> None:
    model, search = started(norm)
    if norm:
        assert [id(s) for s in search.alpha] == [id(model[1].weight), id(model[4].weight)]
        assert not scores(model)
    else:
        assert set(scores(model)) == {"0", "3"}
    model, search = started(norm, score="gate")
    assert set(scores(model)) == {"0", "3"}


def test_frozen_norm_gets_a_gate() -> None:
    model = network(norm=True)
    model[1].weight.requires_grad_(False)
    search = Netslim(
        NetslimConfig.model_validate({"epochs": "5 steps", "gamma": 1e-4}),
        Job(model, compress.find_groups(model, batch()[0]), Plain(), 5),
    )
    assert set(scores(model)) == {"0"}
    assert [a is model[4].weight for a, _ in search.places["3"]] == [True]


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_subgradient_goes_to_the_scores_and_to_nothing_else(norm: bool, optimizer: str) -> None:
    """One step of plain SGD, against the formula; then the same with and without the penalty."""
    common: dict[str, Any] = {"lr": 0.05, "momentum": 0, "weight_decay": 0.1, "schedule": "constant"}
    model, search = started(norm, gamma=0.3, optimizer=optimizer, **common)
    with torch.no_grad():
        for s in search.alpha:
            s.copy_(torch.randn(s.shape, generator=torch.Generator().manual_seed(2)))
    free = copy.deepcopy(model)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    loss = Plain().loss(Plain().forward(free, batch()), batch())
    gradients = dict(zip(before, torch.autograd.grad(loss, list(free.parameters())), strict=True))
    search.step(batch())
    scored = {id(s) for s in search.alpha}
    for name, p in model.named_parameters():
        penalty = 0.3 * before[name].sign() if id(p) in scored else torch.zeros_like(p)
        assert torch.allclose(p.grad, gradients[name] + penalty, rtol=0, atol=1e-12), name  # type: ignore[arg-type]
        if optimizer == "sgd":
            decay = 0.1 * before[name] if p.ndim > 1 else torch.zeros_like(p)
            expected = before[name] - 0.05 * (gradients[name] + penalty + decay)
            assert torch.allclose(p, expected, rtol=0, atol=1e-12), name


@pytest.mark.parametrize("norm", [True, False])
def test_proximal_step_is_soft_thresholding_after_the_gradient_step(norm: bool) -> None:
    common: dict[str, Any] = {
        "lr": 0.05,
        "momentum": 0,
        "weight_decay": 0,
        "schedule": "constant",
        "proximal": True,
    }
    model, search = started(norm, gamma=2.0, **common)
    with torch.no_grad():
        for s in search.alpha:
            s.copy_(0.2 * torch.randn(s.shape, generator=torch.Generator().manual_seed(2)))
    free = copy.deepcopy(model)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    loss = Plain().loss(Plain().forward(free, batch()), batch())
    gradients = dict(zip(before, torch.autograd.grad(loss, list(free.parameters())), strict=True))
    search.step(batch())
    scored, zeros = {id(s) for s in search.alpha}, 0
    for name, p in model.named_parameters():
        moved = before[name] - 0.05 * gradients[name]
        if id(p) in scored:
            moved = F.softshrink(moved, 0.05 * 2.0)
            zeros += int((p == 0).sum())
        assert torch.allclose(p, moved, rtol=0, atol=1e-12), name
    assert zeros > 0


def test_penalty_reported_is_gamma_times_l1() -> None:
    _, search = started(norm=True, gamma=0.25, lr=1e-9)
    terms = search.step(batch())
    total = sum(float(s.detach().abs().sum()) for s in search.alpha)
    assert float(terms["penalty"]) == pytest.approx(0.25 * total)
    assert float(terms["loss"]) == pytest.approx(float(terms["task"]) + float(terms["penalty"]))


def test_norm_is_scored_only_where_a_group_lies() -> None:
    """A norm over a concatenation whose one part may not be cut: l1 leaves that part alone."""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 5, 1)
            self.norm, self.read = nn.BatchNorm2d(9), nn.Conv2d(9, 2, 1)

        def forward(self, x: Tensor) -> Any:
            b = self.b(x)
            return self.read(self.norm(torch.cat([self.a(x), b], 1))).mean((2, 3)), b

    torch.manual_seed(0)
    model = Joined().double()
    groups = compress.find_groups(model, batch()[0])
    search = Netslim(NetslimConfig.model_validate({"epochs": "5 steps", "gamma": 1e-4}), Job(model, groups, Plain(), 5))
    assert [g.name for g in groups] == ["a"]
    assert search.penalty.prices[0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("name", ["chain", "residual_stream_with_projection", "dense_connections"])
def test_search_of_a_table_network_folds_to_what_it_computed(name: str) -> None:
    """Scores trained, folded, sliced: the network still computes what the gated one did with the dropped at zero."""
    case = CASES[name]
    model, x = build(case), example(case)
    groups = groups_of(name)
    config = NetslimConfig.model_validate({"epochs": "3 steps", "score": "gate", "gamma": 1e-4, "lr": 1e-3})
    search = Netslim(config, Job(model, groups, Plain(), 3))
    target = torch.zeros_like(model(x))
    model.train()
    for _ in range(3):
        search.step((x, target))
    model.eval()
    found = search.importance()
    keep = {g.name: torch.topk(found[g.name], max(1, g.width // 2)).indices.sort().values.numpy() for g in groups}
    with torch.no_grad():
        for group, gate in scores(model).items():
            mask = torch.zeros_like(gate)
            mask[torch.as_tensor(keep[group])] = 1
            gate.mul_(mask)
        expected = model(x)
        fold_(model)
        assert torch.equal(model(x), expected)
        compress.Plan.build(model, groups, keep).apply_(model)
        assert float((model(x) - expected).abs().max() / expected.abs().max()) < 1e-10


def planted(norm: bool, seed: int) -> tuple[nn.Module, Any, set[int]]:
    """Twelve fixed features of which three carry noise; the label depends on the other nine alone."""
    torch.manual_seed(seed)
    useless = set(torch.randperm(12)[:3].tolist())
    first = nn.Linear(12, 12, bias=False)
    with torch.no_grad():
        first.weight.copy_(torch.eye(12))
    first.weight.requires_grad_(False)
    layers: list[nn.Module] = [first, nn.BatchNorm1d(12) if norm else nn.Identity(), nn.Linear(12, 2)]
    weight = torch.tensor([0.0 if i in useless else 1.0 for i in range(12)])
    x = torch.randn(2048, 12)
    data = [(a, b) for a, b in zip(x.split(128), ((x * weight).sum(1) > 0).long().split(128), strict=True)]
    return nn.Sequential(*layers), data, useless


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("proximal", [False, True])
def test_planted_useless_channels_are_ranked_last(norm: bool, proximal: bool, seed: int) -> None:
    model, data, useless = planted(norm, seed)
    groups = compress.find_groups(model, data[0][0])
    task = compress.Classification(data)
    config = NetslimConfig.model_validate({"epochs": 6, "gamma": 0.01, "lr": 0.05, "proximal": proximal})
    search = Netslim(config, Job(model, groups, task, 6 * len(data)))
    model.train()
    for _ in range(6):
        for one in data:
            search.step(one)
    ranked = search.importance()["0"].argsort().tolist()
    assert set(ranked[:3]) == useless


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_magnitude_finds_the_planted_channels_in_a_network_that_was_trained(seed: int) -> None:
    model, data, useless = planted(False, seed)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.2, weight_decay=1e-3)
    for _ in range(20):
        for x, y in data:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    groups = compress.find_groups(model, data[0][0])
    ranked = importance(MagnitudeConfig(), model, groups)["0"].argsort().tolist()
    assert set(ranked[:3]) == useless


def test_random_scores_do_not_find_the_planted_channels() -> None:
    """The test above would fail for scores that know nothing."""
    found = []
    for seed in range(3):
        model, data, useless = planted(True, seed)
        groups = compress.find_groups(model, data[0][0])
        ranked = importance(RandomConfig(), model, groups, seed)["0"].argsort().tolist()
        found.append(set(ranked[:3]) == useless)
    assert not all(found)


def test_importance_of_a_trained_search_is_not_to_be_had_without_training() -> None:
    model = network(True)
    groups = compress.find_groups(model, batch()[0])
    with pytest.raises(TypeError, match=r"search netslim reads data: use compress.prune"):
        importance(NetslimConfig.model_validate({"epochs": 1}), model, groups)
