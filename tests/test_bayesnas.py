"""BayesNAS against the mathematics: each equation, sparse Bayesian regression, predecessors, planted truth."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from case import build, groups_of
from cases import CASES
from digits import TIMING, dense, loaders
from test_attention import Small
from test_netslim import Plain, planted
from torch import Tensor, nn

import compress
from compress import curvature
from compress.search import Job, search_class
from compress.search.evidence import THRESHOLD, Evidence, evidence, predecessors, sure, together


def grid(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_threshold_is_where_the_entropy_is_zero() -> None:
    assert math.log(2 * math.pi * math.e * THRESHOLD) / 2 == pytest.approx(0, abs=1e-12)
    assert round(THRESHOLD, 4) == 0.0585


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
                    got_omega, s = evidence(grid(w), grid(g), grid(h), grid(gamma))
                    assert float(got_omega) == pytest.approx(omega, rel=1e-12)
                    assert float(s) == pytest.approx(abs(best) / omega, abs=1e-3)


def test_what_the_data_do_not_bend_has_no_variance() -> None:
    omega, s = evidence(grid(1, 1), grid(0, 5), grid(0, 0), grid(1, 1))
    assert omega.tolist() == s.tolist() == [0, 0]


def test_iterated_evidence_is_sparse_bayesian_regression() -> None:
    """gamma = w'^2 - 1 / H where w'^2 H > 1, and zero elsewhere (Tipping 2001; Faul and Tipping 2002)."""
    w, h = (m.flatten() for m in torch.meshgrid(grid(0.05, 0.3, 1, 2), grid(0.1, 2, 30, 1e4), indexing="ij"))
    gamma = torch.ones_like(w)
    for _ in range(4000):
        _, gamma = evidence(w, torch.zeros_like(w), h, gamma)
    expected = (w.square() - 1 / h).clamp_min(0)
    assert torch.allclose(gamma, expected, atol=2e-4)
    variance = gamma / (1 + gamma * h)  # C of (17)
    mean = torch.where(gamma > 0, w - (h / (1 + gamma * h)).sqrt() / h, 0.0)
    live = expected > 0
    assert torch.allclose(gamma[live], (mean.square() + variance)[live], rtol=1e-3), "the EM fixed point"


def test_slope_counts_as_far_as_it_is_sure() -> None:
    assert torch.allclose(sure(grid(1, -1, 0.1, math.nan), grid(4, 4, 4, 4), 0.01), grid(0.6, -0.6, 0, 0))
    assert torch.equal(sure(grid(0.1), grid(4), 0.0), grid(0.1))


def test_variances_in_a_row_are_as_good_as_the_worst() -> None:
    assert torch.allclose(together(grid(2), grid(2, 0, math.inf)), grid(1, 0, 2))


def test_dependency_is_a_2_14_with_the_switch_of_8() -> None:
    scores = {name: nn.Parameter(torch.ones(2, dtype=torch.float64)) for name in ("a", "b")}
    known = Evidence(scores, {"a": [], "b": ["a"]})
    w = {name: grid(1, 1) for name in scores}
    g = {name: grid(0, 0) for name in scores}
    h, switches, units = {"a": grid(50, 2), "b": grid(30, 7)}, grid(90, 60), {"a": grid(1)[0], "b": grid(2)[0]}
    known.weigh_(w, g, h, 0.0)
    known.update_(w, g, switches, units, 0.0)
    one = grid(1, 1)
    s = {n: evidence(one, 0 * one, h[n] / units[n], one)[1] for n in scores}
    branch = {n: evidence(one[:1], 0 * one[:1], switches[i] / units[n], one[:1])[1] for i, n in enumerate(scores)}
    s_a = 1 / (1 / s["a"] + 1 / branch["a"])
    assert torch.allclose(known.gamma["a"], s_a)
    assert torch.allclose(known.gamma["b"], 1 / (1 / s_a.sum() + 1 / s["b"] + 1 / branch["b"]))
    known.weigh_(w, g, {"a": grid(0, 0), "b": h["b"]}, 0.0)
    known.update_(w, g, switches, units, 0.0)
    assert known.gamma["b"].tolist() == [0, 0], "a layer whose inputs are all off is off"


class Regression(Plain):
    """Gaussian noise of a known size; signs are draws of mean 0 and variance 1."""

    sigma = 0.5

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return (outputs - batch[1]).square().mean() / (2 * self.sigma**2)

    def draw(self, outputs: Any, batch: Any, temperature: float = 1.0) -> Tensor:
        sign = torch.randint_like(outputs, 2) * 2 - 1
        return (outputs * sign).mean() / self.sigma


def test_linear_gaussian_model_comes_to_the_fixed_point_of_the_equations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sparse Bayesian regression on orthogonal inputs: scores are the coefficients, and lambda is 1 / N."""
    monkeypatch.setattr(curvature, "CHUNK", 1)  # signs square to one: samples one by one are exact
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
    job = Job(model, compress.find_groups(model, x), Regression(), steps, line=lambda *_: {})
    search: Any = cls(cls.Config.model_validate(settings), job)
    for _ in range(steps):
        search.step((x, y))
    w, gamma = search.alpha[0].detach(), search.evidence.gamma["0"]
    branch = search.evidence.switch[0]
    h = count * torch.ones(8).double() / Regression.sigma**2
    omega = (h / (1 + gamma * h)).sqrt()
    live = gamma > THRESHOLD
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
    found = predecessors(model, groups)
    assert set(found) == {g.name for g in groups}
    assert any(found.values())
    weights = dict(model.named_parameters())
    for group, before in found.items():
        reading = {(s.tensor, s.dim): set() for g in groups for s in g.readers}
        for g in groups:
            for s in g.readers:
                reading[s.tensor, s.dim] |= {(g.name, i) for i in s.index.flatten().tolist()}
        for slot in groups[group].writers if before else ():
            weight = weights.get(slot.tensor)
            if weight is not None and weight.ndim > 1 and weight.shape[1] > 1:
                here = reading[slot.tensor, 1 - slot.dim]
                assert {i for n, i in here if n in before} == set(range(weight.shape[1 - slot.dim]))


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
    assert predecessors(model, groups) == {"a": [], "b": ["a"], "c": ["b"], "d": []}


