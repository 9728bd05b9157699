"""Gradients of scores without those of weights: the same function, the same gradient."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compress
from cases import CASES, Net, build, distance, example, groups_of, run, same_bits, tensors_of
from compress.search.score_training.score_gradients import score_only_backward
from compress.surgery.gates import attach_
from helpers.chain_network import chain, images


@pytest.mark.parametrize("name", CASES)
def test_function_and_gradients_are_the_same_on_the_whole_table(name: str) -> None:
    model, x = build(CASES[name]), example(CASES[name])
    made = attach_(model, groups_of(name))
    if not made:
        pytest.skip("nothing to score")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for score in made.values():
            score.copy_(torch.randn(score.shape, generator=generator))

    def at() -> tuple[list[Tensor], list[Tensor]]:
        outputs = tensors_of(model(x))
        total = torch.stack([o.square().sum() for o in outputs]).sum()
        found = torch.autograd.grad(total, list(made.values()), allow_unused=True)
        return outputs, [torch.zeros_like(s) if g is None else g for s, g in zip(made.values(), found, strict=True)]

    expected, gradients = at()
    known = {id(s) for s in made.values()}
    for p in model.parameters():
        p.requires_grad_(id(p) in known)
    with score_only_backward(model):
        got, here = at()
    assert distance([o.detach() for o in got], [o.detach() for o in expected]) < 1e-10
    for g, h in zip(gradients, here, strict=True):
        assert torch.allclose(g, h, rtol=1e-9, atol=1e-12)
    assert not any("forward" in vars(m) and isinstance(vars(m)["forward"], partial) for m in model.modules())
    assert same_bits(tensors_of(model(x)), expected)


def test_layers_are_restored_when_the_forward_pass_fails() -> None:
    model, x = chain(), images()
    attach_(model, compress.find_groups(model, x))
    for p in model.parameters():
        p.requires_grad_(False)
    expected = run(model, x)
    with pytest.raises(RuntimeError), score_only_backward(model):
        model(x[:, :2])
    assert same_bits(run(model, x), expected)


def test_weight_that_other_code_reads_keeps_its_gate() -> None:
    """One layer is called, and its weight is read by a function, too: both see the scores, once."""

    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        return self.second(h) + F.linear(h, self.second.weight)

    torch.manual_seed(0)
    model = Net(forward, first=nn.Linear(5, 6), second=nn.Linear(6, 3)).double()
    x = torch.randn(4, 5, dtype=torch.float64)
    made = attach_(model, compress.find_groups(model, x))
    with torch.no_grad():
        made["first"].copy_(torch.randn(6))
    for p in model.parameters():
        p.requires_grad_(p is made["first"])
    expected = run(model, x)
    with score_only_backward(model):
        assert distance(run(model, x), expected) < 1e-12


class Doubled(nn.Conv2d):
    """Its forward is torch's, and what that calls is not."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return 2 * super()._conv_forward(x, weight, bias)


class Bare(nn.Module):
    """A layer of one's own, without any bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 6))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


@pytest.mark.parametrize("kind", ["doubled", "bare", "vector", "image"])
def test_layers_of_other_kinds_are_left_as_they_are(kind: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), Bare() if kind == "bare" else nn.Linear(6, 3))
    x = torch.randn(4, 5, dtype=torch.float64)
    call: Any = lambda x: torch.stack([model(row) for row in x]) if kind == "vector" else model(x)  # noqa: E731
    if kind in ("doubled", "image"):
        last = Doubled(6, 3, 1) if kind == "doubled" else nn.Conv2d(6, 3, 1)
        model, x = nn.Sequential(nn.Conv2d(2, 6, 1), nn.ReLU(), last), torch.randn(4, 2, 5, 5, dtype=torch.float64)
        call = (lambda x: torch.stack([model(image) for image in x])) if kind == "image" else call
    made = attach_(model.double(), compress.find_groups(model, x))
    with torch.no_grad():
        made["0"].copy_(torch.randn(6))
    expected = call(x)
    (gradient,) = torch.autograd.grad(expected.square().sum(), [made["0"]])
    for p in model.parameters():
        p.requires_grad_(p is made["0"])
    with score_only_backward(model):
        found = call(x)
        (here,) = torch.autograd.grad(found.square().sum(), [made["0"]])
    assert torch.allclose(found, expected, atol=1e-12)
    assert torch.allclose(here, gradient, atol=1e-9)


def test_weights_that_are_trained_get_their_gradients_inside_as_well() -> None:
    model, x = chain(), images()
    attach_(model, compress.find_groups(model, x))
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()), allow_unused=True)
    with score_only_backward(model):
        found = torch.autograd.grad(model(x).square().sum(), list(model.parameters()), allow_unused=True)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True) if a is not None)


@pytest.mark.parametrize("kind", ["conv", "linear"])
def test_mixed_precision_gives_the_gradient_up_to_its_rounding(kind: str) -> None:
    torch.manual_seed(0)
    convolutions = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU())
    model = (
        nn.Sequential(convolutions, nn.Conv2d(8, 4, 1))
        if kind == "conv"
        else nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    )
    x = torch.randn(4, 3, 8, 8) if kind == "conv" else torch.randn(16, 6)
    made = list(attach_(model, compress.find_groups(model, x)).values())
    assert len(made) == 2
    exact = torch.autograd.grad(model(x).square().sum(), made)
    for p in model.parameters():
        p.requires_grad_(any(p is a for a in made))
    with score_only_backward(model), torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().square().sum()
    for a, b in zip(exact, torch.autograd.grad(loss, made), strict=True):
        assert b.dtype == torch.float32
        assert float((a - b).norm() / a.norm()) < 0.03


def test_nothing_is_stored_that_the_plain_layers_would_not_store() -> None:
    """Frozen weights, and activations once: less than what training holds."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(4)), nn.Conv2d(8, 2, 1)
    )
    x = torch.randn(2, 8, 16, 16)

    def stored() -> int:
        seen: dict[int, Tensor] = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.setdefault(t.data_ptr(), t), lambda t: t):
            model(x).sum()
        return sum(t.nbytes for t in seen.values() if t.ndim == 4 and t.shape[0] == 2)

    training = stored()
    made = attach_(model, compress.find_groups(model, x))
    for p in model.parameters():
        p.requires_grad_(any(p is a for a in made.values()))
    with score_only_backward(model):
        assert stored() <= training
