"""Small networks of the usual kinds: chains, streams, groups, branches."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Net, case


def cbr(inside: int, outside: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Convolution, batch norm, ReLU."""
    conv = nn.Conv2d(inside, outside, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outside), nn.ReLU(inplace=True))


def head(width: int, classes: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


@case(3, 8, 8, groups=3)
def chain() -> nn.Module:
    return nn.Sequential(cbr(3, 8), cbr(8, 6), nn.MaxPool2d(2), cbr(6, 7), head(7))


@case(3, 8, 8, groups=2)
def convolutions_with_bias() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 7, 3, bias=True), nn.ReLU(), nn.Conv2d(7, 4, 1))


@case(3, 8, 8, groups=1)
def activations_that_do_not_keep_zero() -> nn.Module:
    inner = [nn.Sigmoid(), nn.ZeroPad2d(1), nn.Hardswish(), nn.ConstantPad2d(1, 0.7), nn.Softplus()]
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), *inner, nn.Conv2d(8, 4, 3, padding=1))


@case(3, 8, 8, groups=1)
def padding_by_reflection() -> nn.Module:
    first = nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect")
    return nn.Sequential(first, nn.GELU(), nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect"))


@case(3, 8, 8, groups=1)
def padding_by_repetition() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReplicationPad2d(2), nn.Conv2d(6, 4, 3))


@case(3, 8, 8, groups=0, refused="meets a tensor of fixed size")
def padding_in_a_circle() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.SELU(), nn.Conv2d(6, 4, 3, padding=1, padding_mode="circular"))


class Block(nn.Module):
    """A basic residual block, with a projection where the shape changes."""

    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        project = inside != outside or stride > 1
        self.short = nn.Sequential(nn.Conv2d(inside, outside, 1, stride), nn.BatchNorm2d(outside)) if project else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        out += x if self.short is None else self.short(x)
        return F.relu(out)


@case(3, 8, 8, groups=3)
def residual_stream() -> nn.Module:
    return nn.Sequential(cbr(3, 6), Block(6, 6), Block(6, 6), head(6))


@case(3, 8, 8, groups=4)
def residual_stream_with_projection() -> nn.Module:
    return nn.Sequential(cbr(3, 6), Block(6, 6), Block(6, 8, 2), head(8))


