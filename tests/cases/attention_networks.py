"""Attention of our own that is written for one width, in the ways libraries write it, and its compact forms."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compress.modules import register_compact_form


class ConvAttention(nn.Module):
    """Attention on feature maps: channels head by head, and `view` with the channels of the input for the values."""

    def __init__(self, width: int = 24, heads: int = 3, key_width: int = 5) -> None:
        super().__init__()
        self.heads, self.key_width, self.value_width, self.scale = heads, key_width, width // heads, key_width**-0.5
        self.qkv = nn.Conv2d(width, width + 2 * heads * key_width, 1)
        self.position = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.proj = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        by_head = self.qkv(x).view(len(x), self.heads, 2 * self.key_width + self.value_width, -1)
        q, k, v = by_head.split([self.key_width, self.key_width, self.value_width], 2)
        weights = (self.scale * q.transpose(-2, -1) @ k).softmax(-1)
        out = (v @ weights.transpose(-2, -1)).view(shape)
        return self.proj(out + self.position(v.reshape(shape)))  # type: ignore[no-any-return]


@register_compact_form
class CompactConvAttention(ConvAttention):
    """The same function at any width."""

    def forward(self, x: Tensor) -> Tensor:
        by_head = self.qkv(x).flatten(2).transpose(1, 2).unflatten(-1, (self.heads, -1))
        value_width = self.proj.in_channels // self.heads
        key_width = (by_head.shape[-1] - value_width) // 2
        parts = torch.split_with_sizes(by_head, [key_width, key_width, value_width], -1)
        q, k, v = (part.transpose(1, 2) for part in parts)
        out = (self.scale * q @ k.transpose(-2, -1)).softmax(-1) @ v
        out, v = (t.transpose(-2, -1).flatten(1, 2).unflatten(-1, x.shape[2:]) for t in (out, v))
        return self.proj(out + self.position(v))  # type: ignore[no-any-return]


class HeadWidthAttention(nn.Module):
    """Attention on tokens that reshapes queries, keys and values by one `head_width`."""

    def __init__(self, width: int = 24, heads: int = 3) -> None:
        super().__init__()
        self.heads, self.head_width, self.scale = heads, width // heads, (width // heads) ** -0.5
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, self.head_width)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        out = (self.scale * q @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.out(out.transpose(1, 2).reshape(*x.shape[:-1], -1))  # type: ignore[no-any-return]


@register_compact_form
class CompactHeadWidthAttention(HeadWidthAttention):
    """The same function at any width."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        out = (self.scale * q @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.out(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class BlockAttention(nn.Module):
    """Attention within blocks of tokens, on five dimensions, for which torch has no fused kernel."""

    def __init__(self, width: int = 24, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        blocks = torch.stack([x[:, :4], x[:, 3:]], 1)
        layers = (self.q, self.k, self.v)
        q, k, v = (layer(blocks).unflatten(-1, (self.heads, -1)).transpose(2, 3) for layer in layers)
        out = nn.functional.scaled_dot_product_attention(q, k, v).transpose(2, 3).flatten(3)
        return self.out(out).mean(1).repeat(1, 2, 1)[:, :7]  # type: ignore[no-any-return]


class CrossAttention(nn.Module):
    """torch's attention to keys and values that have widths of their own, and a norm."""

    def __init__(self, width: int = 24, heads: int = 3, bias: bool = True) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(width, 20), nn.Linear(width, 28)
        self.attention = nn.MultiheadAttention(width, heads, kdim=20, vdim=28, bias=bias, batch_first=True)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, self.key(x), self.value(x), need_weights=False)[0]
        return self.norm(x + out)  # type: ignore[no-any-return]


class Residual(nn.Module):
    """A module whose output is added to its input."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)  # type: ignore[no-any-return]


def on_images(*blocks: nn.Module, width: int = 24) -> tuple[nn.Module, Tensor]:
    """Return a classifier with these blocks on feature maps of 4 x 4, and two images."""
    stem, pool = nn.Conv2d(3, width, 8, 8), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(stem, *blocks, pool, nn.Flatten(), nn.Linear(width, 5)), torch.randn(2, 3, 32, 32)


def on_tokens(*blocks: nn.Module, width: int = 24) -> tuple[nn.Module, Tensor]:
    """Return a network with these blocks on seven tokens, and two sequences of them."""
    return nn.Sequential(nn.Linear(9, width), *blocks, nn.Linear(width, 5)), torch.randn(2, 7, 9)
