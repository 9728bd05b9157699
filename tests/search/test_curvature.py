"""The curvature of the scores against the exact Gauss-Newton matrix, written out sample by sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compress
from compress.recipe import LogitDistillation
from compress.search.bayes import curvature as module
from compress.search.bayes.curvature import Curvature, CurvatureKind, first_samples
from compress.surgery.gates import attach_


def network() -> nn.Module:
    """A residual branch, a norm, and an MLP behind it."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.norm = nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6)
            self.a, self.b = nn.Conv2d(6, 5, 3, padding=1, stride=1), nn.Conv2d(5, 6, 1)
            self.fc, self.head = nn.Linear(6, 7), nn.Linear(7, 4)

        def forward(self, x: Tensor) -> Any:
            x = torch.tanh(self.norm(self.stem(x)))
            x = x + self.b(torch.tanh(self.a(x)))
            return self.head(torch.tanh(self.fc(x.mean((2, 3)))))

    torch.manual_seed(0)
    model = Net().double()
    with torch.no_grad():
        model.norm.running_mean.normal_()
        model.head.weight.mul_(3)
    return model


def batch(size: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 2, 6, 6, generator=generator).double(), torch.randint(0, 4, (size,), generator=generator)


def scored(kind: CurvatureKind = "auto") -> tuple[nn.Module, dict[str, nn.Parameter], Curvature]:
    model = network()
    groups = compress.find_groups(model, batch()[0], compress.recipe.Target(residual=True))
    scores = attach_(model, groups)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for a in scores.values():
            a.add_(0.3 * torch.randn(a.shape, generator=generator))
    return model.train(), scores, Curvature(model, groups, scores, kind)


