"""Compact forms of the attention of torchvision and timm: see attention.py."""

# mypy: disable-error-code="no-any-return,no-untyped-call,misc,operator,assignment"

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import attention as plain
from timm.models import beit, cait, coat, pvt_v2, swin_transformer, swin_transformer_v2
from torch import Tensor
from torchvision.models import maxvit
from torchvision.models import swin_transformer as swin

from .attention import apart, attend, compact, cosine, join_heads, split_heads, weigh, without_keys


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

    scale: float

    @staticmethod
    def note_(module: Any) -> None:
        module.scale = (module.proj.out_features // module.num_heads) ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        windows = _Windows(x, self.window_size, self.shift_size)
        heads, dropout = self.num_heads, self.attention_dropout if self.training else 0.0
        q, k, v = (split_heads(t, heads) for t in apart(self._projected(windows.cut(x)), self.proj.in_features))
        scores = self._scores(q, k) + self.get_relative_position_bias()
        if (mask := windows.mask(x)) is not None:
            scores = (scores.unflatten(0, (-1, len(mask))) + mask).flatten(0, 1)
        out = self.proj(join_heads(weigh(scores, v, dropout)))
        return windows.join(F.dropout(out, self.dropout, self.training))

    def _projected(self, x: Tensor) -> Tensor:
        projected: Tensor = self.qkv(x)
        return projected

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        return (q * self.scale) @ k.transpose(-2, -1)


@compact
class ShiftedWindowAttentionV2(swin.ShiftedWindowAttentionV2):
    """torchvision's Swin v2."""

    forward = ShiftedWindowAttention.forward

    def _projected(self, x: Tensor) -> Tensor:
        bias = None if self.qkv.bias is None else without_keys(self.qkv.bias, self.proj.in_features)
        return F.linear(x, self.qkv.weight, bias)

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        return cosine(q, k, self.logit_scale)


@compact
class RelativeAttention(maxvit.RelativePositionalMultiHeadAttention):
    """torchvision's MaxViT: (batch, groups, tokens, channels)."""

    def forward(self, x: Tensor) -> Tensor:
        parts = apart(self.to_qkv(x.flatten(0, 1)), self.merge.in_features)
        q, k, v = (split_heads(t, self.n_heads) for t in parts)
        out = attend(q, k, v, self.scale_factor, self.get_relative_positional_bias())
        return self.merge(join_heads(out).unflatten(0, x.shape[:2]))


def _separate(module: Any, x: Tensor) -> Tensor:
    """timm's projection with biases of queries, keys and values apart."""
    if module.q_bias is None:
        projected: Tensor = module.qkv(x)
        return projected
    return F.linear(x, module.qkv.weight, torch.cat([module.q_bias, module.k_bias, module.v_bias]))


@compact
class Attention(plain.Attention):
    """timm's ViT and DeiT, whose own code will do where queries, keys and values are cut alike."""

    when = "apart"

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        q, k, v = (split_heads(t, self.num_heads) for t in apart(self.qkv(x), self.proj.in_features))
        dropout = self.attn_drop.p if self.training else 0.0
        out = F.scaled_dot_product_attention(
            self.q_norm(q), self.k_norm(k), v, attn_mask, dropout, is_causal, scale=self.scale
        )
        out = self.norm(join_heads(out))
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(out))


@compact
class WindowAttention(swin_transformer.WindowAttention):
    """timm's Swin, likewise."""

    when = "apart"

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (split_heads(t, self.num_heads) for t in apart(self.qkv(x), self.proj.in_features))
        bias = self._get_rel_pos_bias()
        if mask is not None:
            bias = (bias + mask[:, None]).repeat(len(x) // len(mask), 1, 1, 1)
        out = attend(q, k, v, self.scale, bias, self.attn_drop.p if self.training else 0.0)
        return self.proj_drop(self.proj(join_heads(out)))


@compact
class Beit(beit.Attention):
    """timm's BEiT."""

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        q, k, v = (split_heads(t, self.num_heads) for t in apart(_separate(self, x), self.proj.in_features))
        bias = shared_rel_pos_bias
        if self.relative_position_bias_table is not None:
            bias = self._get_rel_pos_bias() if bias is None else self._get_rel_pos_bias() + bias
        out = attend(q, k, v, self.scale, bias, self.attn_drop.p if self.training else 0.0)
        return self.proj_drop(self.proj(join_heads(out)))


@compact
class WindowAttentionV2(swin_transformer_v2.WindowAttention):
    """timm's Swin v2."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (split_heads(t, self.num_heads) for t in apart(_separate(self, x), self.proj.in_features))
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
        values = self.proj.in_features
        k, v = (split_heads(t, self.num_heads) for t in self.kv(x).split([self.q.out_features, values], -1))
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


@compact
class TalkingHeadAttention(cait.TalkingHeadAttn):
    """CaiT's attention of patches, whose heads are mixed before and after the softmax."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(t, self.num_heads) for t in apart(self.qkv(x), self.proj.in_features))
        scores = self.proj_l((q * self.scale @ k.transpose(-2, -1)).permute(0, 2, 3, 1)).softmax(2)
        weights = self.attn_drop(self.proj_w(scores).permute(0, 3, 1, 2))
        return self.proj_drop(self.proj(join_heads(weights @ v)))


@compact
class ConvRelPosEnc(coat.ConvRelPosEnc):
    """CoaT's positions: depthwise convolutions of the values, with a window for some heads and another for others."""

    def forward(self, q: Tensor, v: Tensor, size: tuple[int, int]) -> Tensor:
        image = v[:, :, 1:].transpose(-1, -2).flatten(1, 2).unflatten(2, tuple(size))
        parts = image.split([conv.in_channels for conv in self.conv_list], 1)
        seen = torch.cat([conv(part) for conv, part in zip(self.conv_list, parts, strict=True)], 1)
        seen = seen.flatten(2).unflatten(1, (q.shape[1], -1)).transpose(-1, -2)
        return F.pad(q[:, :, 1:] * seen, (0, 0, 1, 0))


@compact
class FactorAttention(coat.FactorAttnConvRelPosEnc):
    """CoaT's attention in factors: keys weigh values, and queries read the result."""

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        q, k, v = (split_heads(t, self.num_heads) for t in self.qkv(x).chunk(3, -1))
        out = self.scale * (q @ (k.softmax(2).transpose(-1, -2) @ v)) + self.crpe(q, v, size=size)
        return self.proj_drop(self.proj(join_heads(out)))