SEARCH: dict[str, Any] = {"method": "bayesnas", "epochs": 8, "lr": 0.1, "alpha": {"lr": 0.1}, "samples": 64}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("how", "hessian"),
    [("entropy", "auto"), ("entropy", "empirical"), ("entropy", "paper"), ("budget", "auto"), ("pull", "auto")],
)
def test_planted_useless_channels_go(how: str, hessian: str, seed: int) -> None:
    model, data, useless = planted(False, seed)
    gamma: Any = "auto" if how == "pull" else 0.01
    budget: Any = "auto" if how == "entropy" else {"dims": "75%"}
    recipe = {"budget": budget, "search": SEARCH | {"gamma": gamma, "hessian": hessian}, "timing": {"repeats": 3}}
    pruned = compress.prune(model, recipe | {"seed": seed}, train=data, quiet=True)
    assert set(range(12)) - set(pruned.plan.keep["0"]) == useless


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("gamma", [1e-4, "auto"])
def test_planted_useless_dimensions_of_heads_and_mlps_come_last(gamma: Any, seed: int) -> None:
    """Labels come from a network in which two dimensions of every head and three hidden ones do nothing."""
    torch.manual_seed(seed)
    truth = Small()
    dead, idle = sorted(torch.randperm(6)[:2].tolist()), sorted(torch.randperm(10)[:3].tolist())
    with torch.no_grad():
        for p in truth.parameters():
            p.copy_(torch.randn_like(p) * (0.3 if p.ndim < 2 else 2.0 / p[0].numel() ** 0.5))
        rows = [part * 12 + head * 6 + d for part in range(3) for head in range(2) for d in dead]
        truth.qkv.weight[rows], truth.qkv.bias[rows] = 0, 0
        truth.proj.weight[:, [head * 6 + d for head in range(2) for d in dead]] = 0
        truth.fc1.bias[idle] = -30  # never above zero, with large weights all the same
        x = torch.randn(1024, 5, 12)
        y = truth(x).argmax(-1)
    data = list(zip(x.split(64), y.split(64), strict=True))
    model = copy.deepcopy(truth)
    with torch.no_grad():
        model.qkv.weight[rows] = 1e-3 * torch.randn(len(rows), 12)
    recipe = {
        "budget": {"dims": 11 / 16} if gamma == "auto" else "auto",
        "search": {"method": "bayesnas", "epochs": 4, "lr": 0.01, "gamma": gamma},
        "target": {"channels": False, "attention": True, "mlp": True},
        "timing": {"repeats": 3},
        "seed": seed,
    }
    keep = compress.prune(model, recipe, train=data, quiet=True).plan.keep
    assert sorted(set(range(6)) - set(keep["qkv"])) == dead
    assert sorted(set(range(10)) - set(keep["fc1"])) == idle


