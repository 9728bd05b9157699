"""Costs of scores: closed forms of the wiring paper, finite differences, and searches that they do not change."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compress
from compress.budget import Operations
from compress.cells.operations import DARTS_OPERATIONS, OPERATIONS, relu_conv_norm
from compress.graph import Groups
from compress.modules import Zero, choices_of
from compress.recipe import Timing
from compress.search import Job, search_class
from compress.search.netslim import Netslim
from compress.surgery.gates import Gate, register_transform_
from helpers.bilevel import TWO_BATCH_METHODS, as_leaves, batch_pair, gradient, loss_at, started_search
from helpers.choice_networks import conv_choices, images, started
from helpers.regression import RegressionTask

STILL = {"lr": 1e-12, "alpha": {"lr": 1e-12}}  # so that all passes of a step see the same weights


def start(cls: Any, model: nn.Module, x: Tensor, **settings: Any) -> Any:
    """Return a search with random scores and a number as gamma, on classification."""
    common = {"method": cls.Config.model_fields["method"].default, "epochs": "9 steps", "gamma": 1e-3}
    config = cls.Config.model_validate({**common, **STILL, **settings})
    groups = compress.find_groups(model.eval(), x)
    search = cls(config, Job(model.train(), groups, compress.Classification(), 9))
    with torch.no_grad():
        for a in search.alpha:
            a.copy_(torch.rand(a.shape, generator=torch.Generator().manual_seed(len(a))) + 0.5)
    return search


def data(classes: int = 5, count: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 3, 6, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, classes, (count,), generator=generator)


class WritingSide(Netslim):
    """Gates on the rows that write a group, as they must not stand."""

    def attach_scores(self) -> Any:
        positions = {}
        for group in self.job.groups:
            conv = self.job.model.get_submodule(group.name)
            score = nn.Parameter(torch.ones(group.width, dtype=torch.float64))
            gate = Gate(0, 4, [group.name], [score], torch.arange(1, group.width + 1))
            register_transform_(conv, "weight", gate)
            positions[group.name] = [(score, torch.arange(group.width)[:, None])]
        return positions


def normed_network(eps: float) -> nn.Module:
    """Two convolutions with batch norms; the first is read in front of a norm, the second by the classifier."""
    torch.manual_seed(0)
    parts = [nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6, eps), nn.ReLU(), nn.Conv2d(6, 8, 3, bias=False)]
    tail = [nn.BatchNorm2d(8, eps), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)]
    return nn.Sequential(*parts, *tail).double()


def test_theorem_1_gates_in_front_of_a_norm_have_no_cost_and_those_on_the_reading_side_have() -> None:
    x, y = data()
    for eps, bound in ((1e-12, 1e-9), (1e-5, 1e-3)):
        writing, reading = (start(cls, normed_network(eps), x, score="gate") for cls in (WritingSide, Netslim))
        for search in (writing, reading):
            search.step((x, y))
        behind, ours = (search.read_costs_()["all"] for search in (writing, reading))
        assert list(behind.costs) == list(ours.costs) == ["0", "3"]
        for name in ("0", "3"):  # each single dimension: pull is the sum of those above zero
            assert abs(behind.costs[name]) < bound and behind.pull[name] < bound
            assert ours.pull[name] > 0.01
        assert abs(ours.costs["0"]) < bound  # its reader is followed by a norm, which undoes a common factor
        assert abs(ours.costs["3"]) > 0.01  # the classifier reads it


def test_norms_that_use_running_statistics_leave_a_cost() -> None:
    x, y = data()
    search = start(Netslim, normed_network(1e-12), x, score="gate")
    search.job.model.eval()
    search.step((x, y))
    assert abs(search.read_costs_()["all"].costs["0"]) > 1e-4


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("targets", ["classes", "ignored", "probabilities"])
def test_theorem_2_what_the_classifier_reads_costs_loss_minus_entropy(bias: bool, targets: str) -> None:
    """L - H - mean (p - y) b, where the right side is computed without the code of the search."""
    x, y = data()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(108, 10), nn.ReLU(), nn.Linear(10, 5, bias=bias)).double()
    search = start(Netslim, model, x)
    target = y
    if targets == "ignored":
        target = torch.where(torch.arange(len(y)) % 3 == 0, -100, y)
    elif targets == "probabilities":
        target = torch.randn(len(y), 5, dtype=torch.float64).softmax(1)
    with torch.no_grad():
        logits = model(x)
    counted = torch.ones(len(y), dtype=torch.bool) if targets == "probabilities" else target >= 0
    z, kept = logits[counted], target[counted]
    loss, p = F.cross_entropy(z, kept), z.softmax(1)
    entropy = torch.distributions.Categorical(p).entropy().mean()
    rows = kept if targets == "probabilities" else F.one_hot(kept, 5).double()
    classifier: Any = model[3]
    of_bias = ((p - rows) @ classifier.bias.detach()).mean() if bias else torch.zeros(())
    search.step((x, target))
    sample = search.read_costs_()["all"]
    everyone = sample.samples["all"]
    assert everyone is not None
    assert everyone.loss == pytest.approx(float(loss), abs=1e-12)
    assert everyone.entropy == pytest.approx(float(entropy), abs=1e-12)
    assert sample.costs["1"] == pytest.approx(everyone.loss - everyone.entropy - float(of_bias), abs=1e-12)
    assert abs(sample.costs["1"]) > 1e-3
    truth = kept.argmax(1) if targets == "probabilities" else kept
    hits = z.argmax(1) == truth
    right, wrong = sample.samples["right"], sample.samples["wrong"]
    assert right is not None and wrong is not None and 0 < int(hits.sum()) < len(z)
    for part, of in ((right, hits), (wrong, ~hits)):
        assert part.share == pytest.approx(float(of.double().mean()), abs=1e-12)
        assert part.loss == pytest.approx(float(F.cross_entropy(z[of], kept[of])), abs=1e-12)
        assert part.entropy == pytest.approx(float(torch.special.entr(p[of]).sum(1).mean()), abs=1e-12)


def finite_difference(search: Any, weights: Any, index: int, batch: Any) -> float:
    """The derivative of the loss by a common factor of all scores of a group."""
    h, losses = 1e-5, []
    for sign in (1, -1):
        alpha = [a.detach() * (1 + sign * h * (i == index)) for i, a in enumerate(search.alpha)]
        losses.append(float(loss_at(search, [w.detach() for w in weights], alpha, batch)))
    return (losses[0] - losses[1]) / (2 * h)


def weights_of_half(search: Any, half: str, primary: Any) -> list[list[Tensor]]:
    """The weights at which a search differentiates the scores on a half; the second order of darts has two of them."""
    if search.config.method == "rarts" and half == "primary":
        return [search.u]
    if search.config.method != "darts2" or half == "primary":
        return [search.weights]
    leaves = as_leaves(search.weights)
    direction = gradient(loss_at(search, leaves, [a.detach() for a in search.alpha], primary), leaves)
    eps = 0.01 / float(torch.cat([d.flatten() for d in direction]).norm())
    return [[w.detach() + side * eps * d for w, d in zip(leaves, direction, strict=True)] for side in (1, -1)]


SETTINGS: list[dict[str, Any]] = [{"method": m} for m in ("netslim", *TWO_BATCH_METHODS)]
SETTINGS += [{"method": "rarts", "update": "fused", "lambda": 0.7}, {"method": "milenas", "lambda": 0.7}]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_cost_of_a_group_is_the_derivative_by_a_factor_on_all_its_scores_on_each_half(settings: Any) -> None:
    search = started_search(**settings, **STILL)
    primary, auxiliary = batch_pair()
    halves = {"auxiliary": auxiliary, "primary": primary} if search.batches_per_step == 2 else {"all": primary}
    expected = {}
    for half, batch in halves.items():
        points = weights_of_half(search, half, primary)
        expected[half] = [
            sum(finite_difference(search, weights, i, batch) for weights in points) / len(points)
            for i in range(len(search.alpha))
        ]
    search.step((primary, auxiliary) if len(halves) == 2 else primary)
    found = search.read_costs_()
    assert list(found) == list(halves)
    for half, costs in expected.items():
        assert list(found[half].costs.values()) == pytest.approx(costs, rel=1e-6, abs=1e-8)
        assert not found[half].samples  # of a regression nobody knows right and wrong
    assert search.read_costs_() == {}


def test_costs_are_means_over_the_steps_since_they_were_read() -> None:
    batches = batch_pair()
    apart, together = (started_search("netslim", **STILL) for _ in range(2))
    each = []
    for batch in batches:
        apart.step(batch)
        each.append(apart.read_costs_()["all"].costs)
        together.step(batch)
    means = {name: sum(costs[name] for costs in each) / 2 for name in each[0]}
    assert together.read_costs_()["all"].costs == pytest.approx(means, rel=1e-9)


def test_costs_of_batch_norm_scales_are_summed_at_their_positions() -> None:
    x, y = data()
    search, twin = start(Netslim, normed_network(1e-5), x), normed_network(1e-5).train()
    gammas: Any = [twin[1].weight, twin[4].weight]
    with torch.no_grad():
        for own, a in zip(gammas, search.alpha, strict=True):
            own.copy_(a)
    search.step((x, y))
    gradients = torch.autograd.grad(F.cross_entropy(twin(x), y), gammas)
    expected = [float((own.detach() * g).sum()) for own, g in zip(gammas, gradients, strict=True)]
    assert list(search.read_costs_()["all"].costs.values()) == pytest.approx(expected, rel=1e-9)


class MixedNetwork(nn.Module):
    """A stem, one choice, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.block = compress.Choice(conv=nn.Conv2d(4, 4, 3, padding=1), skip=nn.Identity(), none=Zero())
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.block(self.stem(x)).tanh().mean((2, 3)))
        return out


