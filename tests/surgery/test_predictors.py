"""Least squares repair keeps the dimensions from which the dropped ones can best be predicted."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compress
from compress.recipe import Target
from compress.surgery.repair import elimination, prefer_predictors
from compress.surgery.repair.elimination import LinearSystem, elimination_order
from compress.surgery.repair.predictors import deal_out, readers_of

Problem = tuple[Tensor, Tensor]  # samples (samples, positions), weights (outputs, positions)


def forward(model: nn.Module, batch: Any) -> Any:
    return model(batch)


def problem(positions: int, seed: int, rank: int | None = None) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(200, rank or positions, generator=generator).double()
    mix = torch.randn(x.shape[1], positions, generator=generator).double()
    return x @ mix, torch.randn(3, positions, generator=generator).double()


def system(x: Tensor, weight: Tensor, size: int = 1) -> LinearSystem:
    return LinearSystem.of(torch.cov(x.T), weight.T @ weight, size)


def error(problems: list[Problem], kept: list[int], size: int) -> float:
    """Return the error of the outputs if weights on the kept positions are solved anew, relative to their variance."""
    total = 0.0
    for x, weight in problems:
        at = [i * size + j for i in kept for j in range(size)]
        x = x - x.mean(0)
        y = x @ weight.T
        solution = torch.linalg.lstsq(x[:, at], y).solution if at else torch.zeros(0, 3).double()
        total += float((y - x[:, at] @ solution).square().sum() / y.square().sum())
    return total


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("readers", [1, 2])
def test_each_step_drops_what_explicit_regression_needs_least(readers: int, size: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(elimination, "RIDGE", 1e-12)
    problems = [problem(6 * size, seed) for seed in range(readers)]
    order = elimination_order([system(x, w, size) for x, w in problems]).tolist()
    kept = list(range(6))
    for dropped in order[:-1]:
        errors = {i: error(problems, [j for j in kept if j != i], size) for i in kept}
        assert dropped == min(errors, key=errors.__getitem__)
        kept.remove(dropped)


def test_rise_is_the_difference_of_explicit_errors(monkeypatch: Any) -> None:
    monkeypatch.setattr(elimination, "RIDGE", 1e-12)
    x, weight = problem(5, 3)
    whole = system(x, weight)
    smaller = whole.without(torch.tensor([1, 3]))
    before = error([(x, weight)], [0, 2, 4], 1)
    rises = [error([(x, weight)], [j for j in (0, 2, 4) if j != i], 1) - before for i in (0, 2, 4)]
    assert torch.allclose(smaller.rises(), torch.tensor(rises).double(), rtol=1e-6)


def test_dropping_several_at_once_is_dropping_them_one_after_the_other(monkeypatch: Any) -> None:
    x, weight = problem(40, 4, rank=25)
    expected = elimination_order([system(x, weight)])
    monkeypatch.setattr(elimination, "DROPPED_AT_ONCE", 0.1)
    monkeypatch.setattr(elimination, "CANDIDATES", 10)  # all of them
    assert elimination_order([system(x, weight)]).tolist() == expected.tolist()
    monkeypatch.setattr(elimination, "CANDIDATES", 4)
    kept = elimination_order([system(x, weight)])[10:].tolist()
    assert error([(x, weight)], kept, 1) < 1e-3  # 25 of 40 dimensions carry everything


def test_kept_dimensions_are_nearer_to_the_best_of_all_subsets_than_to_the_median() -> None:
    found, best, median = 0.0, 0.0, 0.0
    for seed in range(20):
        data = [problem(7, seed, rank=4)]
        errors = sorted(error(data, list(kept), 1) for kept in itertools.combinations(range(7), 3))
        found += error(data, elimination_order([system(*data[0])])[4:].tolist(), 1)
        best, median = best + errors[0], median + errors[len(errors) // 2]
    assert best <= found < best + 0.4 * (median - best)


def test_values_are_dealt_out_within_each_head() -> None:
    values = torch.tensor([9.0, 1, 5, 4, 2, 3])
    order = torch.tensor([4, 0, 1, 5, 2, 3])
    assert deal_out(values, order, 2).tolist() == [1, 5, 9, 4, 2, 3]


class Doubled(nn.Module):
    """Dimensions 4 to 7 repeat 0 to 3, at twice the size; dimension 8 is read less and like no other."""

    def __init__(self) -> None:
        super().__init__()
        self.write, self.read = nn.Linear(6, 9), nn.Linear(9, 5)
        with torch.no_grad():
            self.write.weight[4:8] = 2 * self.write.weight[:4]
            self.write.bias[4:8] = 2 * self.write.bias[:4]
            self.read.weight[:, :8] *= 3

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.read(self.write(x).relu())
        return out


def test_repeated_dimensions_are_kept_once_and_the_cut_costs_nothing() -> None:
    torch.manual_seed(0)
    model, x = Doubled().double(), torch.randn(200, 6).double()
    recipe = {"budget": {"dims": "56%"}, "search": "magnitude", "target": {"mlp": True, "channels": True}}
    pruned = compress.prune(model, recipe | {"compensate": "least_squares"}, calibration=x, quiet=True)
    kept = pruned.plan.keep["write"]
    assert sorted(i % 4 for i in kept if i < 8) == [0, 1, 2, 3] and 8 in kept
    assert torch.allclose(pruned.model(x), model(x), atol=1e-9)
    assert any("1 groups keep the dimensions that best predict" in note for note in pruned.report.notes)
    plain = compress.prune(model, recipe, example_inputs=x[:1], quiet=True)
    assert 8 not in plain.plan.keep["write"]  # the smallest


def test_values_of_a_group_and_groups_that_products_read_stay_as_they_are() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(24, 3, 40, dropout=0.0, batch_first=True).eval()
    x = torch.randn(4, 7, 24)
    groups = compress.find_groups(model, x, Target(channels=False, attention=True, mlp=True, residual=False))
    importance = {group.name: torch.rand(group.width).double() for group in groups}
    found, changed = prefer_predictors(model, groups, importance, [x, x + 1], forward)
    kinds = {group.name: group.kind for group in groups}
    assert [kinds[name] for name in changed] == ["mlp"] and "attention" in kinds.values()
    for name, values in importance.items():
        assert torch.equal(found[name].sort().values, values.sort().values)
        assert torch.equal(found[name], values) == (name not in changed)


def test_a_layer_that_is_too_wide_to_be_solved_decides_nothing() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 2500, 2))
    groups = compress.find_groups(model, torch.randn(1, 1, 50, 50))
    assert [readers_of(model, group) for group in groups] == [{}]
    narrow = nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 100, 2))
    groups = compress.find_groups(narrow, torch.randn(1, 1, 10, 10))
    assert [list(readers_of(narrow, group)) for group in groups] == [["3"]]


def test_groups_with_values_that_are_not_finite_keep_their_order() -> None:
    torch.manual_seed(0)
    model, x = Doubled(), torch.randn(50, 6)
    groups = compress.find_groups(model, x[:1], Target(mlp=True))
    importance = {group.name: torch.arange(9.0).double() for group in groups}
    assert all(readers_of(model, group) for group in groups)
    found, changed = prefer_predictors(model, groups, importance, [x * float("nan")], forward)
    assert not changed and all(torch.equal(found[name], importance[name]) for name in importance)
