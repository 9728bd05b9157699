"""Networks for CIFAR: the ResNets of two papers by He et al., and a small ViT.

`CifarResNet`: Deep residual learning for image recognition, 2015, section 4.2.
`PreResNet`: Identity mappings in deep residual networks, 2016, with bottlenecks, as network slimming prunes it.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timm.models import VisionTransformer
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters (option A): subsampling and zero padding of channels."""

    def __init__(self, in_channels: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.pad = planes // 4 if stride != 1 or in_channels != planes else 0

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.pad:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.pad, self.pad))
        return F.relu(out + x)


class CifarResNet(nn.Module):
    """Three stages of 16, 32 and 64 channels, (depth - 2) / 6 blocks each."""

    def __init__(self, depth: int, classes: int = 10) -> None:
        super().__init__()
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = self._stage(16, 16, blocks, 1)
        self.layer2 = self._stage(16, 32, blocks, 2)
        self.layer3 = self._stage(32, 64, blocks, 2)
        self.linear = nn.Linear(64, classes)

    @staticmethod
    def _stage(in_channels: int, planes: int, blocks: int, stride: int) -> nn.Sequential:
        rest = [BasicBlock(planes, planes, 1) for _ in range(blocks - 1)]
        return nn.Sequential(BasicBlock(in_channels, planes, stride), *rest)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))


def load_cifar_resnet(name: str, data: Path) -> CifarResNet:
    """Load the trained network `resnet20` or `resnet56`, in eval mode.

    Raises:
        FileNotFoundError: there are no trained weights in `data`.
    """
    model, path = CifarResNet(int(name.removeprefix("resnet"))), data / "models" / f"{name}.pt"
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: no trained weights of {name}; train them with: python -m benchmarks.dense --data {data}"
        )
    model.load_state_dict(torch.load(path, weights_only=True))
    return model.eval()


class PreBottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, batch norm and ReLU before each; the shortcut takes the block's raw input."""

    def __init__(self, in_channels: int, planes: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, planes, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, 4 * planes, 1, bias=False)
        same = stride == 1 and in_channels == 4 * planes
        self.shortcut = nn.Identity() if same else nn.Conv2d(in_channels, 4 * planes, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(F.relu(self.bn1(x)))
        out = self.conv2(F.relu(self.bn2(out)))
        out = self.conv3(F.relu(self.bn3(out)))
        return out + self.shortcut(x)


class PreResNet(nn.Module):
    """Three stages with 16, 32 and 64 inner and four times as many outer channels, (depth - 2) / 9 blocks each.

    Raises:
        ValueError: `depth` is not 9 n + 2.
    """

    def __init__(self, depth: int, classes: int = 10) -> None:
        super().__init__()
        blocks, rest = divmod(depth - 2, 9)
        if blocks < 1 or rest:
            raise ValueError(f"depth: expected 9 n + 2, such as 20 or 164; got {depth}")
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.layer1 = self._stage(16, 16, blocks, 1)
        self.layer2 = self._stage(64, 32, blocks, 2)
        self.layer3 = self._stage(128, 64, blocks, 2)
        self.bn = nn.BatchNorm2d(256)
        self.linear = nn.Linear(256, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    @staticmethod
    def _stage(in_channels: int, planes: int, blocks: int, stride: int) -> nn.Sequential:
        rest = [PreBottleneck(4 * planes, planes, 1) for _ in range(blocks - 1)]
        return nn.Sequential(PreBottleneck(in_channels, planes, stride), *rest)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.conv1(x))))
        return self.linear(F.relu(self.bn(x)).mean((2, 3)))


def preresnet164(classes: int = 10) -> PreResNet:
    """Return PreResNet-164."""
    return PreResNet(164, classes)


def preresnet164_cifar100() -> PreResNet:
    """Return PreResNet-164 with 100 classes."""
    return PreResNet(164, 100)


class ConvStem(nn.Module):
    """Patch embedding of a ViT by three convolutions with stride 2: 16 tokens from a 32 x 32 image."""

    def __init__(self, img_size: int, patch_size: int, in_chans: int, embed_dim: int, **_: Any) -> None:
        super().__init__()
        self.num_patches = (img_size // patch_size) ** 2
        widths = [in_chans, 24, 48, 96]
        layers: list[nn.Module] = []
        for in_channels, out_channels in pairwise(widths):
            layers += [
                nn.Conv2d(in_channels, out_channels, 3, 2, 1, bias=False),
                nn.BatchNorm2d(out_channels),
                nn.ReLU(),
            ]
        self.layers = nn.Sequential(*layers, nn.Conv2d(widths[-1], embed_dim, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).flatten(2).transpose(1, 2)


def cifar_vit() -> VisionTransformer:
    """Return timm's ViT with width 128 and 6 blocks of 4 heads, for 32 x 32 images."""
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 128, "depth": 6, "num_heads": 4, "num_classes": 10}
    return VisionTransformer(**shape, class_token=False, global_pool="avg", embed_layer=ConvStem)
