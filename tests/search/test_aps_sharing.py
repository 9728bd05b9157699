"""Sharing of meta weights: equations (6)-(10) against loops, the extremes of Phi, annealing, and who is projected."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import compress
from cases import CASES, build, groups_of
from compress.search.aps.projections import Projection, Side, layer_slots, sharing_level
from compress.search.aps.sharing import (
    UPDATES,
    anneal_,
    anneal_by_position_,
    disjoint_columns,
    nested_columns,
    nested_sum,
    separated,
    shared_sum,
)

PAPER = [4, 8, 16, 32, 64]


def random_side(group: int, widths: list[int], size: int, seed: int) -> Side:
    generator = torch.Generator().manual_seed(seed)
    side = Side(group, widths, size, torch.device("cpu"))
    rows = sum(widths)
    a = torch.randn(rows, rows, generator=generator, dtype=torch.float64)
    side.set_(a / a.norm(dim=0), torch.randperm(size, generator=generator))
    return side


def columns_of(side: Side, widths: list[int], k: int) -> Tensor:
    """P of candidate k: the largest candidate has the first columns of A."""
    start = sum(widths[k + 1 :])
    return side.a[:, start : start + widths[k]]


@pytest.mark.parametrize("kernel", [(), (3, 2)])
def test_projection_is_equation_6(kernel: tuple[int, ...]) -> None:
    out_widths, in_widths = [1, 3, 4], [2, 3]
    rows, columns = random_side(0, out_widths, 5, 0), random_side(1, in_widths, 3, 1)
    choices = torch.zeros(2, dtype=torch.long)
    projection = Projection(nn.Parameter(torch.zeros(5, 3, *kernel, dtype=torch.float64)), rows, columns, choices)
    with torch.no_grad():
        projection.meta.normal_(generator=torch.Generator().manual_seed(2))
    meta = projection.meta.detach()
    for o, i in product(range(3), range(2)):
        p, q = columns_of(rows, out_widths, o), columns_of(columns, in_widths, i)
        expected = torch.zeros(5, 3, *kernel, dtype=torch.float64)
        for x, y in product(range(out_widths[o]), range(in_widths[i])):
            row, column = int((rows.ranks == x).nonzero()), int((columns.ranks == y).nonzero())
            for a, b in product(range(len(p)), range(len(q))):
                expected[row, column] += p[a, x] * q[b, y] * meta[a, b]
        assert torch.allclose(projection.project(torch.tensor([o, i])), expected, rtol=0, atol=1e-12)


def test_sharing_level_is_the_sum_of_equation_9_over_all_pairs() -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    groups = compress.find_groups(model, torch.zeros(1, 3, dtype=torch.float64))
    candidates = [[2, 3, 6], [1, 4]]
    sides = {("0.weight", 0): 0, ("2.weight", 1): 0, ("2.weight", 0): 1, ("4.weight", 1): 1}
    made = {key: random_side(g, candidates[g], (6, 5)[g], seed) for seed, (key, g) in enumerate(sides.items())}
    layers = []
    for name in ("0.weight", "2.weight", "4.weight"):
        weight = model.get_parameter(name)
        projection = Projection(weight, made.get((name, 0)), made.get((name, 1)), torch.zeros(2, dtype=torch.long))
        layers.append(type("Layer", (), {"name": name, "weight": weight, "projection": projection})())
    expected = 0.0
    for name in ("0.weight", "2.weight", "4.weight"):
        parts: list[list[Tensor]] = [[torch.ones(1, 1, dtype=torch.float64)]] * 2
        for dim in (0, 1):
            if (name, dim) in made:
                g = sides[name, dim]
                parts[dim] = [columns_of(made[name, dim], candidates[g], k) for k in range(len(candidates[g]))]
        for p, p2, q, q2 in product(parts[0], parts[0], parts[1], parts[1]):
            phi = 0.0
            for x, x2, y, y2 in product(*(range(m.shape[1]) for m in (p, p2, q, q2))):
                phi += float((p[:, x] @ p2[:, x2]) * (q[:, y] @ q2[:, y2])) ** 2
            expected += phi
    assert sharing_level(groups, candidates, layers)[0] == pytest.approx(expected, abs=0.01)
    phi, least, most = sharing_level(groups, candidates, [])
    assert phi == most == 25 + 25 * 7 + 7 and least == 11 + 11 * 5 + 5


def test_phi_has_the_extremes_of_the_paper() -> None:
    nested, disjoint = nested_columns(PAPER), disjoint_columns(PAPER)
    assert float(shared_sum(nested)) == nested_sum(PAPER) == 332
    assert float(shared_sum(disjoint)) == sum(PAPER) == 124
    assert float(shared_sum(nested)) ** 2 == 110224
    assert float(shared_sum(disjoint)) ** 2 == 15376


@pytest.mark.parametrize("widths", [PAPER, [16, 32, 48, 64], [4, 8], [3, 5, 6, 7, 8, 9], [6]])
def test_annealing_goes_from_nested_to_disjoint_and_keeps_columns_of_norm_one(widths: list[int]) -> None:
    a = separated(nested_columns(widths))
    level = float(shared_sum(a))
    assert level == pytest.approx(nested_sum(widths), rel=1e-3)
    for _ in range(UPDATES):
        anneal_(a)
        now = float(shared_sum(a))
        assert now <= level * (1 + 1e-5)
        assert float((a.norm(dim=0) - 1).abs().max()) < 1e-12
        level = now
    assert level == pytest.approx(sum(widths), rel=5e-4)


@pytest.mark.parametrize("widths", [PAPER, [16, 32, 48, 64], [3, 5, 6, 7, 8, 9], [5, 5, 2], [6]])
def test_annealing_by_position_is_annealing(widths: list[int]) -> None:
    whole = separated(nested_columns(widths))
    parts = whole.clone()
    for _ in range(UPDATES):
        anneal_(whole)
        anneal_by_position_(parts, widths)
    assert torch.allclose(parts, whole, rtol=0, atol=1e-9)


def test_annealing_of_wide_layers_is_cheap() -> None:
    widths = [64, 128, 192, 256]
    a = separated(nested_columns(widths))
    with FlopCounterMode(display=False) as counter:
        anneal_by_position_(a, widths)
    assert counter.get_total_flops() < sum(widths) ** 3 / 1000


def test_one_annealing_update_descends_the_sum_of_overlaps() -> None:
    """Against autograd, for overlaps larger than the rate, where the sign is the paper's."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(6, 9, generator=generator, dtype=torch.float64).requires_grad_()
    overlaps = (a.T @ a).abs()
    (gradient,) = torch.autograd.grad(overlaps.sum() - overlaps.diagonal().sum(), a)
    rate = float(overlaps.detach().min()) / 2
    expected = a.detach() - rate / 2 * gradient
    moved = a.detach().clone()
    anneal_(moved, rate)
    assert torch.allclose(moved, expected / expected.norm(dim=0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("columns", [nested_columns, disjoint_columns])
def test_copies_give_every_candidate_the_masked_weight(columns: Any) -> None:
    out_widths, in_widths = [2, 5, 6], [1, 4]
    rows, inputs = (Side(g, w, s, torch.device("cpu")) for g, w, s in ((0, out_widths, 7), (1, in_widths, 4)))
    rows.set_(columns(out_widths), torch.randperm(7, generator=torch.Generator().manual_seed(0)))
    inputs.set_(columns(in_widths), torch.randperm(4, generator=torch.Generator().manual_seed(1)))
    weight = nn.Parameter(torch.randn(7, 4, 3, 3, generator=torch.Generator().manual_seed(2)))
    projection = Projection(weight, rows, inputs, torch.zeros(2, dtype=torch.long))
    projection.expand_(weight)
    for o, i in product(range(3), range(2)):
        mask = (rows.ranks < out_widths[o])[:, None] & (inputs.ranks < in_widths[i])
        assert torch.equal(projection.project(torch.tensor([o, i])), weight * mask[:, :, None, None])


def test_only_groups_between_plain_layers_are_projected() -> None:
    for name, case in CASES.items():
        model, modules = build(case), dict(build(case).named_modules())
        for group in groups_of(name):
            slots = layer_slots(model, group)
            if not slots:
                continue
            assert group.kind in ("channels", "mlp") and group.num_heads == 1
            assert [slot.dim for slot in slots] == [0] + [1] * (len(slots) - 1)
            for slot in slots:
                owner = modules[slot.tensor.removesuffix(".weight")]
                assert isinstance(owner, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)), owner
                assert getattr(owner, "groups", 1) == 1
                assert owner.weight.shape[slot.dim] == group.width


def test_residual_streams_and_depthwise_convolutions_are_not_projected() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.conv1, self.conv2 = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 8, 1), nn.Conv2d(8, 6, 1)
            self.wide, self.deep, self.out = nn.Conv2d(6, 10, 1), nn.Conv2d(10, 10, 3, groups=10), nn.Conv2d(10, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            x = x + self.conv2(self.conv1(x).relu())
            return self.out(self.deep(self.wide(x).relu()).relu()).mean((2, 3))

    model = Block().eval()
    groups = compress.find_groups(model, torch.zeros(1, 3, 9, 9), compress.recipe.Target(residual=True))
    projected = {group.name: bool(layer_slots(model, group)) for group in groups}
    assert projected == {"stem": False, "conv1": True, "wide": False}


def test_weights_that_two_layers_share_are_not_projected() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    groups = compress.find_groups(model, torch.zeros(1, 4))
    assert all(layer_slots(model, group) for group in groups)
    model[2].weight = model[0].weight
    assert not any(layer_slots(model, group) for group in groups)
