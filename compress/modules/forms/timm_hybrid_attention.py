"""Compact forms of the attention in timm's hybrids of convolution and attention: LeViT and EfficientViT (MSRA)."""

# mypy: disable-error-code="no-any-return,no-untyped-call,misc,operator,list-item,union-attr"

from __future__ import annotations

from typing import Any

import torch
from timm.models import efficientvit_msra, levit
from torch import Tensor

from ..compact_forms import register_compact_form
from .attention_math import attend_with_scores, join_heads


def _is_not_fused(module: Any) -> bool:
    return isinstance(module.proj.ln, (levit.LinearNorm, levit.ConvNorm))


def _position_bias(module: Any) -> Tensor:
    """Return the bias by relative position; the originals cache it in eval mode, and the cache outlives a cut."""
    return module.attention_biases[:, module.attention_bias_idxs]


def _values_per_head(module: Any) -> int:
    linear = module.proj.ln.linear
    return (linear.in_channels if module.use_conv else linear.in_features) // module.num_heads


def _split_heads(module: Any, x: Tensor) -> Tensor:
    """Reshape tokens, or an image if the module convolves, to (batch, heads, tokens, width of a head)."""
    tokens = x.flatten(2).transpose(1, 2) if module.use_conv else x
    return tokens.unflatten(-1, (module.num_heads, -1)).transpose(1, 2)


@register_compact_form(fits=_is_not_fused)
class LevitAttention(levit.Attention):
    """Attention of LeViT; a fused projection holds queries, keys and values head by head."""

    def forward(self, x: Tensor) -> Tensor:
        by_head = _split_heads(self, self.qkv(x))
        values = _values_per_head(self)
        keys = (by_head.shape[-1] - values) // 2
        q, k, v = torch.split_with_sizes(by_head, [keys, keys, values], -1)
        out = join_heads(attend_with_scores(q @ k.transpose(-2, -1) * self.scale + _position_bias(self), v))
        return self.proj(out.transpose(1, 2).unflatten(-1, x.shape[2:]) if self.use_conv else out)


@register_compact_form(fits=_is_not_fused)
class LevitAttentionDownsample(levit.AttentionDownsample):
    """Attention of LeViT with fewer queries than keys."""

    def forward(self, x: Tensor) -> Tensor:
        by_head = _split_heads(self, self.kv(x))
        values = _values_per_head(self)
        k, v = torch.split_with_sizes(by_head, [by_head.shape[-1] - values, values], -1)
        queries = self.q(x)
        q = _split_heads(self, queries)
        out = join_heads(attend_with_scores(q @ k.transpose(-2, -1) * self.scale + _position_bias(self), v))
        return self.proj(out.transpose(1, 2).unflatten(-1, queries.shape[2:]) if self.use_conv else out)


def _heads_are_not_fused(module: Any) -> bool:
    return all(isinstance(layer, efficientvit_msra.ConvNorm) for layer in (*module.qkvs, *module.dws))


@register_compact_form(fits=_heads_are_not_fused)
class CascadedGroupAttention(efficientvit_msra.CascadedGroupAttention):
    """Attention of EfficientViT: each head reads its part of the channels, plus the output of the head before."""

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.split_with_sizes(x, [qkv.conv.in_channels for qkv in self.qkvs], 1)
        outputs: list[Tensor] = []
        for part, qkv, depthwise, bias in zip(parts, self.qkvs, self.dws, _position_bias(self), strict=True):
            projected = qkv(part + outputs[-1] if outputs else part)
            keys = depthwise.conv.in_channels
            q, k, v = torch.split_with_sizes(projected, [keys, keys, projected.shape[1] - 2 * keys], 1)
            q, k, v = (t.flatten(2).transpose(1, 2) for t in (depthwise(q), k, v))
            out = attend_with_scores(q * self.scale @ k.transpose(-2, -1) + bias, v)
            outputs.append(out.transpose(1, 2).unflatten(-1, x.shape[2:]))
        return self.proj(torch.cat(outputs, 1))