class PreActivation(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(width), nn.Conv2d(width, width + 2, 3, padding=1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(width + 2), nn.Conv2d(width + 2, width, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.bn2(self.conv1(F.relu(self.bn1(x))))))


@case(3, 8, 8, groups=3)
def pre_activation() -> nn.Module:
    stem = nn.Conv2d(3, 6, 3, padding=1)
    return nn.Sequential(stem, PreActivation(6), PreActivation(6), nn.BatchNorm2d(6), nn.ReLU(), head(6))


@case(3, 8, 8, groups=3)
def depthwise_separable() -> nn.Module:
    def step(inside: int, outside: int, stride: int) -> list[nn.Module]:
        depth = nn.Conv2d(inside, inside, 3, stride, 1, groups=inside, bias=False)
        return [
            *[depth, nn.BatchNorm2d(inside), nn.ReLU6()],
            *[nn.Conv2d(inside, outside, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU6()],
        ]

    return nn.Sequential(cbr(3, 6), *step(6, 8, 1), *step(8, 10, 2), head(10))


@case(3, 8, 8, groups=2)
def depthwise_with_multiplier() -> nn.Module:
    depth = nn.Conv2d(5, 15, 3, padding=1, groups=5)
    return nn.Sequential(cbr(3, 5), depth, nn.BatchNorm2d(15), nn.Hardswish(), nn.Conv2d(15, 4, 1), nn.Conv2d(4, 2, 1))


@case(3, 8, 8, groups=2)
def many_small_groups() -> nn.Module:
    return nn.Sequential(cbr(3, 16), cbr(16, 16, groups=8), cbr(16, 6, 1), head(6))


@case(3, 8, 8, groups=3)
def few_large_groups() -> nn.Module:
    return nn.Sequential(cbr(3, 12), cbr(12, 16, groups=2), cbr(16, 6, 1), head(6))


@case(3, 8, 8, groups=2)
def grouped_in_a_residual_block() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        return m.head(x + m.expand(m.grouped(m.reduce(x))))

    parts = {"stem": cbr(3, 6), "reduce": cbr(6, 12, 1), "grouped": cbr(12, 12, groups=4), "expand": cbr(12, 6, 1)}
    return Net(run, **parts, head=head(6))


class Dense(nn.Module):
    """A layer whose output joins its input."""

    def __init__(self, inside: int, growth: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(inside), nn.Conv2d(inside, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(F.relu(self.norm(x)))], 1)


@case(3, 8, 8, groups=5)
def dense_connections() -> nn.Module:
    last = [nn.BatchNorm2d(18), nn.ReLU(), nn.Conv2d(18, 6, 1), nn.AvgPool2d(2)]
    return nn.Sequential(cbr(3, 6), Dense(6, 4), Dense(10, 4), Dense(14, 4), *last, head(6))


@case(3, 8, 8, groups=5)
def branches_side_by_side() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        pooled = F.max_pool2d(x, 3, 1, 1)
        return m.head(torch.cat([m.a(x), m.b(x), m.c(pooled)], 1))

    b = nn.Sequential(cbr(6, 5, 1), cbr(5, 6))
    return Net(run, stem=cbr(3, 6), a=cbr(6, 4, 1), b=b, c=cbr(6, 3, 1), head=head(13))


@case(3, 8, 8, groups=4)
def skip_by_concatenation() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        high = m.down1(x)
        low = m.down2(F.max_pool2d(high, 2))
        return m.last(m.merge(torch.cat([m.up(low), high], 1)))

    up = nn.ConvTranspose2d(8, 5, 2, 2)
    return Net(run, down1=cbr(3, 6), down2=cbr(6, 8), up=up, merge=cbr(11, 6), last=nn.Conv2d(6, 2, 1))


class Shuffle(nn.Module):
    """Half of the channels pass, half are worked on, and both are shuffled."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        depth = [nn.Conv2d(half, half, 3, padding=1, groups=half, bias=False), nn.BatchNorm2d(half)]
        self.branch = nn.Sequential(cbr(half, half, 1), *depth, cbr(half, half, 1))

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=1)
        out = torch.cat([a, self.branch(b)], 1)
        n, c, h, w = out.shape
        return out.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


@case(3, 8, 8, groups=4)
def channel_shuffle_by_view() -> nn.Module:
    return nn.Sequential(cbr(3, 12), Shuffle(12), Shuffle(12), cbr(12, 6, 1), head(6))


@case(3, 8, 8, groups=2)
def channel_shuffle_by_module() -> nn.Module:
    return nn.Sequential(cbr(3, 12), nn.ChannelShuffle(3), nn.BatchNorm2d(12), nn.Conv2d(12, 6, 3), head(6))


class Scales(nn.Module):
    """Pieces of a width kept in an attribute, each worked on together with the one before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.first = cbr(6, 3 * width, 1)
        self.convs = nn.ModuleList(cbr(width, width) for _ in range(2))
        self.last = nn.Conv2d(3 * width, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        pieces = torch.split(self.first(x), self.width, 1)
        out = [pieces[0]]
        for conv, piece in zip(self.convs, pieces[1:], strict=True):
            out.append(conv(out[-1] + piece))
        return self.last(torch.cat(out, 1))


@case(3, 8, 8, groups=4)
def split_by_a_width_in_an_attribute() -> nn.Module:
    return nn.Sequential(cbr(3, 6), Scales(4), nn.ReLU(), head(6))


@case(3, 8, 8, groups=2)
def flatten_before_a_linear_layer() -> nn.Module:
    return nn.Sequential(cbr(3, 6), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(24, 7), nn.Tanh(), nn.Linear(7, 3))


@case(3, 8, 8, groups=2)
def norm_behind_a_flatten() -> nn.Module:
    last = [nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)]
    return nn.Sequential(cbr(3, 6), nn.AvgPool2d(4), nn.Flatten(), *last)


@case(3, 8, 8, groups=2, refused="padded with zeros")
def padded_shortcut() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        short = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2))
        return m.head(F.relu(m.norm(m.conv2(m.conv1(x))) + short))

    conv2 = nn.Conv2d(7, 10, 3, padding=1, bias=False)
    return Net(run, stem=cbr(3, 6), conv1=cbr(6, 7, stride=2), conv2=conv2, norm=nn.BatchNorm2d(10), head=head(10))


class Excite(nn.Module):
    def __init__(self, width: int, inner: int, gate: nn.Module) -> None:
        super().__init__()
        self.reduce, self.expand, self.gate = nn.Conv2d(width, inner, 1), nn.Conv2d(inner, width, 1), gate

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.expand(F.relu(self.reduce(x.mean((2, 3), keepdim=True)))))


@case(3, 8, 8, groups=3)
def squeeze_and_excite() -> nn.Module:
    return nn.Sequential(cbr(3, 8), Excite(8, 4, nn.Sigmoid()), nn.Conv2d(8, 6, 1), nn.SiLU(), head(6))


@case(3, 8, 8, groups=3)
def squeeze_and_excite_with_hard_sigmoid() -> nn.Module:
    return nn.Sequential(cbr(3, 8), Excite(8, 4, nn.Hardsigmoid()), nn.BatchNorm2d(8), nn.Conv2d(8, 6, 3), head(6))


@case(3, 8, 8, groups=4)
def pyramid_of_features() -> nn.Module:
    def run(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        high = m.stage1(x)
        low = m.stage2(high)
        top = m.lateral2(low)
        merged = m.lateral1(high) + F.interpolate(top, scale_factor=2.0, mode="nearest")
        return m.out1(merged), m.out2(top)

    lateral = {"lateral1": nn.Conv2d(6, 5, 1), "lateral2": nn.Conv2d(8, 5, 1)}
    outs = {"out1": nn.Conv2d(5, 4, 3, padding=1), "out2": nn.Conv2d(5, 4, 3, padding=1)}
    return Net(run, stage1=cbr(3, 6), stage2=nn.Sequential(cbr(6, 7), cbr(7, 8, stride=2)), **lateral, **outs)