def operation_search(method: str, model: nn.Module, x: Tensor, **settings: Any) -> Any:
    target = {"operations": True}
    recipe = compress.Recipe.load({"target": target, "search": {"method": method, "epochs": 1, **STILL, **settings}})
    operations = Operations(model, x[:1], Timing(repeats=3))
    job = Job(model.train(), Groups.empty(), compress.Classification(), 10, operations=operations)
    return search_class(method, operations=True)(recipe.search, job)


@pytest.mark.parametrize("method", ["netslim", "darts1", "bayesnas"])
def test_cost_of_a_candidate_is_the_derivative_by_its_weight(method: str) -> None:
    x, y = data()
    torch.manual_seed(0)
    model = MixedNetwork().double()
    with torch.no_grad():
        model.block.scores.copy_(torch.tensor([0.3, -0.2, 0.1]))
    twin: Any = copy.deepcopy(model)

    def loss(p: Tensor) -> float:
        stem = twin.stem(x)
        mixture = p[0] * twin.block.candidates["conv"](stem) + p[1] * stem
        return float(F.cross_entropy(twin.head(mixture.tanh().mean((2, 3))), y))

    p, h = torch.ones(3).double() if method == "bayesnas" else twin.block.scores.detach().softmax(0), 1e-6
    search = operation_search(method, model, x, **({"samples": 12} if method == "bayesnas" else {}))
    with torch.no_grad():
        expected = [(loss(p + h * e) - loss(p - h * e)) / (2 * h) for e in torch.eye(3).double()]
    search.step(((x, y), (x, y)) if search.batches_per_step == 2 else (x, y))
    for sample in search.read_costs_().values():
        assert list(sample.candidates["block"].values()) == pytest.approx(expected, rel=1e-6, abs=1e-9)
        assert sample.candidates["block"]["none"] == 0
        assert sample.costs["block"] == pytest.approx(sum(w * c for w, c in zip(p.tolist(), expected, strict=True)))


