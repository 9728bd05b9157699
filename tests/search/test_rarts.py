"""RARTS against the mathematics: closed forms, the formula of each update, planted useless channels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import compress
from compress.search.rarts import Rarts
from helpers.bilevel import TWO_BATCH_METHODS, as_leaves, batch_pair, gradient, loss_at, started_search
from helpers.closed_form_example import on_example
from helpers.regression import with_useless_features


@pytest.mark.parametrize(("lam", "beta"), [(10.0, 10.0), (4.0, 6.0), (20.0, 5.0), (8.0, 30.0)])
def test_rarts_converges_to_the_closed_form_of_example_2_4(lam: float, beta: float) -> None:
    search = on_example(Rarts, steps=2000, **{"lambda": lam, "beta": beta, "lr": 0.02})
    d = 4 * beta * lam - beta - 2 * lam
    w, u, a = (4 * beta * lam - 2 * beta) / d, (4 * beta * lam - 2 * beta - 4 * lam) / d, 4 * beta * lam / d
    assert float(search.job.model.w.detach()) == pytest.approx(w, abs=1e-4)
    assert float(search.u[0].detach()) == pytest.approx(u, abs=1e-4)
    assert float(search.alpha[0].detach()) == pytest.approx(a, abs=1e-4)


def test_rarts_comes_near_the_true_minimiser_as_lambda_and_beta_grow() -> None:
    search = on_example(Rarts, steps=4000, **{"lambda": 60.0, "beta": 60.0, "lr": 0.006})
    assert abs(float(search.alpha[0].detach()) - 1) < 0.02
    assert abs(float(search.job.model.w.detach()) - 1) < 0.02


def lagrangian(search: Rarts, lam: float, beta: float) -> float:
    w, u, a = (float(p.detach()) for p in (search.job.model.w, search.u[0], search.alpha[0]))
    return a * u - 2 * a + 1 + lam * (w - a) ** 2 + beta / 2 * (u - w) ** 2


def test_lagrangian_never_rises_below_the_step_sizes_of_theorem_2_2() -> None:
    lam, beta, lipschitz = 3.0, 4.0, 4.0  # the Hessian of L_a has eigenvalues 0 and 4, that of L_p -1 and 1
    rates = {
        "lr": 0.99 * 0.5 / (beta / 2 + lam * lipschitz),
        "u": {"lr": 0.99 * 0.5 / (beta / 2 + lipschitz)},
        "alpha": {"lr": 0.99 * 0.5 / ((1 + lam) * lipschitz)},
    }
    search = on_example(Rarts, steps=1, start=(3.0, -1.0), **{"lambda": lam, "beta": beta, **rates})
    before = lagrangian(search, lam, beta)
    for _ in range(500):
        search.step(("p", "a"))
        now = lagrangian(search, lam, beta)
        assert now <= before + 1e-12
        before = now


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
