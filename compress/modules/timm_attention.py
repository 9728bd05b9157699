"""Compact forms of timm's attention: ViT, Swin, Swin v2, BEiT, PVT v2, CaiT and CoaT."""

# mypy: disable-error-code="no-any-return,no-untyped-call,misc,operator,assignment"

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import attention
from timm.models import beit, cait, coat, pvt_v2, swin_transformer, swin_transformer_v2
from torch import Tensor

from .attention_math import attend, attend_with_scores, cosine_scores, join_heads, split_heads, split_qkv
from .compact_forms import FormUse, register_compact_form


def _project_with_separate_biases(module: Any, x: Tensor) -> Tensor:
    """Return the fused projection of a module that stores the biases of queries, keys and values separately."""
    if module.q_bias is None:
        projected: Tensor = module.qkv(x)
        return projected
    return F.linear(x, module.qkv.weight, torch.cat([module.q_bias, module.k_bias, module.v_bias]))


@register_compact_form(use=FormUse.SEPARATE_QKV)
class Attention(attention.Attention):
    """Attention of timm's ViT and DeiT; the original code works while queries, keys and values are cut together."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        q, k, v = (split_heads(t, self.num_heads) for t in split_qkv(self.qkv(x), self.proj.in_features))
        dropout = self.attn_drop.p if self.training else 0.0
        out = F.scaled_dot_product_attention(
            self.q_norm(q), self.k_norm(k), v, attn_mask, dropout, is_causal, scale=self.scale
        )
        out = self.norm(join_heads(out))
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(out))


@register_compact_form(use=FormUse.SEPARATE_QKV)
class WindowAttention(swin_transformer.WindowAttention):
    """Attention of timm's Swin; the original code works while queries, keys and values are cut together."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (split_heads(t, self.num_heads) for t in split_qkv(self.qkv(x), self.proj.in_features))
        bias = self._get_rel_pos_bias()
        if mask is not None:
            bias = (bias + mask[:, None]).repeat(len(x) // len(mask), 1, 1, 1)
        out = attend(q, k, v, self.scale, bias, self.attn_drop.p if self.training else 0.0)
        return self.proj_drop(self.proj(join_heads(out)))


@register_compact_form
class BeitAttention(beit.Attention):
    """Attention of timm's BEiT."""

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        projected = _project_with_separate_biases(self, x)
        q, k, v = (split_heads(t, self.num_heads) for t in split_qkv(projected, self.proj.in_features))
        bias = shared_rel_pos_bias
        if self.relative_position_bias_table is not None:
            bias = self._get_rel_pos_bias() if bias is None else self._get_rel_pos_bias() + bias
        out = attend(q, k, v, self.scale, bias, self.attn_drop.p if self.training else 0.0)
        return self.proj_drop(self.proj(join_heads(out)))


@register_compact_form
class WindowAttentionV2(swin_transformer_v2.WindowAttention):
    """Attention of timm's Swin v2."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        projected = _project_with_separate_biases(self, x)
        q, k, v = (split_heads(t, self.num_heads) for t in split_qkv(projected, self.proj.in_features))
        table = self.cpb_mlp(self.relative_coords_table).flatten(0, -2)
        area = self.window_size[0] * self.window_size[1]
        bias = table[self.relative_position_index.flatten()].unflatten(0, (area, area)).permute(2, 0, 1)
        scores = cosine_scores(q, k, self.logit_scale) + 16 * bias.sigmoid()
        if mask is not None:
            scores = (scores.unflatten(0, (-1, len(mask))) + mask[:, None]).flatten(0, 1)
        out = attend_with_scores(scores, v, self.attn_drop.p if self.training else 0.0)
        return self.proj_drop(self.proj(join_heads(out)))


@register_compact_form
class PvtV2Attention(pvt_v2.Attention):
    """Attention of timm's PVT v2, with keys and values from a downsampled map."""

    def forward(self, x: Tensor, feat_size: list[int]) -> Tensor:
        q = split_heads(self.q(x), self.num_heads)
        if self.pool is not None or self.sr is not None:
            small = x.transpose(1, 2).unflatten(2, tuple(feat_size))
            small = self.sr(small if self.pool is None else self.pool(small)).flatten(2).transpose(1, 2)
            small = self.norm(small)
            x = small if self.pool is None else self.act(small)
        key_value_widths = [self.q.out_features, self.proj.in_features]
        k, v = (split_heads(t, self.num_heads) for t in self.kv(x).split(key_value_widths, -1))
        out = attend(q, k, v, self.scale, None, self.attn_drop.p if self.training else 0.0)
        return self.proj_drop(self.proj(join_heads(out)))


@register_compact_form
class ClassAttention(cait.ClassAttn):
    """Attention of CaiT's class token."""

    def forward(self, x: Tensor) -> Tensor:
        layers_and_inputs = ((self.q, x[:, :1]), (self.k, x), (self.v, x))
        q, k, v = (split_heads(layer(t), self.num_heads) for layer, t in layers_and_inputs)
        out = attend(q, k, v, self.scale, None, self.attn_drop.p if self.training else 0.0)
        return self.proj_drop(self.proj(join_heads(out)))


@register_compact_form
class TalkingHeadAttention(cait.TalkingHeadAttn):
    """Attention of CaiT's patches, which mixes heads before and after the softmax."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(t, self.num_heads) for t in split_qkv(self.qkv(x), self.proj.in_features))
        scores = self.proj_l((q * self.scale @ k.transpose(-2, -1)).permute(0, 2, 3, 1)).softmax(2)
        weights = self.attn_drop(self.proj_w(scores).permute(0, 3, 1, 2))
        return self.proj_drop(self.proj(join_heads(weights @ v)))


@register_compact_form
class ConvRelPosEnc(coat.ConvRelPosEnc):
    """Position encoding of CoaT: depthwise convolutions of the values, with a window size per set of heads."""

    def forward(self, q: Tensor, v: Tensor, size: tuple[int, int]) -> Tensor:
        image = v[:, :, 1:].transpose(-1, -2).flatten(1, 2).unflatten(2, tuple(size))
        head_sets = image.split([conv.in_channels for conv in self.conv_list], 1)
        encoded = torch.cat([conv(heads) for conv, heads in zip(self.conv_list, head_sets, strict=True)], 1)
        encoded = encoded.flatten(2).unflatten(1, (q.shape[1], -1)).transpose(-1, -2)
        return F.pad(q[:, :, 1:] * encoded, (0, 0, 1, 0))


@register_compact_form
class FactorAttention(coat.FactorAttnConvRelPosEnc):
    """Factorized attention of CoaT: keys weight the values, and queries read the result."""

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        q, k, v = (split_heads(t, self.num_heads) for t in self.qkv(x).chunk(3, -1))
        out = self.scale * (q @ (k.softmax(2).transpose(-1, -2) @ v)) + self.crpe(q, v, size=size)
        return self.proj_drop(self.proj(join_heads(out)))
