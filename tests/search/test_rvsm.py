"""Relaxed variable splitting on weights: its steps, its minima in closed form, and planted useless channels."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compress
from compress.recipe import Target
from compress.search.base import Job, search_class
from helpers.bilevel import batch_pair, small_convolutions
from helpers.digits import TIMING, dense, loaders
from helpers.regression import RegressionTask, with_useless_features

PENALTIES = ["l1", "l0", "tl1"]


def started(model: nn.Module, inputs: Tensor, budget: bool = False, **settings: Any) -> Any:
    cls = search_class("rvsm")
    common = {"epochs": "9 steps", "lr": 0.05, "momentum": 0, "weight_decay": 0, "schedule": "constant"}
    config = cls.Config.model_validate({"method": "rvsm", **common, **settings})
    schedule = (lambda *_: {}) if budget else None
    return cls(config, Job(model, compress.find_groups(model, inputs), RegressionTask(), 9, schedule=schedule))


def penalty_at(name: str, size: Tensor) -> Tensor:
    return {"l1": size, "l0": (size != 0).to(size.dtype), "tl1": 2 * size / (1 + size)}[name]


@pytest.mark.parametrize("penalty", PENALTIES)
def test_sparse_copy_of_a_group_minimises_by_brute_force(penalty: str) -> None:
    """min over u of gamma P(||u||) + split / 2 ||u - w||^2, on a grid of vectors along w, and beside w."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 2, bias=False)).double()
    with torch.no_grad():
        model[1].weight.copy_(torch.randn(2, 5).double() * torch.tensor([0.05, 0.4, 0.8, 1.5, 3.0]))
    gamma, split = 0.3, 0.5
    search = started(model, torch.randn(4, 3).double(), penalty=penalty, gamma=gamma, split=split)
    u, w = search._minimum()["1.weight"], model[1].weight.detach()
    assert set(search.penalized) == {"1.weight"}, "the first layer reads the inputs of the network"
    factors = torch.linspace(-1.2, 1.2, 24001, dtype=torch.float64)
    for column in range(5):
        value = w[:, column]
        best = (
            gamma * penalty_at(penalty, factors.abs() * value.norm())
            + split / 2 * ((factors - 1) * value.norm()).square()
        )
        mine = gamma * penalty_at(penalty, u[:, column].norm()) + split / 2 * (u[:, column] - value).square().sum()
        assert float(mine) <= float(best.min()) + 1e-9
        beside = u[:, column] + 0.05 * torch.randn(200, 2, dtype=torch.float64)
        others = gamma * penalty_at(penalty, beside.norm(dim=1)) + split / 2 * (beside - value).square().sum(1)
        assert bool((others >= mine - 1e-12).all())
    assert (u == 0).any() and (u != 0).any()


@pytest.mark.parametrize("groups", ["dimensions", "weights"])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_step_is_equation_2_6(groups: str, penalty: str) -> None:
    """w steps on the loss and towards the old copy; the new copy is the minimum at the old w."""
    model, (batch, _) = small_convolutions(), batch_pair()
    search = started(model, batch[0], groups=groups, penalty=penalty, gamma=0.2, split=0.5)
    with torch.no_grad():
        for u in search.sparse_copies.values():
            u.add_(0.1 * torch.randn_like(u))
    before = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    copies = {name: u.clone() for name, u in search.sparse_copies.items()}
    minimum = search._minimum()
    outputs = torch.func.functional_call(model, before, (batch[0],))
    loss = (outputs - batch[1]).square().mean() + 0.25 * sum((before[n] - u).square().sum() for n, u in copies.items())
    gradients = torch.autograd.grad(loss, list(before.values()))
    terms = search.step(batch)
    for (name, p), g in zip(model.named_parameters(), gradients, strict=True):
        assert torch.allclose(p, before[name] - 0.05 * g, atol=1e-12)
    for name, u in search.sparse_copies.items():
        assert torch.equal(u, minimum[name])
    assert float(terms["task"] + terms["coupling"]) == pytest.approx(float(loss.detach()), rel=1e-9)
    expected = {"2.weight", "5.weight"} if groups == "dimensions" else {"0.weight", "2.weight", "5.weight"}
    assert set(search.penalized) == expected


class Quadratic(RegressionTask):
    """(w - c)^2 / 2 for every weight of the second layer."""

    def __init__(self, target: Tensor) -> None:
        self.target = target

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model[1].weight  # type: ignore[index]

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return (outputs - self.target).square().sum() / 2


def test_iterations_converge_to_the_minimum_in_closed_form() -> None:
    """min (w - c)^2 / 2 + gamma |u| + split / 2 (u - w)^2: u = S(c, gamma (1 + 1 / split)), w is between c and u."""
    gamma, split = 0.3, 0.5
    c = torch.tensor([[-2.0, -0.8, 0.1, 0.95, 3.0]], dtype=torch.float64)
    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 1, bias=False)).double()
    search = started(model, torch.randn(4, 3).double(), groups="weights", gamma=gamma, split=split, lr=0.3)
    del search.penalized["0.weight"], search.sparse_copies["0.weight"]
    search.job.task = Quadratic(c)
    for _ in range(300):
        search.step((torch.zeros(1, 3).double(), torch.zeros(1)))
    u = c.sign() * (c.abs() - gamma * (1 + 1 / split)).clamp_min(0)
    assert torch.allclose(search.sparse_copies["1.weight"], u, atol=1e-9)
    assert torch.allclose(model[1].weight, (c + split * u) / (1 + split), atol=1e-9)
    search.finish()
    assert torch.equal(model[1].weight == 0, u == 0)
    assert torch.allclose(search.importance()["0"], u.abs()[0], atol=1e-9)


