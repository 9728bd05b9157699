"""Compact forms of the attention of ultralytics' YOLO: position-sensitive (YOLOv10, 11, 26) and by area (YOLO12)."""

# mypy: disable-error-code="no-any-return,misc,no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from ultralytics.nn.modules.block import AAttn, Attention

from ..compact_forms import register_compact_form
from .attention_math import join_heads


def _split_heads_qkv(x: Tensor, heads: int, value_width: int) -> tuple[Tensor, ...]:
    """Split (batch, tokens, channels) into queries, keys and values of shape (batch, heads, tokens, width of a head).

    The channels hold queries, keys and values of the first head, then those of the second head, and so on.
    """
    by_head = x.unflatten(-1, (heads, -1)).transpose(1, 2)
    width = value_width // heads
    key_width = (by_head.shape[-1] - width) // 2
    return torch.split_with_sizes(by_head, [key_width, key_width, width], -1)


@register_compact_form
class PositionSensitiveAttention(Attention):
    """Attention of PSA blocks, with a depthwise convolution of the values as position encoding."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.qkv(x).flatten(2).transpose(1, 2)
        q, k, v = _split_heads_qkv(tokens, self.num_heads, self.proj.conv.in_channels)
        weights = (q * self.scale @ k.transpose(-2, -1)).softmax(-1)
        out, values = (join_heads(t).transpose(1, 2).unflatten(-1, x.shape[2:]) for t in (weights @ v, v))
        return self.proj(out + self.pe(values))


def _store_scale_(module: Any) -> None:
    module.scale = module.head_dim**-0.5


@register_compact_form(prepare_=_store_scale_)
class AreaAttention(AAttn):
    """Attention within each of `area` parts of the feature map, with the position encoding of PSA blocks."""

    scale: float

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.qkv(x).flatten(2).transpose(1, 2)
        by_area = tokens.unflatten(1, (self.area, -1)).flatten(0, 1)
        q, k, v = _split_heads_qkv(by_area, self.num_heads, self.proj.conv.in_channels)
        weights = (q * self.scale @ k.transpose(-2, -1)).softmax(-1)
        out, values = (self._join_areas(join_heads(t), x.shape[2:]) for t in (weights @ v, v))
        return self.proj(out + self.pe(values))

    def _join_areas(self, x: Tensor, size: torch.Size) -> Tensor:
        """Reshape (batch * areas, tokens, channels) to (batch, channels, height, width)."""
        return x.unflatten(0, (-1, self.area)).flatten(1, 2).transpose(1, 2).unflatten(-1, size)
