"""Random directions: as long as the weights filter by filter, zero on norms and biases, sliced as weights are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import compress
from cases import Net
from compress.diagnostics.directions import draw_direction, slice_direction
from compress.modules import Choice


def drawn(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    return draw_direction(model, torch.Generator().manual_seed(seed))


def test_each_filter_is_as_long_as_that_of_the_weights() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.Conv1d(6, 4, 2, groups=2), nn.Linear(7, 6), nn.Embedding(4, 3)
    ).double()
    direction = drawn(model)
    for name in ("0.weight", "1.weight", "2.weight", "3.weight"):
        weight = model.get_parameter(name).detach()
        for filter_, noise in zip(weight, direction[name], strict=True):
            assert float(noise.norm()) == pytest.approx(float(filter_.norm()), rel=1e-12)
            assert abs(float(torch.dot(filter_.flatten(), noise.flatten()))) < 0.99 * float(filter_.norm()) ** 2


def test_filters_of_transposed_convolutions_lie_along_their_second_dimension() -> None:
    torch.manual_seed(0)
    layer = nn.ConvTranspose2d(4, 6, 3, groups=2).double()  # weight: 4 x 3 x 3 x 3
    noise = drawn(layer)["weight"]
    for group in range(2):
        for channel in range(3):
            of_filter = [t[2 * group : 2 * group + 2, channel].detach().norm() for t in (layer.weight, noise)]
            assert float(of_filter[0]) == pytest.approx(float(of_filter[1]), rel=1e-12)


def test_norms_biases_and_scales_per_channel_do_not_move() -> None:
    class ResponseNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.ones(1, 1, 4))

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(1, 4, 1, 1))
            self.token = nn.Parameter(torch.ones(1, 2, 4))

    model = Net(
        lambda m, x: x,
        conv=nn.Conv2d(3, 4, 1),
        norm=nn.LayerNorm([4, 8, 8]),
        batch_norm=nn.BatchNorm2d(4),
        response=ResponseNorm(),
        scale=Scale(),
        one=nn.Linear(5, 1),
    )
    moving = {name for name, tensor in drawn(model).items() if tensor.any()}
    assert moving == {"conv.weight", "scale.token", "one.weight"}


def test_noise_is_gaussian_in_direction_and_another_for_another_seed() -> None:
    """The mean of many unit vectors is near 0, and their covariance near the identity over the dimension."""
    layer = nn.Linear(4, 20000, bias=False).double()
    noise = drawn(layer)["weight"] / layer.weight.detach().norm(dim=1, keepdim=True)
    assert float(noise.mean(0).abs().max()) < 0.02
    assert torch.allclose(noise.T @ noise / len(noise), torch.eye(4).double() / 4, atol=0.01)
    assert torch.equal(drawn(layer)["weight"], drawn(layer)["weight"])
    assert not torch.allclose(drawn(layer, 1)["weight"], drawn(layer)["weight"])


def test_tied_weights_have_one_direction_and_zero_filters_stay() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    with torch.no_grad():
        first.weight[2] = 0
    direction = drawn(nn.Sequential(first, second))
    assert set(direction) == {"0.weight", "0.bias", "1.bias"}
    assert not direction["0.weight"][2].any() and direction["0.weight"][3].any()


def test_a_plan_slices_directions_as_weights() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    plan = compress.Plan.build(model, compress.find_groups(model, torch.randn(2, 5)), {"0": [1, 4, 6]})
    direction = drawn(model)
    sliced = slice_direction(model, plan, direction)
    assert torch.equal(sliced["0.weight"], direction["0.weight"][[1, 4, 6]])
    assert torch.equal(sliced["2.weight"], direction["2.weight"][:, [1, 4, 6]])
    assert sliced["0.bias"].tolist() == [0, 0, 0]
    assert model[0].weight.shape == (8, 5)


def test_directions_follow_the_choice_of_operations() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Choice(narrow=nn.Linear(4, 4), other=nn.Linear(4, 4)), nn.Linear(4, 2))
    plan = compress.Plan({}, {}, choices={"0": "other"})
    direction = drawn(model)
    sliced = slice_direction(model, plan, direction)
    compact = plan.apply_(nn.Sequential(Choice(narrow=nn.Linear(4, 4), other=nn.Linear(4, 4)), nn.Linear(4, 2)))
    assert {name: tensor.shape for name, tensor in sliced.items()} == {
        n: p.shape for n, p in compact.named_parameters()
    }
    assert torch.equal(sliced["1.weight"], direction["1.weight"])
    of_candidate = next(d for name, d in direction.items() if "other" in name and d.ndim == 2)
    assert torch.equal(sliced["0.weight"], of_candidate)