def test_budget_orders_dimensions_at_zero_and_keeps_their_weights() -> None:
    model, (batch, _) = small_convolutions(), batch_pair()
    search = started(model, batch[0], budget=True, gamma=100.0)
    before = copy.deepcopy(model.state_dict())
    search.finish()
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    importance = search.importance()["0"]
    norms = model[2].weight.detach().square().sum((0, 2, 3))
    assert 0 < float(importance.max()) < 1e-15 and torch.equal(importance.argsort(), norms.argsort())


@pytest.mark.parametrize("groups", ["dimensions", "weights"])
def test_dimensions_that_frozen_weights_read_are_not_dropped(groups: str) -> None:
    model, (batch, _) = small_convolutions(), batch_pair()
    model[2].weight.requires_grad_(False)
    search = started(model, batch[0], groups=groups, gamma=100.0)
    search.finish()
    norms = model[2].weight.detach().square().sum((0, 2, 3)).sqrt()
    assert torch.allclose(search.importance()["0"], norms) and not search.importance()["2"].any()


@pytest.mark.parametrize("groups", ["dimensions", "weights"])
def test_single_weights_of_dimensions_that_are_scored_at_their_writers_include_biases(groups: str) -> None:
    """sigma(x W1 + b) is zero only where the row and the bias are."""
    model, x = Mlp().double(), torch.randn(2, 5, 8).double()
    offered = compress.find_groups(model, x, Target(mlp="before_activation"))
    config = search_class("rvsm").Config(epochs="2 steps", groups=groups, gamma=0.3, split=0.5, penalty="l0")
    search = search_class("rvsm")(config, Job(model, offered, RegressionTask(), 2))
    search.finish()
    (importance,) = search.importance().values()
    zero = (model.first.weight == 0).all(1) & (model.first.bias == 0)
    assert zero.any() and torch.equal(importance == 0, zero)


class Mlp(nn.Module):
    """A block of a transformer's MLP whose first rows are small."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 2)
        self.first.weight.data[:2] *= 1e-3
        self.first.bias.data = torch.tensor([1e-3, 2.0, 2.0, 2.0, 2.0, 2.0])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.second(torch.relu(self.first(self.norm(x))))
        return self.head(x.mean(1))  # type: ignore[no-any-return]


def test_networks_whose_readers_are_all_frozen_are_refused() -> None:
    model, (batch, _) = small_convolutions(), batch_pair()
    model[2].weight.requires_grad_(False)
    model[5].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"search\.method: rvsm trains the weights that read.* frozen .*2\.weight"):
        started(model, batch[0])


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("groups", "penalty", "gamma"), [("dimensions", "l1", 2e-2), ("dimensions", "l0", 4e-3), ("weights", "tl1", 5e-3)]
)
def test_planted_useless_channels_go(groups: str, penalty: str, gamma: float, seed: int) -> None:
    model, data, useless = with_useless_features(False, seed)
    search = {"method": "rvsm", "epochs": 12, "lr": 0.1, "schedule": "constant", "groups": groups, "penalty": penalty}
    recipe = {
        "budget": "auto",
        "search": search | {"gamma": gamma, "split": 0.1},
        "timing": {"repeats": 3},
        "seed": seed,
    }
    pruned = compress.prune(model, recipe, train=data, quiet=True)
    assert set(range(12)) - set(pruned.plan.keep["0"]) == useless


def test_search_runs_end_to_end_and_the_report_counts_zero_weights() -> None:
    train, val = loaders(count=256)
    search = {"method": "rvsm", "epochs": "6 steps", "groups": "weights", "gamma": 5e-3}
    recipe = {"budget": {"macs": "60%"}, "search": search, "timing": TIMING}
    pruned = compress.prune(dense(), recipe, train=train, val=val, quiet=True)
    assert any("weights of the sliced network are zero" in note for note in pruned.report.notes)
    assert pruned.report.pruned.macs <= 0.6 * pruned.report.dense.macs


def test_search_resumes_to_the_same_bits(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from compress.training import engine as engine_module
    from helpers.interruption import Interrupted, InterruptedLoader
    from helpers.weights import same_weights

    monkeypatch.setattr(engine_module, "SAVE_INTERVAL", -1.0)
    search = {"method": "rvsm", "epochs": "6 steps"}
    recipe = {"budget": {"macs": "50%"}, "search": search, "timing": TIMING}
    train = loaders(count=512)[0]
    whole = compress.prune(dense(), recipe, train=InterruptedLoader(train, -1), quiet=True)
    with pytest.raises(Interrupted):
        compress.prune(dense(), recipe, train=InterruptedLoader(train, 4), workdir=tmp_path, quiet=True)
    again = compress.prune(
        dense(), recipe, train=InterruptedLoader(train, -1), workdir=tmp_path, resume=True, quiet=True
    )
    assert again.plan.keep == whole.plan.keep and same_weights(again.model, whole.model)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"penalty": "l2"}, r"search\.penalty: expected one of l1, l0, tl1; got 'l2'"),
        ({"groups": "rows"}, r"search\.groups: expected one of dimensions, weights; got 'rows'"),
        ({"split": 0}, r"search\.split: "),
    ],
)
def test_impossible_settings_are_named(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(compress.RecipeError, match=match):
        compress.Recipe.load({"budget": {"macs": 0.5}, "search": {"method": "rvsm", "epochs": 1, **settings}})
