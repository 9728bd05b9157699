"""Gates are placed on the reading side; attaching and folding them leaves the outputs bit-identical."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compress
from cases import CASES, Net, build, distance, example, groups_of, random_keep, randomise_, run, same_bits, tensors_of
from cases import zero_scores_ as zero_
from compress import Plan
from compress.surgery.gates import attach_, fold_, scores_of
from helpers.chain_network import chain, images


def test_gate_in_front_of_a_norm_does_not_learn_and_ours_does() -> None:
    """Batch norm cancels any factor on its input, so the loss does not depend on it, up to the norm's eps."""
    model, x = chain().train(), images()
    for norm in (model[0][1], model[1][1]):
        norm.eps = 1e-12
    target = torch.randn(4, 5, generator=torch.Generator().manual_seed(6)).double()
    outside = torch.ones(6, dtype=torch.float64, requires_grad=True)
    handle = model[0][0].register_forward_hook(lambda m, inputs, output: output * outside.view(1, -1, 1, 1))
    F.mse_loss(model(x), target).backward()
    handle.remove()
    ours = attach_(model, compress.find_groups(model, x))["0.0"]
    F.mse_loss(model(x), target).backward()
    assert outside.grad is not None and ours.grad is not None
    assert float(outside.grad.abs().max()) < 1e-9
    assert float(ours.grad.abs().min()) > 1e-5


def test_gradient_of_a_score_is_the_derivative() -> None:
    model, x = chain().eval(), images()
    score = attach_(model, compress.find_groups(model, x))["0.0"]
    model(x).square().sum().backward()
    step, before = 1e-6, score.detach().clone()
    for i in range(len(score)):
        sides = []
        for sign in (1, -1):
            with torch.no_grad():
                score.copy_(before)[i] += sign * step
                sides.append(float(model(x).square().sum()))
        assert float(score.grad[i]) == pytest.approx((sides[0] - sides[1]) / (2 * step), rel=1e-5, abs=1e-7)


BETWEEN: dict[str, Callable[[], nn.Module]] = {
    "sigmoid": nn.Sigmoid,
    "hardswish behind a shift": lambda: nn.Sequential(nn.BatchNorm2d(6), nn.Hardswish()),
    "norm with bias": lambda: nn.BatchNorm2d(6),
    "depthwise with norm": lambda: nn.Sequential(nn.Conv2d(6, 6, 3, groups=6), nn.BatchNorm2d(6), nn.ReLU6()),
    "padding with a constant": lambda: nn.ConstantPad2d(2, 0.5),
}


@pytest.mark.parametrize("between", BETWEEN)
def test_zero_on_the_reading_side_removes_the_channel_and_on_the_writing_side_does_not(between: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), BETWEEN[between](), nn.Conv2d(6, 4, 3))
    model = randomise_(model.double()).eval()
    x = images()
    groups = compress.find_groups(model, x)
    plan = Plan.build(model, groups, {"0": [0, 2, 5]})
    sliced = run(plan.apply_(copy.deepcopy(model)), x)
    assert distance(run(plan.zero_(copy.deepcopy(model)), x), sliced) < 1e-12
    mask = torch.tensor([1.0, 0, 1, 0, 0, 1]).double().view(1, -1, 1, 1)
    model[0].register_forward_hook(lambda m, inputs, output: output * mask)
    assert distance(run(model, x), sliced) > 1e-2


def test_attaching_twice_is_an_error() -> None:
    model = chain().eval()
    groups = compress.find_groups(model, images())
    attach_(model, groups)
    with pytest.raises(ValueError, match=r"already has gates: call compress\.surgery\.fold_"):
        attach_(model, groups)


def test_fold_without_gates_changes_nothing() -> None:
    model, x = chain().eval(), images()
    before = run(model, x)
    assert same_bits(run(fold_(model), x), before)


def test_folded_model_can_be_attached_again() -> None:
    model, x = chain().eval(), images()
    groups = compress.find_groups(model, x)
    for _ in range(2):
        for score in attach_(model, groups).values():
            nn.init.uniform_(score, 0.5, 1.5)
        scored = run(model, x)
        assert same_bits(run(fold_(model), x), scored)
    assert scores_of(model) == {}


def test_frozen_weights_stay_frozen_and_their_scores_learn() -> None:
    model, x = chain().eval().requires_grad_(False), images()
    made = attach_(model, compress.find_groups(model, x))
    model(x).sum().backward()
    assert all(score.grad is not None and float(score.grad.abs().sum()) > 0 for score in made.values())
    assert [p.requires_grad for p in fold_(model).parameters()] == [False] * len(list(model.parameters()))


