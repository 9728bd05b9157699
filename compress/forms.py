"""Compact forms of the attention of torchvision and timm: see attention.py."""

# mypy: disable-error-code="no-any-return,no-untyped-call,misc,operator,assignment"

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.models import beit, cait, pvt_v2, swin_transformer_v2
from torch import Tensor
from torchvision.models import swin_transformer as swin

from .attention import attend, compact, cosine, join_heads, split_heads, weigh, without_keys


class _Windows:
    """Square windows of a padded and shifted map, and the way back."""

    def __init__(self, x: Tensor, window: list[int], shift: list[int]) -> None:
        self.size, self.window = x.shape[1:3], window
        self.padded = [-(-size // w) * w for size, w in zip(self.size, window, strict=True)]
        self.shift = [0 if w >= p else s for s, w, p in zip(shift, window, self.padded, strict=True)]

    def cut(self, x: Tensor) -> Tensor:
        """(batch, height, width, channels) -> (batch * windows, tokens, channels)."""
        (h, w), (a, b) = self.padded, self.window
        x = F.pad(x, (0, 0, 0, w - self.size[1], 0, h - self.size[0]))
        if any(self.shift):
            x = x.roll((-self.shift[0], -self.shift[1]), (1, 2))
        return x.unflatten(1, (h // a, a)).unflatten(3, (w // b, b)).transpose(2, 3).flatten(3, 4).flatten(0, 2)

    def join(self, x: Tensor) -> Tensor:
        """The way back."""
        (h, w), (a, b) = self.padded, self.window
        x = x.unflatten(0, (-1, h // a, w // b)).unflatten(3, (a, b)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        if any(self.shift):
            x = x.roll((self.shift[0], self.shift[1]), (1, 2))
        return x[:, : self.size[0], : self.size[1]].contiguous()

    def mask(self, like: Tensor) -> Tensor | None:
        """-100 between tokens that the shift has brought together, (windows, 1, tokens, tokens)."""
        if not any(self.shift):
            return None
        sides = []
        for p, w, s in zip(self.padded, self.window, self.shift, strict=True):
            at = torch.arange(p, device=like.device)
            sides.append((at >= p - w).to(torch.long) + (at >= p - s) if s else torch.zeros_like(at))
        region = (3 * sides[0][:, None] + sides[1])[None, :, :, None]
        still = _Windows(region, self.window, [0, 0])
        of_window = still.cut(region)[..., 0]
        apart = of_window[:, None, :] != of_window[:, :, None]
        return torch.zeros(apart.shape, dtype=like.dtype, device=like.device).masked_fill(apart, -100.0)[:, None]


@compact
class ShiftedWindowAttention(swin.ShiftedWindowAttention):
    """torchvision's Swin."""

    def forward(self, x: Tensor) -> Tensor:
        windows = _Windows(x, self.window_size, self.shift_size)
        heads, dropout = self.num_heads, self.attention_dropout if self.training else 0.0
        q, k, v = (split_heads(t, heads) for t in self._projected(windows.cut(x)).chunk(3, -1))
        scores = self._scores(q, k, x.shape[-1] // heads) + self.get_relative_position_bias()
        if (mask := windows.mask(x)) is not None:
            scores = (scores.unflatten(0, (-1, len(mask))) + mask).flatten(0, 1)
        out = self.proj(join_heads(weigh(scores, v, dropout)))
        return windows.join(F.dropout(out, self.dropout, self.training))

    def _projected(self, x: Tensor) -> Tensor:
        projected: Tensor = self.qkv(x)
        return projected

    def _scores(self, q: Tensor, k: Tensor, width: int) -> Tensor:
        return (q * width**-0.5) @ k.transpose(-2, -1)


@compact
class ShiftedWindowAttentionV2(swin.ShiftedWindowAttentionV2):
    """torchvision's Swin v2."""

    forward = ShiftedWindowAttention.forward

    def _projected(self, x: Tensor) -> Tensor:
        return F.linear(x, self.qkv.weight, None if self.qkv.bias is None else without_keys(self.qkv.bias))

    def _scores(self, q: Tensor, k: Tensor, width: int) -> Tensor:
        return cosine(q, k, self.logit_scale)


def _separate(module: Any, x: Tensor) -> Tensor:
    """timm's projection with biases of queries, keys and values apart."""
    if module.q_bias is None:
        projected: Tensor = module.qkv(x)
        return projected
    return F.linear(x, module.qkv.weight, torch.cat([module.q_bias, module.k_bias, module.v_bias]))


@compact
class Beit(beit.Attention):
    """timm's BEiT."""

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        q, k, v = (split_heads(t, self.num_heads) for t in _separate(self, x).chunk(3, -1))
        bias = shared_rel_pos_bias
        if self.relative_position_bias_table is not None:
            bias = self._get_rel_pos_bias() if bias is None else self._get_rel_pos_bias() + bias
        out = attend(q, k, v, self.scale, bias, self.attn_drop.p if self.training else 0.0)
        return self.proj_drop(self.proj(join_heads(out)))


@compact
class WindowAttentionV2(swin_transformer_v2.WindowAttention):
    """timm's Swin v2."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (split_heads(t, self.num_heads) for t in _separate(self, x).chunk(3, -1))
        table = self.cpb_mlp(self.relative_coords_table).flatten(0, -2)
        area = self.window_size[0] * self.window_size[1]
        bias = table[self.relative_position_index.flatten()].unflatten(0, (area, area)).permute(2, 0, 1)
        scores = cosine(q, k, self.logit_scale) + 16 * bias.sigmoid()
        if mask is not None:
            scores = (scores.unflatten(0, (-1, len(mask))) + mask[:, None]).flatten(0, 1)
        out = weigh(scores, v, self.attn_drop.p if self.training else 0.0)
        return self.proj_drop(self.proj(join_heads(out)))


@compact
class PvtV2(pvt_v2.Attention):
    """timm's PVT v2: keys and values of a smaller map."""

    def forward(self, x: Tensor, feat_size: list[int]) -> Tensor:
        q = split_heads(self.q(x), self.num_heads)
        if self.pool is not None or self.sr is not None:
            small = x.transpose(1, 2).unflatten(2, tuple(feat_size))
            small = self.sr(small if self.pool is None else self.pool(small)).flatten(2).transpose(1, 2)
            small = self.norm(small)
            x = small if self.pool is None else self.act(small)
        k, v = (split_heads(t, self.num_heads) for t in self.kv(x).chunk(2, -1))
        out = attend(q, k, v, self.scale, None, self.attn_drop.p if self.training else 0.0)
        return self.proj_drop(self.proj(join_heads(out)))


@compact
class ClassAttention(cait.ClassAttn):
    """CaiT's attention of the class token."""

    def forward(self, x: Tensor) -> Tensor:
        parts = ((self.q, x[:, :1]), (self.k, x), (self.v, x))
        q, k, v = (split_heads(layer(t), self.num_heads) for layer, t in parts)
        out = attend(q, k, v, self.scale, None, self.attn_drop.p if self.training else 0.0)
        return self.proj_drop(self.proj(join_heads(out)))
