"""RARTS against the mathematics: closed forms, the formula of each update, planted useless channels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import compress
from benchmarks import solvable_model as example
from compress.modules import fresh_tensors
from compress.search.base import Job
from compress.search.rarts import Rarts
from helpers.bilevel import TWO_BATCH_METHODS, as_leaves, batch_pair, gradient, loss_at, started_search
from helpers.regression import RegressionTask, with_useless_features


@pytest.mark.parametrize(("lam", "beta"), [(10.0, 10.0), (4.0, 6.0), (20.0, 5.0), (8.0, 30.0)])
def test_rarts_converges_to_the_closed_form_of_example_2_4(lam: float, beta: float) -> None:
    search = example.start_search(Rarts, **{"lambda": lam, "beta": beta, "lr": 0.02})
    d = 4 * beta * lam - beta - 2 * lam
    w, u, a = (4 * beta * lam - 2 * beta) / d, (4 * beta * lam - 2 * beta - 4 * lam) / d, 4 * beta * lam / d
    assert example.trajectory(search, 2000)[-1] == pytest.approx([w, u, a], abs=1e-4)
    assert example.equilibrium(lam, beta) == pytest.approx([w, u, a], abs=1e-12)


def test_rarts_comes_near_the_true_minimiser_as_lambda_and_beta_grow() -> None:
    search = example.start_search(Rarts, **{"lambda": 60.0, "beta": 60.0, "lr": 0.006})
    w, _, a = example.trajectory(search, 4000)[-1]
    assert abs(a - 1) < 0.02 and abs(w - 1) < 0.02


def lagrangian(points: Any, lam: float, beta: float) -> Any:
    w, u, a = np.moveaxis(points, -1, 0)
    return a * u - 2 * a + 1 + lam * (w - a) ** 2 + beta / 2 * (u - w) ** 2


def test_lagrangian_never_rises_below_the_step_sizes_of_theorem_2_2() -> None:
    lam, beta, lipschitz = 3.0, 4.0, 4.0  # the Hessian of L_a has eigenvalues 0 and 4, that of L_p -1 and 1
    rates = {
        "lr": 0.99 * 0.5 / (beta / 2 + lam * lipschitz),
        "u": {"lr": 0.99 * 0.5 / (beta / 2 + lipschitz)},
        "alpha": {"lr": 0.99 * 0.5 / ((1 + lam) * lipschitz)},
    }
    search = example.start_search(Rarts, start=(3.0, -1.0), **{"lambda": lam, "beta": beta, **rates})
    assert (np.diff(lagrangian(example.trajectory(search, 500), lam, beta)) <= 1e-12).all()


@pytest.mark.parametrize(("lam", "beta", "lr"), [(10.0, 10.0, 0.02), (2.0, 3.0, 0.05)])
def test_steps_of_rarts_on_example_2_7_are_the_linear_iteration_of_the_closed_form(
    lam: float, beta: float, lr: float
) -> None:
    points = example.trajectory(example.start_search(Rarts, (2.0, 0.0), **{"lambda": lam, "beta": beta, "lr": lr}), 300)
    m, _ = example.iteration_matrices(lam, beta, lr)
    z = points - example.equilibrium(lam, beta)
    assert np.allclose(z[1:], z[:-1] @ m.T, rtol=0, atol=1e-12)
    gap = example.lagrangian_gap(points, lam, beta)
    least = lagrangian(example.equilibrium(lam, beta), lam, beta)
    assert np.allclose(gap, lagrangian(points, lam, beta) - least, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("lam", "beta"), [(10.0, 10.0), (2.0, 3.0)])
def test_linear_rate_is_measured_and_within_the_bound_of_corollary_2_6(lam: float, beta: float) -> None:
    lr = 1 / (3 * float(np.linalg.eigvalsh(example.hessian(lam, beta)).max()))  # the largest that it allows
    search = example.start_search(Rarts, (2.0, 0.0), **{"lambda": lam, "beta": beta, "lr": lr})
    gap = example.lagrangian_gap(example.trajectory(search, 400), lam, beta)
    bound = example.rate_bound(lam, beta, lr)
    assert 0 < bound < 1
    assert (gap[1:] <= bound * gap[:-1] + 1e-15).all()
    late = slice(100, 200)
    slope = np.polyfit(np.arange(100), np.log(gap[late]), 1)[0]
    assert float(np.exp(slope)) == pytest.approx(example.linear_rate(lam, beta, lr), abs=2e-3)


def test_noise_floor_of_sgd_is_the_closed_form_and_falls_with_the_learning_rate() -> None:
    """Corollary 2.8: the gap falls to a level proportional to the learning rate."""
    lam, beta, sigma, random = 3.0, 4.0, 0.5, np.random.default_rng(1)
    for lr in (0.04, 0.02):
        search = example.start_search(
            Rarts, tuple(example.equilibrium(lam, beta)[[0, 2]]), lr=lr, **{"lambda": lam, "beta": beta}
        )
        points = example.trajectory(search, 6000, lambda: sigma * random.standard_normal())
        gap = example.lagrangian_gap(points[200:], lam, beta).mean()
        assert gap == pytest.approx(example.noise_floor(lam, beta, lr, sigma), rel=0.15)
    floors = [example.noise_floor(lam, beta, lr, sigma) for lr in (1e-3, 1e-4)]
    assert floors[0] / floors[1] == pytest.approx(10, rel=0.02)


@pytest.mark.parametrize("update", ["exact", "fused"])
def test_each_update_of_rarts_is_the_written_formula(update: str) -> None:
    lam, beta, eta = 0.7, 0.3, {"w": 0.05, "u": 0.04, "alpha": 0.03}
    search = started_search(
        "rarts", **{"lambda": lam, "beta": beta, "u": {"lr": 0.04}, "alpha": {"lr": 0.03}, "update": update}
    )
    primary, auxiliary = batch_pair()
    w, u, alpha = as_leaves(search.weights), as_leaves(search.u), as_leaves(search.alpha)
    gw = gradient(lam * loss_at(search, w, alpha, auxiliary), w)
    w1 = [a - eta["w"] * (g + beta * (a - b)) for a, g, b in zip(w, gw, u, strict=True)]
    gu = gradient(loss_at(search, u, alpha, primary), u)
    u1 = [a - eta["u"] * (g + beta * (a - b)) for a, g, b in zip(u, gu, w1, strict=True)]
    at_w, at_u = (as_leaves(w1), as_leaves(u1)) if update == "exact" else (w, u)
    ga = gradient(lam * loss_at(search, at_w, alpha, auxiliary) + loss_at(search, at_u, alpha, primary), alpha)
    a1 = [a - eta["alpha"] * (g + 0.2 * a.sign()) for a, g in zip(alpha, ga, strict=True)]
    search.step((primary, auxiliary))
    for got, expected in ((search.weights, w1), (search.u, u1), (search.alpha, a1)):
        for p, q in zip(got, expected, strict=True):
            assert torch.allclose(p, q, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("method", [*TWO_BATCH_METHODS, "rarts fused", "taylor"])
def test_planted_useless_channels_are_ranked_last(method: str, seed: int) -> None:
    model, data, useless = with_useless_features(False, seed)
    name, _, fused = method.partition(" ")
    recipe: dict[str, Any] = {"method": name, "epochs": 12}
    if name == "taylor":  # it asks what a trained network would lose
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for x, y in data * 12:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    else:
        recipe |= {"lr": 0.1, "gamma": 0.01, "alpha": {"lr": 0.1}}
    if fused:
        recipe["update"] = "fused"
    full = {"budget": {"dims": "75%"}, "search": recipe, "timing": {"repeats": 3}, "seed": seed}
    pruned = compress.prune(model, full, train=data, quiet=True)
    assert set(range(12)) - set(pruned.plan.keep["0"]) == useless


def test_primary_weights_are_swapped_in_and_out() -> None:
    search = started_search("rarts")
    w, u = as_leaves(search.weights), as_leaves(search.u)
    with search.primary_weights():
        assert all(torch.equal(a, b) for a, b in zip(search.weights, u, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(search.weights, w, strict=True))
    apart = started_search("rarts", start="apart")
    assert all(not torch.equal(a, b) for a, b in zip(apart.u, apart.weights, strict=True))


def test_independent_start_draws_u_as_the_layers_draw_their_weights() -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.Conv2d(64, 8, 3), nn.Flatten(), nn.LazyLinear(4))
    x = torch.randn(4, 3, 8, 8)
    model(x)  # moves the running statistics, too
    with torch.no_grad():
        weight = model[0].weight.mul_(7).clone()
    config = Rarts.Config.model_validate({"method": "rarts", "epochs": "1 steps", "gamma": 0, "start": "independent"})
    search = Rarts(config, Job(model, compress.find_groups(model, x), RegressionTask(), 1))
    by_shape = {tuple(w.shape): u for w, u in zip(search.weights, search.u, strict=True)}
    bound = 1 / 27**0.5  # of nn.Conv2d: uniform in +- 1 / sqrt(inputs)
    u = by_shape[64, 3, 3, 3].detach()
    assert float(u.abs().max()) <= bound and float(u.std()) == pytest.approx(bound / 3**0.5, rel=0.05)
    assert abs(float(torch.corrcoef(torch.stack([u.flatten(), weight.flatten()]))[0, 1])) < 0.1
    means = [b for b in search.u_buffers if b.shape == (64,) and b.is_floating_point()]
    assert any(torch.equal(b, torch.zeros(64)) for b in means) and any(torch.equal(b, torch.ones(64)) for b in means)


def test_parameters_outside_of_layers_are_drawn_from_their_own_mean_and_deviation() -> None:
    class Token(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(5 + 2 * torch.randn(4000))
            self.scale = nn.Parameter(torch.full((3,), 0.1))

    model = Token()
    drawn = fresh_tensors(model)
    token = drawn[id(model.token)]
    assert float(token.mean()) == pytest.approx(5, abs=0.2) and float(token.std()) == pytest.approx(2, abs=0.1)
    assert not torch.equal(token, model.token) and torch.allclose(drawn[id(model.scale)], model.scale)


@pytest.mark.parametrize("kind", [{"penalty": "l1_split", "gamma": 1e-3}, {}], ids=["split", "auto"])
@pytest.mark.parametrize("method", TWO_BATCH_METHODS)
def test_search_on_halves_resumes_to_the_same_bits(
    method: str, kind: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compress.training import engine as engine_module
    from helpers.digits import TIMING, dense, loaders
    from helpers.interruption import Interrupted, InterruptedLoader
    from helpers.weights import same_weights

    monkeypatch.setattr(engine_module, "SAVE_INTERVAL", -1.0)
    search = {"method": method, "epochs": "5 steps", **kind, "alpha": {"lr": 0.1, "optimizer": "adamw"}}
    recipe = {"budget": {"macs": "50%"}, "search": search, "timing": TIMING}
    train = loaders(count=512)[0]
    whole = compress.prune(dense(), recipe, train=InterruptedLoader(train, -1), quiet=True)
    with pytest.raises(Interrupted):
        compress.prune(dense(), recipe, train=InterruptedLoader(train, 8), workdir=tmp_path, quiet=True)
    again = compress.prune(
        dense(), recipe, train=InterruptedLoader(train, -1), workdir=tmp_path, resume=True, quiet=True
    )
    assert again.plan.keep == whole.plan.keep
    assert same_weights(again.model, whole.model)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"lambda": 0}, r"search\.lambda: input should be greater than 0"),
        ({"lambda": -1}, r"search\.lambda: "),
        ({"beta": -1e-3}, r"search\.beta: input should be greater than or equal to 0"),
        ({"update": "exakt"}, r"search\.update: expected one of exact, fused; got 'exakt'\. Did you mean exact\?"),
        ({"u": {"lr": 0}}, r"search\.u\.lr: "),
        ({"lamda": 1}, r"search\.lamda: expected one of .*Did you mean lambda\?"),
    ],
)
def test_impossible_settings_are_named(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(compress.RecipeError, match=match):
        compress.Recipe.load({"budget": {"macs": 0.5}, "search": {"method": "rarts", "epochs": 1, **settings}})


def test_recipe_of_a_search_goes_round_through_plain_data() -> None:
    search = {"method": "rarts", "epochs": 3, "lambda": 0.5, "u": {"lr": 0.1}}
    recipe = compress.Recipe.load({"budget": {"macs": 0.5}, "search": search})
    dumped = recipe.model_dump(mode="json", exclude_none=True)
    assert dumped["search"]["lambda"] == 0.5
    assert compress.Recipe.load(dumped) == recipe
