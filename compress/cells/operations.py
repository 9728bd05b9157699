"""The operations of cells: separable and dilated convolutions, pools, skips and none (Liu et al. 2019)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from compress.modules import Zero

DARTS_OPERATIONS = (
    "none",
    "max_pool_3x3",
    "avg_pool_3x3",
    "skip_connect",
    "sep_conv_3x3",
    "sep_conv_5x5",
    "dil_conv_3x3",
    "dil_conv_5x5",
)
NATS_OPERATIONS = ("none", "skip_connect", "nor_conv_1x1", "nor_conv_3x3", "avg_pool_3x3")


def relu_conv_norm(inputs: int, channels: int, kernel: int, stride: int = 1, affine: bool = True) -> nn.Sequential:
    """Return ReLU, convolution and batch norm."""
    conv = nn.Conv2d(inputs, channels, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(nn.ReLU(), conv, nn.BatchNorm2d(channels, affine=affine))


class FactorizedReduction(nn.Module):
    """Halve the resolution by two 1x1 convolutions of stride 2, one of them shifted by a pixel; batch norm."""

    def __init__(self, inputs: int, channels: int, affine: bool = True) -> None:
        super().__init__()
        self.even = nn.Conv2d(inputs, channels // 2, 1, 2, bias=False)
        self.odd = nn.Conv2d(inputs, channels - channels // 2, 1, 2, bias=False)
        self.norm = nn.BatchNorm2d(channels, affine=affine)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(x)
        shifted = nn.functional.pad(x[:, :, 1:, 1:], (0, 1, 0, 1)) if min(x.shape[2:]) % 2 else x[:, :, 1:, 1:]
        out: Tensor = self.norm(torch.cat([self.even(x), self.odd(shifted)], 1))
        return out


def _separable_half(channels: int, kernel: int, stride: int, affine: bool, dilation: int = 1) -> list[nn.Module]:
    """Return ReLU, depthwise and pointwise convolution, and batch norm."""
    padding = dilation * (kernel // 2)
    return [
        nn.ReLU(),
        nn.Conv2d(channels, channels, kernel, stride, padding, dilation, groups=channels, bias=False),
        nn.Conv2d(channels, channels, 1, bias=False),
        nn.BatchNorm2d(channels, affine=affine),
    ]


def _separable(kernel: int) -> Callable[[int, int, bool], nn.Module]:
    def make(channels: int, stride: int, affine: bool) -> nn.Module:
        halves = _separable_half(channels, kernel, stride, affine), _separable_half(channels, kernel, 1, affine)
        return nn.Sequential(*halves[0], *halves[1])

    return make


def _dilated(kernel: int) -> Callable[[int, int, bool], nn.Module]:
    return lambda channels, stride, affine: nn.Sequential(
        *_separable_half(channels, kernel, stride, affine, dilation=2)
    )


def _skip(channels: int, stride: int, affine: bool) -> nn.Module:
    return nn.Identity() if stride == 1 else FactorizedReduction(channels, channels, affine)


def _factorized_7x7(channels: int, stride: int, affine: bool) -> nn.Module:
    return nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(channels, channels, (1, 7), (1, stride), (0, 3), bias=False),
        nn.Conv2d(channels, channels, (7, 1), (stride, 1), (3, 0), bias=False),
        nn.BatchNorm2d(channels, affine=affine),
    )


OPERATIONS: dict[str, Callable[[int, int, bool], nn.Module]] = {  # channels, stride, affine norms -> module
    "none": lambda channels, stride, affine: Zero(stride),
    "max_pool_3x3": lambda channels, stride, affine: nn.MaxPool2d(3, stride, 1),
    "avg_pool_3x3": lambda channels, stride, affine: nn.AvgPool2d(3, stride, 1, count_include_pad=False),
    "skip_connect": _skip,
    "sep_conv_3x3": _separable(3),
    "sep_conv_5x5": _separable(5),
    "sep_conv_7x7": _separable(7),
    "dil_conv_3x3": _dilated(3),
    "dil_conv_5x5": _dilated(5),
    "conv_7x1_1x7": _factorized_7x7,
    "nor_conv_1x1": lambda channels, stride, affine: relu_conv_norm(channels, channels, 1, stride, affine),
    "nor_conv_3x3": lambda channels, stride, affine: relu_conv_norm(channels, channels, 3, stride, affine),
}
OPERATION_NAMES = (*DARTS_OPERATIONS, "sep_conv_7x7", "conv_7x1_1x7")  # those that genotypes of DARTS's space may name
