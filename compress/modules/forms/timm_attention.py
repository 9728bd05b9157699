"""Compact forms of timm's attention: ViT, Swin, Swin v2, BEiT, PVT v2, Twins, NesT, CrossViT, CaiT and CoaT."""

# mypy: disable-error-code="no-any-return,no-untyped-call,misc,operator,assignment,index"

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import attention, attention_pool, pos_embed_rel
from timm.models import (
    beit,
    cait,
    coat,
    crossvit,
    nest,
    pvt_v2,
    swin_transformer,
    swin_transformer_v2,
    twins,
    vision_transformer_relpos,
)
from torch import Tensor, nn

from ..compact_forms import FormUse, register_compact_form
from .attention_math import (
    WindowPartition,
    attend,
    attend_with_scores,
    cosine_scores,
    join_heads,
    split_heads,
    split_qkv,
)


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


def _has_projections(module: Any) -> bool:
    return isinstance(module.q, nn.Linear) and isinstance(module.proj, nn.Linear)


@register_compact_form(fits=_has_projections)
class AttentionPoolLatent(attention_pool.AttentionPoolLatent):
    """Attention of learned tokens to all tokens, which pools them."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        if self.pos_embed is not None:
            x = x + self.pos_embed.to(x.dtype)
        values = self.proj.in_features
        q = split_heads(self.q(self.latent.expand(len(x), -1, -1)), self.num_heads)
        projected = torch.split_with_sizes(self.kv(x), [self.kv.out_features - values, values], -1)
        k, v = (split_heads(t, self.num_heads) for t in projected)
        out = self.proj_drop(self.proj(join_heads(attend(self.q_norm(q), self.k_norm(k), v, self.scale, attn_mask))))
        if self.mlp is not None:
            out = out + self.mlp(self.norm(out))
        return out[:, 0] if self.pool == "token" else out.mean(1) if self.pool == "avg" else out


@register_compact_form
class RelPosBias(pos_embed_rel.RelPosBias):
    """Bias by relative position, from a table with a column for each head."""

    def get_bias(self) -> Tensor:
        tokens = self.window_area + self.prefix_tokens
        bias = self.relative_position_bias_table[self.relative_position_index].unflatten(0, (tokens, tokens))
        return bias.permute(2, 0, 1).unsqueeze(0).contiguous()


@register_compact_form
class RelPosMlp(pos_embed_rel.RelPosMlp):
    """Bias by relative position, from an MLP with an output for each head."""

    def get_bias(self) -> Tensor:
        by_offset = self.mlp(self.rel_coords_log).flatten(0, -2)
        bias = by_offset[self.relative_position_index].unflatten(0, (self.window_area, self.window_area))
        bias = self.bias_act(bias.permute(2, 0, 1))
        if self.bias_gain is not None:
            bias = self.bias_gain * bias
        padding = (self.prefix_tokens, 0, self.prefix_tokens, 0)
        return F.pad(bias, padding).unsqueeze(0).contiguous()


@register_compact_form
class RelPosAttention(vision_transformer_relpos.RelPosAttention):
    """Attention of timm's ViT with relative positions."""

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        q, k, v = (split_heads(t, self.num_heads) for t in split_qkv(self.qkv(x), self.proj.in_features))
        bias = shared_rel_pos if self.rel_pos is None else self.rel_pos.get_bias()
        dropout = self.attn_drop.p if self.training else 0.0
        out = attend(self.q_norm(q), self.k_norm(k), v, self.scale, bias, dropout)
        return self.proj_drop(self.proj(join_heads(out)))


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
class GlobalSubSampleAttention(twins.GlobalSubSampleAttn):
    """Attention of Twins to a downsampled map."""

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        q = split_heads(self.q(x), self.num_heads)
        if self.sr is not None:
            x = self.norm(self.sr(x.transpose(1, 2).unflatten(2, tuple(size))).flatten(2).transpose(1, 2))
        key_value_widths = [self.q.out_features, self.proj.in_features]
        k, v = (split_heads(t, self.num_heads) for t in torch.split_with_sizes(self.kv(x), key_value_widths, -1))
        out = attend(q, k, v, self.scale, None, self.attn_drop.p if self.training else 0.0)
        return self.proj_drop(self.proj(join_heads(out)))


@register_compact_form
class LocallyGroupedAttention(twins.LocallyGroupedAttn):
    """Attention of Twins within windows."""

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        image = x.unflatten(1, tuple(size))
        windows = WindowPartition(image, [self.ws, self.ws], [0, 0])
        projected = split_qkv(self.qkv(windows.split(image)), self.proj.in_features)
        q, k, v = (split_heads(t, self.num_heads) for t in projected)
        out = attend(q, k, v, self.scale, None, self.attn_drop.p if self.training else 0.0)
        return self.proj_drop(self.proj(windows.join(join_heads(out)).flatten(1, 2)))


@register_compact_form
class BlockAttention(nest.Attention):
    """Attention of NesT within blocks of the image, on (batch, blocks, tokens, channels)."""

    def forward(self, x: Tensor) -> Tensor:
        projected = split_qkv(self.qkv(x.flatten(0, 1)), self.proj.in_features)
        q, k, v = (split_heads(t, self.num_heads) for t in projected)
        out = attend(q, k, v, self.scale, None, self.attn_drop.p if self.training else 0.0)
        out = out.permute(0, 2, 3, 1).flatten(2)  # NesT joins heads with the head as the inner dimension
        return self.proj_drop(self.proj(out.unflatten(0, x.shape[:2])))


@register_compact_form
class CrossAttention(crossvit.CrossAttention):
    """Attention of CrossViT's class token to the patches of the other branch."""

    def forward(self, x: Tensor) -> Tensor:
        layers_and_inputs = ((self.wq, x[:, :1]), (self.wk, x), (self.wv, x))
        q, k, v = (split_heads(layer(t), self.num_heads) for layer, t in layers_and_inputs)
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
    """Attention of CaiT's patches, which mixes heads before and after the softmax, so their numbers may differ."""

    def forward(self, x: Tensor) -> Tensor:
        heads = (self.proj_l.in_features, self.proj_l.in_features, self.proj_w.out_features)
        projected = split_qkv(self.qkv(x), self.proj.in_features)
        q, k, v = (split_heads(t, number) for t, number in zip(projected, heads, strict=True))
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
