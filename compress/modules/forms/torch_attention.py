"""Compact form of `torch.nn.MultiheadAttention`."""

# mypy: disable-error-code="misc"

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..compact_forms import register_compact_form
from .attention_math import attend, join_heads, split_heads, split_qkv


def _store_scale_(module: Any) -> None:
    module.scale = (module.embed_dim // module.num_heads) ** -0.5


def _has_no_extra_keys(module: Any) -> bool:
    return module.bias_k is None and module.bias_v is None and not module.add_zero_attn


@register_compact_form(fits=_has_no_extra_keys, prepare_=_store_scale_)
class MultiheadAttention(nn.MultiheadAttention):
    """torch's attention, without the fused fast path of transformer layers, which assumes one width."""

    _qkv_same_embed_dim = property(lambda self: False)  # turns the fast path off
    scale: float

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        batched, batch_first = query.dim() == 3, self.batch_first
        inputs = [query, key, value]
        if not batched:
            inputs = [t.unsqueeze(0) for t in inputs]
        elif not batch_first:
            inputs = [t.transpose(0, 1) for t in inputs]
        value_width = self.out_proj.in_features
        weights_qkv: tuple[Tensor, ...] = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self.in_proj_weight is not None:
            weights_qkv = split_qkv(self.in_proj_weight, value_width, 0)
        biases_qkv = split_qkv(self.in_proj_bias, value_width) if self.in_proj_bias is not None else (None, None, None)
        q, k, v = (
            split_heads(F.linear(*projection), self.num_heads)
            for projection in zip(inputs, weights_qkv, biases_qkv, strict=True)
        )
        bias = self._score_bias(q, k, key_padding_mask, attn_mask, is_causal)
        scale, dropout = self.scale, self.dropout if self.training else 0.0
        weights: Tensor | None = None
        if need_weights:
            scores = scale * q @ k.transpose(-2, -1)
            weights = F.dropout((scores if bias is None else scores + bias).softmax(-1), dropout)
            out = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            out = attend(q, k, v, scale, bias, dropout)
        joined = self.out_proj(join_heads(out))
        if not batched:
            return joined.squeeze(0), None if weights is None else weights.squeeze(0)
        return (joined if batch_first else joined.transpose(0, 1)), weights

    def _score_bias(
        self, q: Tensor, k: Tensor, padding: Tensor | None, mask: Tensor | None, causal: bool
    ) -> Tensor | None:
        """Return the sum of both masks as an additive bias of the scores."""
        if mask is None and causal:
            raise RuntimeError("is_causal needs attn_mask, as in torch.nn.MultiheadAttention")
        bias = None
        if mask is not None:
            bias = _as_additive(mask, q.dtype)
            if bias.dim() == 3:
                bias = bias.view(len(q), self.num_heads, *bias.shape[1:])
        if padding is not None:
            padding_bias = _as_additive(padding, q.dtype).view(len(q), 1, 1, k.shape[2])
            bias = padding_bias if bias is None else bias + padding_bias
        return bias


def _as_additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as numbers to add to the scores: -inf where a boolean mask is set."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, float("-inf"))
