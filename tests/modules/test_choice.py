"""Choice: the mixture of its candidates, shared scores, and the cut to one candidate."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import compress
from compress.modules import Zero, choice_groups, choices_of, choose_, tie_shared_scores_
from helpers.choice_networks import conv_choices


def small_choice(shared: str | None = None) -> compress.Choice:
    return compress.Choice(a=nn.Linear(3, 3), b=nn.Identity(), shared=shared)


def test_mixture_is_the_softmax_weighted_sum_of_the_candidates() -> None:
    torch.manual_seed(0)
    choice = compress.Choice(a=nn.Linear(3, 4), none=Zero(), b=nn.Linear(3, 4)).double()
    with torch.no_grad():
        choice.scores.copy_(torch.tensor([0.3, 2.0, -1.0], dtype=torch.float64))
    x = torch.randn(5, 3, dtype=torch.float64)
    e = torch.tensor([0.3, 2.0, -1.0], dtype=torch.float64).exp()
    expected = (e[0] * choice.candidates["a"](x) + e[2] * choice.candidates["b"](x)) / e.sum()  # none adds nothing
    torch.testing.assert_close(choice(x), expected, rtol=1e-12, atol=1e-12)


def test_gradient_of_the_scores_is_that_of_finite_differences() -> None:
    torch.manual_seed(0)
    choice = compress.Choice(a=nn.Linear(3, 4), b=nn.Linear(3, 4), c=nn.Linear(3, 4)).double()
    x = torch.randn(5, 3, dtype=torch.float64)

    def loss(scores: Tensor) -> Tensor:
        out = torch.func.functional_call(choice, {"scores": scores}, (x,))
        return (out**3).sum()

    torch.autograd.gradcheck(loss, torch.randn(3, dtype=torch.float64, requires_grad=True))


def test_switch_multiplies_the_sum_of_freely_weighted_candidates() -> None:
    torch.manual_seed(0)
    choice = compress.Choice(a=nn.Linear(3, 4), b=nn.Linear(3, 4))
    choice.attach_switch_()
    x = torch.randn(5, 3)
    torch.testing.assert_close(choice(x), choice.candidates["a"](x) + choice.candidates["b"](x))
    assert choice.free_weights is not None and choice.switch is not None
    with torch.no_grad():
        choice.free_weights.copy_(torch.tensor([2.0, -1.0]))
        choice.switch.fill_(0.5)
    torch.testing.assert_close(choice(x), choice.candidates["a"](x) - 0.5 * choice.candidates["b"](x))
    choice.remove_switch_()
    assert [name for name, _ in choice.named_parameters(recurse=False)] == ["scores"]


def test_outputs_may_be_nested() -> None:
    class Pair(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, x: Tensor, *, bias: Tensor) -> dict[str, Tensor]:
            return {"out": self.factor * x + bias, "square": x * x}

    choice = compress.Choice(one=Pair(1.0), three=Pair(3.0))
    out = choice(torch.ones(2), bias=torch.ones(2))
    assert out["out"].tolist() == [3.0, 3.0]
    assert out["square"].tolist() == [1.0, 1.0]


def test_outputs_may_hold_none_but_no_numbers() -> None:
    class Returns(nn.Module):
        def __init__(self, second: object) -> None:
            super().__init__()
            self.second = second

        def forward(self, x: Tensor) -> tuple[Tensor, object]:
            return x, self.second

    one, nothing = compress.Choice(a=Returns(None), b=Returns(None))(torch.ones(2))
    assert one.tolist() == [1.0, 1.0] and nothing is None
    with pytest.raises(TypeError, match=r"Choice of a, b: expected tensors, or tuples.*; b returns a int"):
        compress.Choice(a=Returns(None), b=Returns(3))(torch.ones(2))
    with pytest.raises(
        ValueError, match=r"a returns a structure of \[\[2\], None\], b returns a structure of \[\[2\], \[1\]\]"
    ):
        compress.Choice(a=Returns(None), b=Returns(torch.ones(1)))(torch.ones(2))


def test_shared_scores_are_one_tensor_within_a_model_and_another_in_the_next() -> None:
    first, second = conv_choices(), conv_choices()
    assert first.first.scores is first.second.scores
    assert first.first.scores is not second.first.scores
    assert first.down.scores is not first.first.scores
    copied = copy.deepcopy(first)
    assert copied.first.scores is copied.second.scores
    assert copied.first.scores is not first.first.scores
    assert sum(p is first.first.scores for p in first.parameters()) == 1
    assert choice_groups(first) == {"blocks": ["first", "second"], "down": ["down"]}


def test_shared_scores_are_tied_however_the_choices_get_into_the_model() -> None:
    model = nn.Sequential(
        nn.ModuleList([small_choice("x")]), nn.ModuleDict({"inner": nn.Sequential(small_choice("x"))})
    )
    one, two = choices_of(model).values()
    assert one.scores is two.scores
    two.scores = nn.Parameter(torch.ones(2))  # e.g. by code that replaces parameters
    tie_shared_scores_(model)
    assert one.scores is two.scores


def test_choose_puts_the_candidate_in_the_place_of_the_choice_everywhere() -> None:
    choice = small_choice()
    layer = choice.candidates["a"]
    model = nn.ModuleDict({"a": choice, "again": choice, "other": nn.Sequential(small_choice())})
    choose_(model, {"a": "a", "other.0": "b"})
    assert model["a"] is layer and model["again"] is layer
    assert isinstance(model["other"][0], nn.Identity)  # type: ignore[index]
    assert not choices_of(model)
    assert set(model.state_dict()) == {"a.weight", "a.bias", "again.weight", "again.bias"}


def test_one_candidate_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Choice: expected two or more candidates.*got only 'conv'"):
        compress.Choice(conv=nn.Identity())
    with pytest.raises(ValueError, match="got none"):
        compress.Choice()


def test_candidates_must_be_modules_with_usable_names() -> None:
    with pytest.raises(TypeError, match=r"candidate b: expected a torch.nn.Module; got int"):
        compress.Choice(a=nn.Identity(), b=3)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"expected a name for each candidate, as Choice\(conv=.*; got 2 without a name"
    ):
        compress.Choice(nn.Identity(), nn.Identity())
    for name in ("", "conv.3"):
        with pytest.raises(ValueError, match=f"candidate '{name}': expected a name without dots"):
            compress.Choice(**{name: nn.Identity(), "skip": nn.Identity()})
    with pytest.raises(ValueError, match=r"'keys': torch.nn.ModuleDict has a method of that name"):
        compress.Choice(a=nn.Identity(), keys=nn.Identity())
    with pytest.raises(ValueError, match=r"shared: expected a name such as 'normal.0'; got ''"):
        compress.Choice(a=nn.Identity(), b=nn.Identity(), shared="")


def test_candidates_with_different_outputs_are_named_with_their_shapes() -> None:
    choice = compress.Choice(narrow=nn.Linear(3, 4), wide=nn.Linear(3, 5))
    with pytest.raises(
        ValueError, match=r"narrow returns \[2, 4\], wide returns \[2, 5\]. Give them the same channels"
    ):
        choice(torch.randn(2, 3))
    broadcastable = compress.Choice(full=nn.Identity(), pooled=nn.AdaptiveAvgPool2d(1))
    with pytest.raises(ValueError, match=r"full returns \[1, 2, 4, 4\], pooled returns \[1, 2, 1, 1\]"):
        broadcastable(torch.randn(1, 2, 4, 4))


def test_shared_names_with_different_candidates_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shared='x': expected the same candidates.*got a, b and a, c"):
        nn.Sequential(small_choice("x"), compress.Choice(a=nn.Linear(3, 3), c=nn.Identity(), shared="x"))


def test_zero_returns_zeros_in_the_strided_shape() -> None:
    x = torch.full((2, 3, 5, 4), torch.inf)
    assert Zero()(x).shape == x.shape
    out = Zero(stride=2)(x)
    assert out.shape == (2, 3, 3, 2)
    assert not out.any()
    only_zeros = compress.Choice(a=Zero(2), b=Zero(2))
    assert only_zeros(x).shape == (2, 3, 3, 2)
