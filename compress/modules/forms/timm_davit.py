"""Compact forms of DaViT's attention in timm: within windows, and between channels.

Attention between channels is a softmax over the dimensions of a head, so these stay whole; it is cut by heads.
"""

# mypy: disable-error-code="no-any-return,no-untyped-call,misc"

from __future__ import annotations

from timm.models import davit
from torch import Tensor

from ..compact_forms import register_compact_form
from .attention_math import attend, join_heads, split_heads, split_qkv


@register_compact_form
class DavitWindowAttention(davit.WindowAttention):
    """Attention within windows."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(t, self.num_heads) for t in split_qkv(self.qkv(x), self.proj.in_features))
        return self.proj(join_heads(attend(q, k, v, self.scale)))


@register_compact_form
class DavitChannelAttention(davit.ChannelAttention):
    """Attention between the channels of a head."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(t, self.num_heads) for t in self.qkv(x).chunk(3, -1))
        weights = ((k * self.scale).transpose(-2, -1) @ v).softmax(-1)
        return self.proj(join_heads((weights @ q.transpose(-2, -1)).transpose(-2, -1)))