def test_a_candidate_gains_weight_if_it_costs_less_than_its_choice() -> None:
    search = started("netslim", conv_choices(), alpha={"lr": 10, "optimizer": "sgd", "weight_decay": 0})
    before = {name: value.clone() for name, value in search.importance().items()}
    search.step(images()[0])
    sample = search.read_costs_()["all"]
    for name, p in search.importance().items():
        for k, cost in enumerate(sample.candidates[name].values()):
            assert (p[k] > before[name][k]) == (cost < sample.costs[name])


class MinimalCell(nn.Module):
    """Figure 7 of the paper: two inputs, two intermediate nodes, whose concatenation is the output."""

    def __init__(self, inputs: tuple[int, int], channels: int) -> None:
        super().__init__()
        self.reduce = nn.ModuleList([relu_conv_norm(size, channels, 1, affine=False) for size in inputs])
        self.edges = nn.ModuleList(
            [compress.Choice(**{name: self._operation(name, channels) for name in DARTS_OPERATIONS}) for _ in range(5)]
        )

    @staticmethod
    def _operation(name: str, channels: int) -> nn.Module:
        operation = OPERATIONS[name](channels, 1, False)
        return nn.Sequential(operation, nn.BatchNorm2d(channels, affine=False)) if "pool" in name else operation

    def forward(self, before: Tensor, last: Tensor) -> Tensor:
        a, b = self.reduce[0](before), self.reduce[1](last)
        second = self.edges[0](a) + self.edges[1](b)
        third = self.edges[2](a) + self.edges[3](b) + self.edges[4](second)
        return torch.cat([second, third], 1)


