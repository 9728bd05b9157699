"""Compact forms of torchvision's attention: Swin, Swin v2, Swin on video and MaxViT."""

# mypy: disable-error-code="no-any-return,no-untyped-call,misc,operator,assignment"

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torchvision.models import maxvit, swin_transformer
from torchvision.models.video import swin_transformer as video_swin_transformer

from ..compact_forms import register_compact_form
from .attention_math import (
    WindowPartition,
    attend,
    attend_with_scores,
    cosine_scores,
    join_heads,
    split_heads,
    split_qkv,
    zero_key_bias,
)


def _store_scale_(module: Any) -> None:
    module.scale = (module.proj.out_features // module.num_heads) ** -0.5


@register_compact_form(prepare_=_store_scale_)
class ShiftedWindowAttention(swin_transformer.ShiftedWindowAttention):
    """Attention of torchvision's Swin."""

    scale: float

    def forward(self, x: Tensor) -> Tensor:
        windows = WindowPartition(x, self.window_size, self.shift_size)
        return self._attend(x, windows, self.get_relative_position_bias())

    def _attend(self, x: Tensor, windows: WindowPartition, position_bias: Tensor) -> Tensor:
        heads, dropout = self.num_heads, self.attention_dropout if self.training else 0.0
        projected = self._project(windows.split(x))
        q, k, v = (split_heads(t, heads) for t in split_qkv(projected, self.proj.in_features))
        scores = self._scores(q, k) + position_bias
        if (mask := windows.mask(x)) is not None:
            scores = (scores.unflatten(0, (-1, len(mask))) + mask).flatten(0, 1)
        out = self.proj(join_heads(attend_with_scores(scores, v, dropout)))
        return windows.join(F.dropout(out, self.dropout, self.training))

    def _project(self, x: Tensor) -> Tensor:
        projected: Tensor = self.qkv(x)
        return projected

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        return (q * self.scale) @ k.transpose(-2, -1)


@register_compact_form
class ShiftedWindowAttentionV2(swin_transformer.ShiftedWindowAttentionV2):
    """Attention of torchvision's Swin v2."""

    forward, _attend = ShiftedWindowAttention.forward, ShiftedWindowAttention._attend

    def _project(self, x: Tensor) -> Tensor:
        bias = None if self.qkv.bias is None else zero_key_bias(self.qkv.bias, self.proj.in_features)
        return F.linear(x, self.qkv.weight, bias)

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        return cosine_scores(q, k, self.logit_scale)


@register_compact_form(prepare_=_store_scale_)
class ShiftedWindowAttention3d(video_swin_transformer.ShiftedWindowAttention3d):
    """Attention of torchvision's Swin on video."""

    scale: float
    _attend, _project = ShiftedWindowAttention._attend, ShiftedWindowAttention._project
    _scores = ShiftedWindowAttention._scores

    def forward(self, x: Tensor) -> Tensor:
        window = [min(pair) for pair in zip(self.window_size, x.shape[1:4], strict=True)]  # no larger than the input
        windows = WindowPartition(x, window, self.shift_size)
        return self._attend(x, windows, self.get_relative_position_bias(window))


@register_compact_form
class RelativeAttention(maxvit.RelativePositionalMultiHeadAttention):
    """Attention of torchvision's MaxViT on (batch, groups, tokens, channels)."""

    def forward(self, x: Tensor) -> Tensor:
        projected = split_qkv(self.to_qkv(x.flatten(0, 1)), self.merge.in_features)
        q, k, v = (split_heads(t, self.n_heads) for t in projected)
        out = attend(q, k, v, self.scale_factor, self.get_relative_positional_bias())
        return self.merge(join_heads(out).unflatten(0, x.shape[:2]))
