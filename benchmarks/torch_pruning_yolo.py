"""Torch-Pruning's way of cutting a YOLO, as its script for YOLOv8 does it.

C2f blocks are split into two convolutions, the head and attention are not cut, and every other layer loses the same
fraction of its channels by group norm. The script does this in 16 rounds with fine-tuning after each.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch_pruning as tp
from torch import Tensor, nn

from .zoo import count_macs

# isort: split
from ultralytics.nn.modules import C2f, Conv, Detect
from ultralytics.nn.modules.block import Attention

ROUNDS = 16  # of the script


class SplitC2f(nn.Module):
    """A C2f block whose first convolution is two, as Torch-Pruning needs it."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.first, self.second = (self._half(block.cv1, part) for part in (0, 1))
        self.cv2, self.m = block.cv2, block.m
        self.i, self.f, self.type, self.np = block.i, block.f, block.type, block.np

    @staticmethod
    def _half(conv: Any, part: int) -> Any:
        """Return a convolution with one half of the output channels."""
        half = Conv(conv.conv.in_channels, conv.conv.out_channels // 2, 1, 1)
        rows = slice(part * (conv.conv.out_channels // 2), (part + 1) * (conv.conv.out_channels // 2))
        state = {name: value[rows] if value.ndim else value for name, value in conv.state_dict().items()}
        half.load_state_dict(state)
        half.bn.eps, half.bn.momentum = conv.bn.eps, conv.bn.momentum
        return half

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.first(x), self.second(x)]
        for module in self.m:
            parts.append(module(parts[-1]))
        out: Tensor = self.cv2(torch.cat(parts, 1))
        return out


def split_blocks(network: nn.Module) -> nn.Module:
    """Return a copy whose C2f blocks are split; it computes the same function."""
    split = copy.deepcopy(network)
    layers: Any = split.model
    for number, layer in enumerate(layers):
        if isinstance(layer, C2f):
            layers[number] = SplitC2f(layer)
    return split


def cut_to_macs(network: nn.Module, most: float, size: int) -> nn.Module:
    """Return a copy whose layers have lost the same fraction of channels, the smallest that meets the MACs."""
    example = torch.randn(1, 3, size, size)
    low, high, best = 0.0, 0.95, network
    for _ in range(7):
        ratio = (low + high) / 2
        cut = copy.deepcopy(network)
        for parameter in cut.parameters():
            parameter.requires_grad_(True)
        ignored = [module for module in cut.modules() if isinstance(module, (Detect, Attention))]
        importance = tp.importance.GroupMagnitudeImportance()
        pruner = tp.pruner.GroupNormPruner(
            cut, example, importance=importance, iterative_steps=1, pruning_ratio=ratio, ignored_layers=ignored
        )
        pruner.step()
        if count_macs(cut, example) > most:
            low = ratio
        else:
            high, best = ratio, cut
    return best