def jacobian(model: nn.Module, scores: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """d logits / d scores: (sample, class, dimension) by group."""
    logits = model.eval()(batch()[0])
    found: dict[str, Tensor] = {name: torch.zeros(*logits.shape, len(a)).double() for name, a in scores.items()}
    for n in range(logits.shape[0]):
        for k in range(logits.shape[1]):
            gradients = torch.autograd.grad(logits[n, k], list(scores.values()), retain_graph=True)
            for name, g in zip(scores, gradients, strict=True):
                found[name][n, k] = g
    model.train()
    return found


def bend(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """d2 cross entropy / d logits^2, by sample."""
    p = (logits.detach() / temperature).softmax(-1)
    return (torch.diag_embed(p) - p[:, :, None] * p[:, None]) / temperature**2


def exact(model: nn.Module, scores: dict[str, nn.Parameter], lam: Tensor) -> dict[str, Tensor]:
    """The mean over samples of J^T L J, by group."""
    return {name: torch.einsum("nki,nkl,nlj->ij", j, lam, j) / len(j) for name, j in jacobian(model, scores).items()}


class Each(compress.Classification):
    """A column of a root of the second derivative in each turn: the sum over turns is the mean over draws."""

    turn = 0

    def draw(self, outputs: Any, batch: Any, temperature: float = 1.0) -> Tensor:
        logits = outputs / temperature
        p = logits.detach().softmax(-1)[:, self.turn]
        return (p.sqrt() * F.cross_entropy(logits, torch.full((len(logits),), self.turn), reduction="none")).mean()


@pytest.fixture(autouse=True)
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns, unlike draws, do not keep samples apart."""
    monkeypatch.setattr(module, "SAMPLES_PER_PASS", 1)


def test_mean_over_all_draws_is_the_gauss_newton_diagonal() -> None:
    model, scores, curvature = scored()
    task = Each()
    for task.turn in range(4):
        curvature.add_(task, batch(), 5)
    curvature.count.div_(4)
    found, switches = curvature.mean()
    matrices = exact(model, scores, bend(model.eval()(batch()[0])))
    assert len(matrices) == 3
    for i, (name, matrix) in enumerate(matrices.items()):
        assert torch.allclose(found[name], matrix.diagonal(), rtol=1e-9, atol=1e-14)
        a = scores[name].detach()
        assert float(switches[i]) == pytest.approx(float(a @ matrix @ a), rel=1e-9), "a factor common to all scores"


def test_exact_diagonal_is_that_of_curvlinops() -> None:
    """The oracle above against somebody else's code."""
    curvlinops = pytest.importorskip("curvlinops")
    model = network()
    biases = {name: layer.bias for name, layer in (("a", model.a), ("fc", model.fc))}
    ours = exact(model, biases, bend(model.eval()(batch()[0])))
    model.eval()
    for name, bias in biases.items():
        operator = curvlinops.GGNLinearOperator(model, nn.CrossEntropyLoss(), [bias], [batch()])
        assert torch.allclose(operator @ torch.eye(len(bias)).double(), ours[name], rtol=1e-8), name


@pytest.mark.parametrize("size", [1, 3])
def test_draws_of_a_classification_average_to_it(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLES_PER_PASS", size)
    model, scores, curvature = scored()
    torch.manual_seed(3)
    for _ in range(100):
        curvature.add_(compress.Classification(), batch(), 5)
    found, _ = curvature.mean()
    matrices = exact(model, scores, bend(model.eval()(batch()[0])))
    got, wanted = (torch.cat(list(v)) for v in (found.values(), [m.diagonal() for m in matrices.values()]))
    assert float(((got - wanted) / wanted).abs().mean()) < 0.15
    assert float(got.sum() / wanted.sum()) == pytest.approx(1, abs=0.1)


def test_draws_at_a_temperature_are_the_curvature_of_the_distillation() -> None:
    """KL from any teacher, written out and differentiated twice."""
    torch.manual_seed(0)
    logits, teacher = torch.randn(2, 1, 4).double()

    def divergence(z: Tensor) -> Tensor:
        return compress.distillation(z, teacher, 3.0)

    hessian = torch.autograd.functional.hessian(divergence, logits)[0, :, 0]
    assert torch.allclose(hessian, bend(logits, 3.0)[0], atol=1e-12)
    total = torch.zeros(4, 4).double()
    task = Each()
    z = logits.clone().requires_grad_()
    for task.turn in range(4):
        (g,) = torch.autograd.grad(task.draw(z, (z, torch.zeros(1).long()), 3.0), z)
        total += g.T @ g
    assert torch.allclose(total, hessian, atol=1e-12)


def test_empirical_fisher_is_the_mean_of_squared_gradients_and_needs_a_loss_alone() -> None:
    class Bare(compress.Classification):
        draw = compress.Task.draw  # type: ignore[assignment]  # the default: none

    model, scores, curvature = scored("empirical")
    _, _, fallback = (None, None, Curvature(model, curvature_groups(model), scores, "auto"))
    task = Bare()
    assert not task.can_draw
    for one in (curvature, fallback):
        one.add_(task, batch(), 5)
    model.eval()
    for name, a in scores.items():
        squares = torch.zeros_like(a)
        for x, y in zip(*batch(), strict=True):
            squares += torch.autograd.grad(F.cross_entropy(model(x[None]), y[None]), a)[0].square()
        for one in (curvature, fallback):
            assert torch.allclose(one.mean()[0][name], squares / 5, rtol=1e-9)


def curvature_groups(model: nn.Module) -> Any:
    return compress.find_groups(network(), batch()[0], compress.recipe.Target(residual=True))


def test_distillation_is_part_of_the_empirical_loss() -> None:
    model, scores, curvature = scored("empirical")
    taught = {"z": torch.randn(1, 4).double()}
    curvature.add_(
        compress.Classification(), batch(), 1, LogitDistillation(temperature=2.0, weight=0.5), lambda b: taught["z"]
    )
    x, y = (part[:1] for part in batch())
    out = model.eval()(x)
    loss = F.cross_entropy(out, y) + 0.5 * compress.distillation(out, taught["z"], 2.0)
    for name, a in scores.items():
        assert torch.allclose(curvature.sums[name], torch.autograd.grad(loss, a, retain_graph=True)[0].square())


def test_papers_estimate_is_c_3_2() -> None:
    """(E |x_i|)^2 times the sum over outputs and places of W^2 h, loop by loop, on the layer that reads the branch."""
    model, _scores, curvature = scored("paper")
    task = Each()
    for task.turn in range(4):
        curvature.add_(task, batch(), 5)
    curvature.count.div_(4)
    inputs, outputs = {}, {}

    def keep(layer: nn.Module, read: Any, wrote: Tensor) -> None:
        name = "b" if layer is model.b else "head"
        inputs[name], outputs[name] = read[0], wrote

    hooks = [layer.register_forward_hook(keep) for layer in (model.b, model.head)]
    expected = {"a": torch.zeros(5).double(), "fc": torch.zeros(7).double()}
    for x, _ in zip(*batch(), strict=True):
        logits = model.eval()(x[None])
        p = logits.detach().softmax(-1)[0]
        for k in range(4):
            loss = p[k].sqrt() * F.cross_entropy(logits, torch.tensor([k]))
            for n, group in (("b", "a"), ("head", "fc")):
                (g,) = torch.autograd.grad(loss, outputs[n], retain_graph=True)
                weight = getattr(model, n).parametrizations.weight.original.detach()
                for i in range(len(expected[group])):
                    size = inputs[n][0, i].abs().mean() if n == "b" else inputs[n][0, i].abs()
                    for o in range(weight.shape[0]):
                        h = g[0, o].square().sum()
                        expected[group][i] += float((size**2 * weight[o, i].square().sum() * h).detach()) / 5
    for hook in hooks:
        hook.remove()
    found = curvature.mean()[0]
    for group, value in expected.items():
        assert torch.allclose(found[group], value, rtol=1e-9)


def test_papers_estimate_ranks_much_as_the_exact_diagonal_does() -> None:
    model, scores, curvature = scored("paper")
    task = Each()
    for task.turn in range(4):
        curvature.add_(task, batch(), 5)
    curvature.count.div_(4)
    matrices = exact(model, scores, bend(model.eval()(batch()[0])))
    got, wanted = (
        torch.cat(list(v)) for v in (curvature.mean()[0].values(), [m.diagonal() for m in matrices.values()])
    )
    ranks = torch.stack([v.argsort().argsort().double() for v in (got, wanted)])
    assert float(torch.corrcoef(ranks)[0, 1]) > 0.7


def test_model_is_left_as_it_was() -> None:
    model, _scores, curvature = scored()
    flags = [m.training for m in model.modules()]
    wanted = [p.requires_grad for p in model.parameters()]
    before = {k: v.clone() for k, v in model.state_dict().items()}
    torch.manual_seed(0)
    curvature.add_(compress.Classification(), batch(), 2)
    assert [m.training for m in model.modules()] == flags
    assert [p.requires_grad for p in model.parameters()] == wanted
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert float(curvature.count) == 2


def test_signs_of_a_classification_have_the_covariance_of_cross_entropy() -> None:
    """All signs in their turn are all draws."""
    z = torch.tensor([[0.3, -1.0, 2.0]], dtype=torch.float64, requires_grad=True)
    task, seen = compress.Classification(), {}
    torch.manual_seed(0)
    while len(seen) < 8:  # a draw is known by its gradient
        (v,) = torch.autograd.grad(task.draw(z, (z, torch.zeros(1).long())), z)
        seen[tuple(v[0].mul(1e9).round().tolist())] = v
    total = torch.stack([v[0] for v in seen.values()])
    assert torch.allclose(total.mean(0), torch.zeros(3).double(), atol=1e-12)
    assert torch.allclose(total.T @ total / 8, bend(z)[0], atol=1e-12)


def test_ignored_targets_bend_nothing() -> None:
    z = torch.randn(2, 3, requires_grad=True)
    (g,) = torch.autograd.grad(compress.Classification().draw(z, (z, torch.tensor([-100, 1]))), z)
    assert not g[0].any()
    assert g[1].any()


def test_batch_falls_into_samples_where_all_tensors_have_as_many() -> None:
    x, y = torch.randn(4, 3), torch.arange(4)
    assert [(p[1].tolist(), n) for p, n in first_samples((x, y), 3)] == [([0], 1), ([1], 1), ([2], 1)]
    assert [(p["y"].tolist(), n) for p, n in first_samples({"x": x, "y": y}, None, 3)] == [([0, 1, 2], 3), ([3], 1)]
    for whole in ((x, 3), (x, y[:2]), [torch.tensor(1.0)], "text"):
        ((same, count),) = first_samples(whole, 2)
        assert same is whole
        assert count == 1
