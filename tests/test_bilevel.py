"""RARTS and its rivals against the mathematics: closed forms, each update's formula, planted useless channels."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_netslim import Plain, planted
from torch import Tensor, nn

import compress
from compress.search import Job, search_class
from compress.search.darts import Darts1, Darts2
from compress.search.milenas import Milenas
from compress.search.penalty import Places, hard_threshold, soft_threshold
from compress.search.rarts import Rarts
from compress.search.scored import Scored

PAIRED = ["rarts", "darts1", "darts2", "milenas"]


class Solvable(nn.Module):
    """The weight and the score of example 2.4."""

    def __init__(self, w: float, a: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([w], dtype=torch.float64))
        self.a = nn.Parameter(torch.tensor([a], dtype=torch.float64))

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.w, self.a


class Example(Plain):
    """L_p = a w - 2 a + 1 and L_a = w^2 - 2 a w + a^2."""

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model()

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        w, a = outputs
        return (a * w - 2 * a + 1 if batch == "p" else w**2 - 2 * a * w + a**2).sum()


def on_example(cls: type[Scored], steps: int = 4000, start: tuple[float, float] = (0.3, 0.2), **settings: Any) -> Any:
    class Here(cls):  # type: ignore[misc, valid-type]
        def attach(self) -> Places:
            return {"a": [(self.job.model.a, torch.zeros(1, 1, dtype=torch.long))]}

    model = Solvable(*start)
    common = {
        "epochs": f"{steps} steps",
        "lr": 0.05,
        "momentum": 0,
        "weight_decay": 0,
        "schedule": "constant",
        "gamma": 0,
    }
    config = cls.Config.model_validate({"method": cls.Config.model_fields["method"].default, **common, **settings})
    search = Here(config, Job(model, None, Example(), steps))  # type: ignore[arg-type]
    for _ in range(steps):
        search.step(("p", "a"))
    return search


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


@pytest.mark.parametrize(("cls", "settings"), [(Darts1, {}), (Milenas, {"lambda": 0.5}), (Milenas, {"lambda": 2.0})])
def test_first_order_rivals_go_to_the_spurious_equilibrium(cls: type[Scored], settings: dict[str, Any]) -> None:
    search = on_example(cls, start=(1.9, 1.8), lr=0.05, steps=2000, **settings)
    assert float(search.job.model.w.detach()) == pytest.approx(2, abs=1e-3)
    assert float(search.alpha[0].detach()) == pytest.approx(2, abs=1e-3)


def test_second_order_darts_looks_ahead_and_comes_nearer() -> None:
    """With xi = 1/2 the step ahead lands on the inner minimiser w*(a) = a: the true (1, 1)."""
    search = on_example(Darts2, lr=0.5, alpha={"lr": 0.05}, steps=800)
    assert float(search.alpha[0].detach()) == pytest.approx(1, abs=1e-3)
    assert float(search.job.model.w.detach()) == pytest.approx(1, abs=1e-3)


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


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 16, 4)]
    return nn.Sequential(*layers).double()


def pair() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    made = [(torch.randn(4, 3, 8, 8, generator=generator), torch.randn(4, 4, generator=generator)) for _ in range(2)]
    return tuple((x.double(), y.double()) for x, y in made)  # type: ignore[return-value]


def started(method: str, **settings: Any) -> Any:
    model = network()
    cls = search_class(method)
    common = {"epochs": "9 steps", "lr": 0.05, "momentum": 0, "weight_decay": 0, "schedule": "constant", "gamma": 0.2}
    config = cls.Config.model_validate({"method": method, **common, **settings})
    search: Any = cls(config, Job(model, compress.find_groups(model, pair()[0][0]), Plain(), 9))
    with torch.no_grad():
        generator = torch.Generator().manual_seed(4)
        for a in search.alpha:
            a.copy_(torch.randn(a.shape, generator=generator))
        for u in getattr(search, "u", []):
            u.add_(0.05 * torch.randn(u.shape, generator=generator))
    return search


def loss_at(search: Any, weights: list[Tensor], alpha: list[Tensor], batch: Any) -> Tensor:
    """The loss as a function of weights and scores, written without the search's code."""
    model = copy.deepcopy(search.job.model)
    names = [n for n, _ in model.named_parameters()]
    mine = {id(p): n for n, p in search.job.model.named_parameters()}
    values = {mine[id(p)]: v for p, v in zip(search.weights, weights, strict=True)}
    values |= {mine[id(p)]: v for p, v in zip(search.alpha, alpha, strict=True)}
    assert set(values) == set(names)
    out = torch.func.functional_call(model, values, (batch[0],))
    return (out - batch[1]).square().mean()