def test_tied_weights_share_one_gate_and_stay_tied() -> None:
    case = CASES["tied_weights"]
    model, x = build(case), example(case)
    made = attach_(model, groups_of(case.name))
    nn.init.uniform_(made["stem.0"], 0.5, 1.5)
    assert torch.equal(model.one[0].weight, model.two.weight)
    scored = run(model, x)
    assert same_bits(run(fold_(model), x), scored)
    assert model.one[0].weight is model.two.weight


def test_tied_module_keeps_the_order_of_its_own_parameters() -> None:
    class Reversed(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.bias, self.weight = nn.Parameter(torch.zeros(5)), weight

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight, self.bias)

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.first(x)
        return m.one(x) + m.two(torch.tanh(x))

    one = nn.Linear(6, 5)
    model = Net(forward, first=nn.Linear(4, 6), one=one, two=Reversed(one.weight)).double()
    before = list(model.state_dict())
    attach_(model, compress.find_groups(model, torch.randn(2, 4).double()))
    assert list(fold_(model).state_dict()) == before


def test_half_precision_weights_get_scores_in_single_precision() -> None:
    model, x = chain().eval().bfloat16(), images(dtype=torch.bfloat16)
    dense = run(model, x)
    made = attach_(model, compress.find_groups(model, x))
    assert made and all(score.dtype == torch.float32 for score in made.values())
    assert same_bits(run(model, x), dense)
    model(x).float().square().sum().backward()
    with torch.no_grad():
        for score in made.values():
            score -= 0.01 * score.grad
    scored = run(model, x)
    assert same_bits(run(fold_(model), x), scored)
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())


def test_scored_model_compiles() -> None:
    model, x = chain().eval(), images()
    for score in attach_(model, compress.find_groups(model, x)).values():
        nn.init.uniform_(score, 0.5, 1.5)
    expected = model(x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    assert distance([expected.detach()], [compiled.detach()]) < 1e-12
    gradients = []
    for output in (expected, compiled):
        model.zero_grad()
        output.square().sum().backward()
        gradients.append([score.grad.clone() for score in scores_of(model).values()])
    assert distance(*gradients) < 1e-10


def test_copy_has_scores_of_its_own_shared_by_all_its_gates() -> None:
    case = CASES["residual_stream"]
    model, x = build(case), example(case)
    made = attach_(model, groups_of(case.name))
    twin = copy.deepcopy(model)
    own = scores_of(twin)
    assert list(own) == list(made)
    assert all(own[name] is not made[name] for name in made)
    before = run(model, x)
    zero_(own, random_keep(groups_of(case.name), 0.5))
    assert same_bits(run(model, x), before)
    zero_(made, random_keep(groups_of(case.name), 0.5))
    assert same_bits(run(model, x), run(twin, x))
    ids = {id(p) for name, p in twin.named_parameters() if p.ndim == 1 and ".scores." in name}
    assert ids == {id(score) for score in own.values()}


def test_state_dict_of_a_gated_model_round_trips() -> None:
    case = CASES["residual_stream"]
    model, x = build(case), example(case)
    for score in attach_(model, groups_of(case.name)).values():
        nn.init.uniform_(score, 0.5, 1.5)
    other = build(case, seed=7)
    attach_(other, groups_of(case.name))
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    assert same_bits(run(other, x), run(model, x))


def test_scores_move_and_convert_with_the_model() -> None:
    model, x = chain().eval(), images(dtype=torch.float32)
    attach_(model, compress.find_groups(model, images()))
    model.float()
    assert all(score.dtype == torch.float32 for score in scores_of(model).values())
    assert run(model, x)[0].dtype == torch.float32


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Return the bytes that autograd saves for the backward pass, each storage once."""
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = sum(t.sum() for t in tensors_of(model(x)))
    del output
    return sum(kept.values())


@pytest.mark.parametrize("batch", [2, 16])
def test_memory_for_the_backward_pass_does_not_grow_with_activations(batch: int) -> None:
    case = CASES["residual_stream_with_projection"]
    model, x = build(case), example(case, batch=batch)
    plain = saved_bytes(model, x)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    attach_(model, groups_of(case.name))
    assert saved_bytes(model, x) - plain <= size  # the weights that carry scores, as they were
    assert plain > 4 * size or batch < 16  # activations are what counts here
