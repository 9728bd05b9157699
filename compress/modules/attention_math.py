"""Building blocks of attention at any width, for compact forms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def split_qkv(x: Tensor, value_width: int, dim: int = -1) -> tuple[Tensor, ...]:
    """Split a fused projection into queries, keys and values; queries and keys share what the values leave."""
    key_width = (x.shape[dim] - value_width) // 2
    return torch.split_with_sizes(x, [key_width, key_width, value_width], dim)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Reshape (batch, tokens, width) to (batch, heads, tokens, width of a head)."""
    return x.view(*x.shape[:-1], heads, -1).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """Reshape (batch, heads, tokens, width of a head) to (batch, tokens, width)."""
    return x.transpose(1, 2).flatten(2)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """Return softmax(scale q k^T + bias) v; pass the scale of the dense width."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=scale)


def attend_with_scores(scores: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Return softmax(scores) v."""
    return F.dropout(scores.softmax(-1), dropout) @ v


def cosine_scores(q: Tensor, k: Tensor, logit_scale: Tensor) -> Tensor:
    """Return the scores of Swin v2: cosine of queries and keys, times a factor per head of at most 100."""
    factor = logit_scale.clamp(max=float(torch.log(torch.tensor(100.0)))).exp()
    return F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) * factor


def zero_key_bias(bias: Tensor, value_width: int) -> Tensor:
    """Return a fused bias of queries, keys and values with the part of the keys set to zero."""
    q, k, v = split_qkv(bias, value_width)
    return torch.cat([q, torch.zeros_like(k), v])