def fresh(tensors: Any) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


def gradient(loss: Tensor, wanted: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, wanted))


@pytest.mark.parametrize("update", ["exact", "fused"])
def test_each_update_of_rarts_is_the_written_formula(update: str) -> None:
    lam, beta, eta = 0.7, 0.3, {"w": 0.05, "u": 0.04, "alpha": 0.03}
    search = started(
        "rarts", **{"lambda": lam, "beta": beta, "u": {"lr": 0.04}, "alpha": {"lr": 0.03}, "update": update}
    )
    primary, auxiliary = pair()
    w, u, alpha = fresh(search.weights), fresh(search.u), fresh(search.alpha)
    gw = gradient(lam * loss_at(search, w, alpha, auxiliary), w)
    w1 = [a - eta["w"] * (g + beta * (a - b)) for a, g, b in zip(w, gw, u, strict=True)]
    gu = gradient(loss_at(search, u, alpha, primary), u)
    u1 = [a - eta["u"] * (g + beta * (a - b)) for a, g, b in zip(u, gu, w1, strict=True)]
    at_w, at_u = (fresh(w1), fresh(u1)) if update == "exact" else (w, u)
    ga = gradient(lam * loss_at(search, at_w, alpha, auxiliary) + loss_at(search, at_u, alpha, primary), alpha)
    a1 = [a - eta["alpha"] * (g + 0.2 * a.sign()) for a, g in zip(alpha, ga, strict=True)]
    search.step((primary, auxiliary))
    for got, expected in ((search.weights, w1), (search.u, u1), (search.alpha, a1)):
        for p, q in zip(got, expected, strict=True):
            assert torch.allclose(p, q, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["darts1", "milenas"])
def test_each_update_of_the_first_order_rivals_is_the_written_formula(method: str) -> None:
    search = started(method, **({"lambda": 0.6} if method == "milenas" else {}))
    primary, auxiliary = pair()
    w, alpha = fresh(search.weights), fresh(search.alpha)
    w1 = [a - 0.05 * g for a, g in zip(w, gradient(loss_at(search, w, alpha, auxiliary), w), strict=True)]
    loss = loss_at(search, fresh(w1), alpha, primary)
    if method == "milenas":
        loss = 0.6 * loss + loss_at(search, fresh(w1), alpha, auxiliary)
    a1 = [a - 0.05 * (g + 0.2 * a.sign()) for a, g in zip(alpha, gradient(loss, alpha), strict=True)]
    search.step((primary, auxiliary))
    for got, expected in ((search.weights, w1), (search.alpha, a1)):
        for p, q in zip(got, expected, strict=True):
            assert torch.allclose(p, q, rtol=0, atol=1e-12)


