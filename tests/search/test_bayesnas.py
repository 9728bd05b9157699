"""BayesNAS as a search: planted truth, outer iterations, resuming, processes."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compress
from cases.families import Small
from compress.search.base import Job, search_class
from helpers.digits import TIMING, dense, loaders
from helpers.regression import RegressionTask, with_useless_features

SEARCH: dict[str, Any] = {"method": "bayesnas", "epochs": 8, "lr": 0.1, "alpha": {"lr": 0.1}, "samples": 64}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("how", "hessian"),
    [("entropy", "auto"), ("entropy", "empirical"), ("entropy", "paper"), ("budget", "auto"), ("pull", "auto")],
)
def test_planted_useless_channels_go(how: str, hessian: str, seed: int) -> None:
    model, data, useless = with_useless_features(False, seed)
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
    search: Any = cls(
        cls.Config.model_validate(settings), Job(model, groups, compress.Classification(), 48, steps_per_epoch=16)
    )
    for one in data * 3:
        search.step(one)
    switches = dict(zip(search.evidence.scores, search.evidence.switch_variance.tolist(), strict=True))
    found = search.importance()
    assert switches["up.1"] == 0
    assert min(switches["up.0"], switches["up.2"]) > 0.1
    assert not found["up.1"].any(), "a group may end with everything dropped"
    assert found["up.0"].any()
    assert found["up.2"].any()


@pytest.mark.parametrize("gamma", [1e-3, "auto"])
def test_search_resumes_to_the_same_bits(gamma: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from compress.training import engine as engine_module
    from helpers.interruption import Interrupted, InterruptedLoader
    from helpers.weights import same_weights

    monkeypatch.setattr(engine_module, "SAVE_INTERVAL", -1.0)
    search = {"method": "bayesnas", "epochs": "8 steps", "iterations": 2, "gamma": gamma, "samples": 8}
    recipe = {"budget": {"macs": "50%"}, "search": search, "timing": TIMING}
    train = loaders(count=512)[0]
    whole = compress.prune(dense(), recipe, train=InterruptedLoader(train, -1), quiet=True)
    with pytest.raises(Interrupted):
        compress.prune(dense(), recipe, train=InterruptedLoader(train, 6), workdir=tmp_path, quiet=True)
    again = compress.prune(
        dense(), recipe, train=InterruptedLoader(train, -1), workdir=tmp_path, resume=True, quiet=True
    )
    assert again.plan.keep == whole.plan.keep
    assert again.report.importance == whole.report.importance
    assert same_weights(again.model, whole.model)


@pytest.mark.parametrize("settings", [{"gamma": 1e-4, "penalty": "macs"}, {"gamma": "auto", "line": object()}])
def test_no_part_of_the_state_hides_another(settings: dict[str, Any]) -> None:
    search = started(**settings)
    parts = [search.regularizer.state(), search.evidence.state(), search.curvature.state()]
    saved = {id(tensor) for tensor in search.state().values()}
    assert all(id(tensor) in saved for part in parts for tensor in part.values())
    tables = (search.gradient_sums, search.score_sums, search.dropped, search.base_costs)
    assert all(id(tensor) in saved for table in tables for tensor in table.values())


def started(steps: int = 8, task: Any = None, line: Any = None, epoch: int | None = None, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    cls = search_class("bayesnas")
    config = cls.Config.model_validate({"method": "bayesnas", "epochs": f"{steps} steps", "gamma": 1e-4, **settings})
    groups = compress.find_groups(model, torch.randn(2, 6).double())
    return cls(
        config,
        Job(model.train(), groups, task or compress.Classification(), steps, schedule=line, steps_per_epoch=epoch),
    )


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


def test_half_of_a_group_stays_for_another_iteration_unless_its_importance_is_tiny() -> None:
    search = started(4)
    for gamma, worth in zip(search.evidence.gamma.values(), search.evidence.saliency.values(), strict=True):
        gamma.zero_()
        worth.copy_(torch.arange(len(worth)) + 1.0)
    units = {name: torch.tensor(10.0).double() for name in search.dropped}
    search._drop(units)
    assert search.dropped["0"].tolist() == [1, 1, 1, 0, 0]
    search._drop(units)
    assert search.dropped["0"].tolist() == [1, 1, 1, 1, 0]
    assert search.dropped["2"].tolist() == [1, 1, 1, 0]
    search.evidence.gamma["2"].fill_(1)
    search.evidence.saliency["0"].mul_(1e-2)
    search._drop(units)
    assert search.dropped["0"].tolist() == [1] * 5


def test_weights_of_the_penalty_follow_the_evidence() -> None:
    search = started(4, iterations=1, penalty="macs")
    base = [p.clone() for p in search.regularizer.costs]
    for step in range(4):
        search.step(batch(step))
    for price, old, omega in zip(search.regularizer.costs, base, search.evidence.omega.values(), strict=True):
        assert torch.equal(price, old * omega)


def test_negative_and_infinite_curvature_is_clamped_counted_and_noted() -> None:
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
    assert search.evidence.curvature["0"].tolist() == [0, 4, 4, 4, 0]
    assert all(torch.isfinite(v).all() for v in search.importance().values())
    assert search.evidence.clamped_counts.tolist() == [1, 2]
    assert "1 values were negative and taken as zero, 2 were not finite" in search.notes()[1]


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
    search = started(4, task=RegressionTask())
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
    search = started(len(seeds), task=RegressionTask(), line=lambda *_: {}, lr=1e-12, iterations=1, samples=100)
    search.iterations = replace(search.iterations, sampling_steps=len(seeds))
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
        ({"penalty": "l0_split", "gamma": 0.1}, "bayesnas re-weights the scores and steps by soft thresholding"),
    ],
)
def test_impossible_settings_are_named(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(compress.RecipeError, match=match):
        compress.Recipe.load({"budget": {"macs": 0.5}, "search": {"method": "bayesnas", "epochs": 1, **settings}})


def test_slopes_are_those_of_the_network_that_the_curvature_is_of() -> None:
    """In training mode the norm behind the scores divides by their common factor, so the slope of a switch is zero."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(5 * 16, 4)).double()
    x, y = torch.randn(16, 3, 8, 8).double(), torch.randn(16, 4).double()
    with torch.no_grad():
        model[3].running_mean.normal_()
        model[3].running_var.uniform_(0.1, 0.3)
    cls = search_class("bayesnas")
    settings = {"method": "bayesnas", "epochs": "2 steps", "iterations": 1, "gamma": 1e-4, "lr": 1e-12}
    groups = compress.find_groups(model, x)
    search: Any = cls(cls.Config.model_validate(settings), Job(model.train(), groups, RegressionTask(), 2))
    search.iterations = replace(search.iterations, sampling_steps=2)
    reference = copy.deepcopy(model).eval()
    search.step((x, y))
    slopes = search.gradient_sums["0"]
    training_slopes = search.score_gradients((x, y))[1][0]

    def loss_at(change: float, dimension: Any) -> float:
        scores = reference.get_parameter("2.parametrizations.weight.0.scores.0")
        with torch.no_grad():
            scores.fill_(1)
            scores[dimension] += change
            return float(RegressionTask().loss(reference(x), (x, y)))

    assert abs(float(training_slopes.sum())) < 1e-3 * abs(float(slopes.sum()))
    for dimension in [slice(None), 0, 3]:
        difference = (loss_at(1e-5, dimension) - loss_at(-1e-5, dimension)) / 2e-5
        assert float(slopes[dimension].sum()) == pytest.approx(difference, rel=1e-4)