class Cells(nn.Module):
    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, bias=False), nn.BatchNorm2d(channels))
        sizes = [(channels, channels), (channels, 2 * channels), (2 * channels, 2 * channels)]
        self.cells = nn.ModuleList([MinimalCell(size, channels) for size in sizes])
        self.head = nn.Linear(2 * channels, 5, bias=False)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eps = 1e-12

    def forward(self, x: Tensor) -> Tensor:
        before = last = self.stem(x)
        for cell in self.cells:
            before, last = last, cell(before, last)
        out: Tensor = self.head(last.mean((2, 3)))
        return out


def test_costs_of_the_last_minimal_cell_sum_to_loss_minus_entropy_and_those_of_earlier_cells_to_zero() -> None:
    """The skip between the two nodes reaches the output on two ways, so its cost is subtracted once."""
    x, y = data()
    torch.manual_seed(0)
    model = Cells().double()
    with torch.no_grad():
        for choice in choices_of(model).values():
            choice.scores.normal_()
    weight = {path: choice.weights.tolist() for path, choice in choices_of(model).items()}
    search = operation_search("darts1", model, x)
    search.step(((x, y), (x.flip(-1), y)))
    skip = DARTS_OPERATIONS.index("skip_connect")
    for sample in search.read_costs_().values():
        sums = []
        for cell in range(3):
            edges = [f"cells.{cell}.edges.{edge}" for edge in range(5)]
            through_skip = weight[edges[4]][skip] * sample.candidates[edges[4]]["skip_connect"]
            sums.append(sum(sample.costs[edge] for edge in edges) - through_skip)
            assert max(abs(sample.costs[edge]) for edge in edges) > 1e-5
        everyone = sample.samples["all"]
        assert everyone is not None and abs(everyone.loss - everyone.entropy) > 1e-4
        assert sums == pytest.approx([0, 0, everyone.loss - everyone.entropy], abs=1e-9)


def costs_off_and_on(method: str, operations: bool) -> list[Any]:
    """Return searches without and with costs, after the same three steps."""
    searches = []
    for costs in (False, True):
        if operations:
            search = started(method, conv_choices(), costs=costs)
        else:
            torch.manual_seed(0)
            search = started_search(method, costs=costs)
        for n in range(3):
            pair = images()[n : n + 2] if operations else batch_pair()
            search.step(tuple(pair) if search.batches_per_step == 2 else pair[0])
        searches.append(search)
    return searches


@pytest.mark.parametrize("operations", [False, True])
@pytest.mark.parametrize("method", ["netslim", *TWO_BATCH_METHODS])
def test_recording_costs_changes_no_bit_of_a_search(method: str, operations: bool) -> None:
    off, on = costs_off_and_on(method, operations)
    assert off.read_costs_() == {} and on.read_costs_()
    assert not any("cost" in key for key in off.state())
    for ours, theirs in zip([*off.weights, *off.alpha], [*on.weights, *on.alpha], strict=True):
        assert torch.equal(ours, theirs)


def test_a_step_with_costs_adds_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    original = RegressionTask.forward
    monkeypatch.setattr(RegressionTask, "forward", lambda *args: passes.append(1) or original(*args))
    counts = []
    for costs in (False, True):
        search = started_search("darts1", costs=costs)
        passes.clear()
        search.step(batch_pair())
        counts.append(len(passes))
    assert counts[0] == counts[1]


def test_offsets_are_gone_after_the_search() -> None:
    recipe = {"target": {"operations": True}, "search": {"method": "darts1", "epochs": 1}, "timing": {"repeats": 3}}
    session = compress.search_session(conv_choices(), recipe, train=images(), steps=2)
    assert all(choice.offsets is not None for choice in choices_of(session.model).values())
    pruned = session.finish()
    assert not any("offsets" in name for name in pruned.model.state_dict())