def test_mixed_term_of_darts2_is_the_hessian_vector_product() -> None:
    """Smooth activations, so that the finite difference has a limit to agree with."""
    search = started("darts2")
    for i in (1, 3):
        search.job.model[i] = nn.Tanh()
    search.optimizer.param_groups[0]["lr"] = 0.05
    primary, auxiliary = pair()
    w, alpha = fresh(search.weights), fresh(search.alpha)
    gw = torch.autograd.grad(loss_at(search, w, alpha, auxiliary), w, create_graph=True)
    ahead = [(a - 0.05 * g) for a, g in zip(w, gw, strict=True)]
    exact = gradient(loss_at(search, ahead, alpha, primary), alpha)  # through the step of the weights
    plain = gradient(loss_at(search, fresh(ahead), alpha, primary), alpha)
    _, got = search.look_ahead(primary, auxiliary, [g.detach() for g in gw])
    for a, b, c in zip(exact, got, plain, strict=True):
        assert float((a - c).abs().max()) > 1e-6, "the mixed term is not to be lost in rounding"
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float((a - c).abs().max()))
    for p, q in zip(search.weights, w, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("t", [0.0, 0.1, 0.5, 2.0])
def test_thresholding_minimises_by_brute_force(t: float) -> None:
    grid = torch.cat([torch.linspace(-4, 4, 80001, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)])
    values = torch.tensor([-3.1, -1.2, -0.3, 0.0, 0.05, 0.44, 0.99, 1.01, 2.5], dtype=torch.float64)
    for v, soft, hard in zip(values, soft_threshold(values, t), hard_threshold(values, t), strict=True):
        bond = (grid - v).square() / 2
        assert float(grid[(t * grid.abs() + bond).argmin()]) == pytest.approx(float(soft), abs=2e-4)
        assert float(grid[(t * (grid != 0) + bond).argmin()]) == pytest.approx(float(hard), abs=2e-4)


@pytest.mark.parametrize("penalty", ["l1_split", "l0_split"])
def test_splitting_draws_scores_to_their_sparse_copy(penalty: str) -> None:
    search = started("darts1", penalty=penalty, split=0.5)
    before, sparse = fresh(search.alpha), [v.clone() for v in search.penalty.sparse]
    gradients = [torch.ones_like(a) for a in search.alpha]
    search.step_scores(gradients)
    threshold = soft_threshold if penalty == "l1_split" else hard_threshold
    for a, b, v, s in zip(search.alpha, before, search.penalty.sparse, sparse, strict=True):
        assert torch.allclose(a, b - 0.05 * (1 + 0.5 * (b - s)), atol=1e-12)
        assert torch.equal(v, threshold(a.detach(), 0.2 / 0.5))
    assert all(
        (search.importance()[n][v == 0] == 0).all() for n, v in zip(search.places, search.penalty.sparse, strict=True)
    )


def test_penalty_of_macs_weighs_each_dimension_with_its_cost() -> None:
    search = started("darts1", penalty="macs")
    cost = search.job.groups.cost
    each = []
    for i in range(len(cost.widths)):
        less = cost.widths.copy()
        less[i] -= 1
        each.append(int(cost.macs(cost.widths) - cost.macs(less)))
    prices = torch.tensor([float(p[0]) for p in search.penalty.prices], dtype=torch.float64)
    assert torch.allclose(prices / prices[0], torch.tensor(each, dtype=torch.float64) / each[0])
    assert float((prices * torch.as_tensor(cost.widths)).sum() / cost.widths.sum()) == pytest.approx(1)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("method", [*PAIRED, "rarts fused", "taylor"])
def test_planted_useless_channels_are_ranked_last(method: str, seed: int) -> None:
    model, data, useless = planted(False, seed)
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


def test_taylor_is_the_squared_change_of_the_loss_to_first_order() -> None:
    model = network()
    groups = compress.find_groups(model, pair()[0][0])
    cls = search_class("taylor")
    search: Any = cls(cls.Config.model_validate({"method": "taylor"}), Job(model, groups, Plain(), 2))
    before = [p.detach().clone() for p in model.parameters()]
    for batch in pair():
        search.step(batch)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    for name, values in search.importance().items():
        gate, eps = search.gates[name], 1e-6
        for i in range(0, len(values), 2):
            total = 0.0
            for batch in pair():
                sides = []
                for sign in (1, -1):
                    with torch.no_grad():
                        gate[i] += sign * eps
                        sides.append(float(Plain().loss(model(batch[0]), batch)))
                        gate[i] -= sign * eps
                total += ((sides[0] - sides[1]) / (2 * eps)) ** 2
            assert float(values[i]) == pytest.approx(total, rel=1e-4, abs=1e-10)


def test_primary_weights_are_swapped_in_and_out() -> None:
    search = started("rarts")
    w, u = fresh(search.weights), fresh(search.u)
    with search.primary():
        assert all(torch.equal(a, b) for a, b in zip(search.weights, u, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(search.weights, w, strict=True))
    apart = started("rarts", start="apart")
    assert all(not torch.equal(a, b) for a, b in zip(apart.u, apart.weights, strict=True))


@pytest.mark.parametrize("kind", [{"penalty": "l1_split", "gamma": 1e-3}, {}], ids=["split", "auto"])
@pytest.mark.parametrize("method", PAIRED)
def test_search_on_halves_resumes_to_the_same_bits(
    method: str, kind: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from digits import TIMING, dense, loaders
    from test_prune import same_weights
    from test_resume import Stop, Stopping

    from compress import engine as engine_module

    monkeypatch.setattr(engine_module, "SAVE_EVERY", -1.0)
    search = {"method": method, "epochs": "5 steps", **kind, "alpha": {"lr": 0.1, "optimizer": "adamw"}}
    recipe = {"budget": {"macs": "50%"}, "search": search, "timing": TIMING}
    train = loaders(count=512)[0]
    whole = compress.prune(dense(), recipe, train=Stopping(train, -1), quiet=True)
    with pytest.raises(Stop):
        compress.prune(dense(), recipe, train=Stopping(train, 8), workdir=tmp_path, quiet=True)
    again = compress.prune(dense(), recipe, train=Stopping(train, -1), workdir=tmp_path, resume=True, quiet=True)
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
