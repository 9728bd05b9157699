"""Small networks with parts that must not be cut."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Net, case
from .networks_plain import cbr, head


@case(3, 8, 8, groups=2, refused="not known to act channel by channel")
def operator_nobody_knows() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.head(m.after(torch.fft.fft(m.before(x), dim=1).abs()))

    return Net(run, before=nn.Sequential(cbr(3, 7), cbr(7, 6)), after=cbr(6, 5), head=head(5))


@case(3, 8, 8, groups=1, refused="mixed by `cumsum`")
def running_sum_over_channels() -> nn.Module:
    return Net(lambda m, x: m.head(m.b(m.a(x).cumsum(1))), a=cbr(3, 6), b=cbr(6, 5), head=head(5))


@case(3, 8, 8, groups=1, refused="summed over by `mean`")
def mean_over_channels() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.a(x)
        return m.head(m.b(x * torch.sigmoid(m.spatial(x.mean(1, keepdim=True)))))

    return Net(run, a=cbr(3, 6), spatial=nn.Conv2d(1, 1, 3, padding=1), b=cbr(6, 5), head=head(5))


@case(3, 8, 8, groups=1, refused="convolved over")
def convolution_across_channels() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.a(x)
        weight = m.across(x.mean((2, 3)).unsqueeze(1)).transpose(1, 2).unsqueeze(-1)
        return m.head(m.b(x * torch.sigmoid(weight)))

    return Net(run, a=cbr(3, 6), across=nn.Conv1d(1, 1, 3, padding=1), b=cbr(6, 5), head=head(5))


@case(3, 8, 8, groups=1, refused="unequal pieces")
def split_in_unequal_pieces() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        a, b = m.stem(x).split([4, 3], 1)
        return m.last(m.one(a) + m.two(b))

    return Net(run, stem=cbr(3, 7), one=cbr(4, 6, 1), two=cbr(3, 6, 1), last=nn.Conv2d(6, 2, 1))


@case(3, 8, 8, groups=1, refused="fixed position")
def cut_at_a_fixed_position() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        return m.last(m.one(x[:, 2:]))

    return Net(run, stem=cbr(3, 7), one=cbr(5, 6, 1), last=nn.Conv2d(6, 2, 1))


@case(3, 8, 8, groups=1, refused="differ")
def scale_derived_from_the_width() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        return m.last(m.conv(x / math.sqrt(x.shape[1])))

    return Net(run, stem=cbr(3, 8), conv=cbr(8, 6), last=nn.Conv2d(6, 2, 1))


@case(3, 8, 8, groups=1, refused="does not run at another width")
def width_written_in_the_code() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        x = x.view(x.shape[0], 8, 64).transpose(1, 2).reshape(x.shape[0], 8, 8, 8).permute(0, 3, 1, 2)
        return m.last(m.conv(x))

    return Net(run, stem=cbr(3, 8), conv=cbr(8, 6), last=nn.Conv2d(6, 2, 1))


@case(3, 8, 8, groups=1, refused="computed, not stored|summed over")
def standardised_weights() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        weight = m.conv.weight
        weight = (weight - weight.mean((1, 2, 3), keepdim=True)) / weight.std((1, 2, 3), keepdim=True)
        return m.last(F.relu(F.conv2d(m.stem(x), weight, m.conv.bias)))

    return Net(run, stem=cbr(3, 6), conv=nn.Conv2d(6, 5, 3), last=nn.Conv2d(5, 2, 1))


@case(3, 8, 8, groups=1, refused="computed, not stored|not known|summed over|fixed size")
def weights_with_a_parametrization_of_their_own() -> nn.Module:
    normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(6, 5, 3))
    return nn.Sequential(cbr(3, 6), cbr(6, 6), normed, nn.ReLU(), nn.Conv2d(5, 2, 1))


@case(
    4, 12, groups=1, refused="not known to act|meets a tensor of fixed size|does not run at another width", flops=False
)
def recurrent_layer() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.second(torch.relu(m.first(x))).transpose(1, 2)
        return m.last(m.gru(x)[0][:, -1])

    parts = {"first": nn.Conv1d(4, 7, 3), "second": nn.Conv1d(7, 6, 3)}
    return Net(run, **parts, gru=nn.GRU(6, 5, batch_first=True), last=nn.Linear(5, 2))


@case(3, 8, 8, groups=1, refused="selected by index")
def picked_by_index() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.last(m.conv(torch.index_select(m.stem(x), 1, m.order)))

    net = Net(run, stem=cbr(3, 6), conv=cbr(6, 5), last=nn.Conv2d(5, 2, 1))
    net.register_buffer("order", torch.tensor([3, 1, 0, 2, 5, 4]))
    return net


@case(3, 8, 8, groups=1, refused="product of activations")
def attention_over_space() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x).flatten(2).transpose(1, 2)
        weights = torch.softmax(m.query(x).sigmoid() @ m.key(x).sigmoid().transpose(1, 2) / 2.0, -1)
        return m.last(weights @ m.value(x)).mean(1)

    return Net(
        run, stem=cbr(3, 6), query=nn.Linear(6, 4), key=nn.Linear(6, 4), value=nn.Linear(6, 5), last=nn.Linear(5, 3)
    )


class Deciding(nn.Module):
    """Which way the data go depends on the data; the parts themselves are plain."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(cbr(3, 6), cbr(6, 7), nn.Conv2d(7, 4, 1))
        self.high = nn.Sequential(nn.Conv2d(4, 6, 1), nn.ReLU(), nn.Conv2d(6, 2, 1))
        self.low = nn.Sequential(nn.Conv2d(4, 5, 1), nn.ReLU(), nn.Conv2d(5, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return self.high(x) if float(x.detach().abs().sum()) > 0 else self.low(x)


@case(3, 8, 8, groups=3)
def data_dependent_control_flow() -> nn.Module:
    return Deciding()