class Branches(nn.Module):
    """Three residual branches with one hidden layer each; labels come from the stream and from the first and last."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(8, 6) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(6, 8) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.relu(up(x)))
        return self.head(x)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_branch_that_does_nothing_for_the_loss_goes_as_a_whole(seed: int) -> None:
    """The second branch writes only where the head does not read, with weights as large as the others'.

    Weights are trained slowly, so that it stays so: the head could learn to read it.
    """
    torch.manual_seed(seed)
    model = Branches()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * (0.3 if p.ndim < 2 else 1.5 / p.shape[1] ** 0.5))
        model.head.weight[:, 6:] = 0
        model.up[2].weight[:, 6:] = 0
        model.down[1].weight[:6], model.down[1].bias[:6] = 0, 0
        model.head.weight.mul_(2)
        x = torch.randn(1024, 8)
        y = model(x).argmax(-1)
    data = list(zip(x.split(64), y.split(64), strict=True))
    cls = search_class("bayesnas")
    rates = {"lr": 0.001, "alpha": {"lr": 0.01}}
    settings = {"method": "bayesnas", "epochs": 3, **rates, "gamma": 1e-2, "samples": 64}
    groups = compress.find_groups(model, x[:4])
    search: Any = cls(cls.Config.model_validate(settings), Job(model, groups, compress.Classification(), 48, epoch=16))
    for one in data * 3:
        search.step(one)
    switches, found = search.switches(), search.importance()
    assert switches["up.1"] == 0
    assert min(switches["up.0"], switches["up.2"]) > 0.1
    assert not found["up.1"].any(), "a group may end with everything dropped"
    assert found["up.0"].any()
    assert found["up.2"].any()


@pytest.mark.parametrize("gamma", [1e-3, "auto"])
def test_search_resumes_to_the_same_bits(gamma: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from test_prune import same_weights
    from test_resume import Stop, Stopping

    from compress import engine as engine_module

    monkeypatch.setattr(engine_module, "SAVE_EVERY", -1.0)
    search = {"method": "bayesnas", "epochs": "8 steps", "iterations": 2, "gamma": gamma, "samples": 8}
    recipe = {"budget": {"macs": "50%"}, "search": search, "timing": TIMING}
    train = loaders(count=512)[0]
    whole = compress.prune(dense(), recipe, train=Stopping(train, -1), quiet=True)
    with pytest.raises(Stop):
        compress.prune(dense(), recipe, train=Stopping(train, 6), workdir=tmp_path, quiet=True)
    again = compress.prune(dense(), recipe, train=Stopping(train, -1), workdir=tmp_path, resume=True, quiet=True)
    assert again.plan.keep == whole.plan.keep
    assert again.report.importance == whole.report.importance
    assert same_weights(again.model, whole.model)


def started(steps: int = 8, task: Any = None, line: Any = None, epoch: int | None = None, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    cls = search_class("bayesnas")
    config = cls.Config.model_validate({"method": "bayesnas", "epochs": f"{steps} steps", "gamma": 1e-4, **settings})
    groups = compress.find_groups(model, torch.randn(2, 6).double())
    return cls(config, Job(model.train(), groups, task or compress.Classification(), steps, line=line, epoch=epoch))


def batch(seed: int = 1, size: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 6, generator=generator).double(), torch.randint(0, 3, (size,), generator=generator)


@pytest.mark.parametrize(
    ("given", "updates"),
    [({}, [12]), ({"epoch": 4}, [4, 8, 12]), ({"iterations": 2}, [6, 12]), ({"epoch": 24}, [12])],
)
def test_outer_iteration_ends_with_each_epoch(given: dict[str, Any], updates: list[int]) -> None:
    search, seen = started(12, line=lambda *_: {}, **given), []
    for step in range(1, 13):
        before = search.evidence.omega["0"].clone()
        search.step(batch(step))
        if not torch.equal(before, search.evidence.omega["0"]):
            seen.append(step)
            assert not search.curvature.count
    assert seen == updates


def test_samples_are_taken_at_the_end_of_an_iteration_and_are_so_many() -> None:
    search, seen = started(16, epoch=8, samples=10, line=lambda *_: {}), []
    for step in range(1, 17):
        search.step(batch(step))
        seen.append(int(search.curvature.count))
    assert seen == [0] * 6 + [5, 0] + [0] * 6 + [5, 0], "two of eight steps; the sums are cleared when they were used"


def test_half_of_a_group_stays_for_another_iteration_unless_it_is_worth_next_to_nothing() -> None:
    search = started(4)
    for gamma, worth in zip(search.evidence.gamma.values(), search.evidence.worth.values(), strict=True):
        gamma.zero_()
        worth.copy_(torch.arange(len(worth)) + 1.0)
    units = {name: torch.tensor(10.0).double() for name in search.dead}
    search._prune(units)
    assert search.dead["0"].tolist() == [1, 1, 1, 0, 0]
    search._prune(units)
    assert search.dead["0"].tolist() == [1, 1, 1, 1, 0]
    assert search.dead["2"].tolist() == [1, 1, 1, 0]
    search.evidence.gamma["2"].fill_(1)
    search.evidence.worth["0"].mul_(1e-2)
    search._prune(units)
    assert search.dead["0"].tolist() == [1] * 5


def test_weights_of_the_penalty_follow_the_evidence() -> None:
    search = started(4, iterations=1, penalty="macs")
    base = [p.clone() for p in search.penalty.prices]
    for step in range(4):
        search.step(batch(step))
    for price, old, omega in zip(search.penalty.prices, base, search.evidence.omega.values(), strict=True):
        assert torch.equal(price, old * omega)


def test_negative_and_infinite_curvature_is_clamped_counted_and_told() -> None:
    search = started(4, iterations=1, line=lambda *_: {})
    search.step(batch())

    def spoil(*_: Any) -> None:
        search.curvature.count.add_(1)
        search.curvature.sums["0"].copy_(torch.tensor([-1.0, torch.nan, torch.inf, 4.0, 0.0]))
        search.curvature.sums["2"].fill_(1)
        search.curvature.switches.fill_(1)

    search.curvature.add_ = spoil
    for step in range(3):
        search.step(batch(step))
    assert search.evidence.bent["0"].tolist() == [0, 4, 4, 4, 0]
    assert all(torch.isfinite(v).all() for v in search.importance().values())
    assert search.evidence.clamped.tolist() == [1, 2]
    assert "1 values were negative and taken as zero, 2 were no finite numbers" in search.notes()[1]


def test_intensity_that_leaves_nothing_is_refused_with_one_to_try() -> None:
    train, val = loaders(count=256)
    recipe = {"search": {"method": "bayesnas", "epochs": 1, "gamma": 1e6}, "budget": "auto", "timing": TIMING}
    with pytest.raises(
        ValueError, match=r"gamma: 1e\+06 leaves nothing: .* With gamma .* half of them would stay"
    ) as e:
        compress.prune(dense(), recipe, train=train, val=val, quiet=True)
    tried = float(str(e.value).split("With gamma ")[1].split()[0])
    recipe["search"] |= {"gamma": tried}  # type: ignore[operator]
    report = compress.prune(dense(), recipe, train=train, val=val, quiet=True).report
    kept = sum(row.kept for row in report.groups) / sum(row.width for row in report.groups)
    assert 0.2 < kept < 0.8
    assert "curvature of the scores: Gauss-Newton, by random signs" in report.notes


def test_task_without_draws_gets_the_empirical_fisher_and_says_so() -> None:
    search = started(4, task=Plain())
    for step in range(4):
        search.step((batch(step)[0], torch.randn(6, 3).double()))
    assert search.notes() == ["curvature of the scores: empirical Fisher"]


def _process(rank: int, port: int, queue: Any) -> None:
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    queue.put((rank, _evidence([rank])))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _evidence(seeds: list[int]) -> list[list[float]]:
    """gamma after one look at batches, on weights that stay where they are."""
    search = started(len(seeds), task=Plain(), line=lambda *_: {}, lr=1e-12, iterations=1, samples=100)
    search.closing = len(seeds)
    for seed in seeds:
        search.step((batch(seed)[0], torch.full((6, 3), 0.1).double()))
    return [gamma.tolist() for gamma in search.evidence.gamma.values()]


def test_processes_share_what_they_saw() -> None:
    """Two processes with a batch each end as one with both batches does."""
    import socket

    import torch.multiprocessing as multiprocessing

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    both = [context.Process(target=_process, args=(rank, port, queue)) for rank in range(2)]
    for process in both:
        process.start()
    found = dict(queue.get(timeout=120) for _ in both)
    for process in both:
        process.join()
    assert found[0] == found[1]
    alone = _evidence([0, 1])
    for a, b in zip(found[0], alone, strict=True):
        assert a == pytest.approx(b, rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"hessian": "exact"}, r"search\.hessian: expected one of auto, gauss_newton, empirical, paper; got 'exact'"),
        ({"samples": 0}, r"search\.samples: "),
        ({"iterations": 0}, r"search\.iterations: "),
        ({"penalty": "l0_split", "gamma": 0.1}, "bayesnas weighs each score anew and steps by soft thresholding"),
    ],
)
def test_impossible_settings_are_named(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(compress.RecipeError, match=match):
        compress.Recipe.load({"budget": {"macs": 0.5}, "search": {"method": "bayesnas", "epochs": 1, **settings}})
