"""Compact forms of the attention of transformers' ViT, DeiT, DINOv2, I-JEPA, BEiT, ViViT and Swin.

The originals reshape queries, keys and values by one `head_dim`; these forms count heads instead. The attention itself
is the function that the model's configuration selects.
"""

# mypy: disable-error-code="no-any-return,misc,no-untyped-call,override,assignment"

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.beit import modeling_beit as beit
from transformers.models.deit import modeling_deit as deit
from transformers.models.dinov2 import modeling_dinov2 as dinov2
from transformers.models.dinov2_with_registers import modeling_dinov2_with_registers as dinov2_registers
from transformers.models.ijepa import modeling_ijepa as ijepa
from transformers.models.swin import modeling_swin as swin
from transformers.models.vit import modeling_vit as vit
from transformers.models.vivit import modeling_vivit as vivit

from ..compact_forms import register_compact_form
from .transformers_math import Projections, attend_by_heads, has_projections


@register_compact_form(fits=has_projections)
class ViTAttention(vit.ViTAttention):
    """Attention of ViT."""

    eager = staticmethod(vit.eager_attention_forward)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        inputs = (hidden_states,) * 3
        out, weights = attend_by_heads(self, Projections.of(self), inputs, attention_mask, self.eager, kwargs)
        return self.o_proj(out), weights


@register_compact_form(fits=has_projections)
class DeiTAttention(deit.DeiTAttention):
    """Attention of DeiT."""

    eager = staticmethod(deit.eager_attention_forward)
    forward = ViTAttention.forward


@register_compact_form(fits=has_projections)
class Dinov2Attention(dinov2.Dinov2Attention):
    """Attention of DINOv2."""

    eager = staticmethod(dinov2.eager_attention_forward)
    forward = ViTAttention.forward


@register_compact_form(fits=has_projections)
class Dinov2WithRegistersAttention(dinov2_registers.Dinov2WithRegistersAttention):
    """Attention of DINOv2 with registers."""

    eager = staticmethod(dinov2_registers.eager_attention_forward)
    forward = ViTAttention.forward


@register_compact_form(fits=has_projections)
class IJepaAttention(ijepa.IJepaAttention):
    """Attention of I-JEPA."""

    eager = staticmethod(ijepa.eager_attention_forward)
    forward = ViTAttention.forward


@register_compact_form(fits=has_projections)
class BeitAttention(beit.BeitAttention):
    """Attention of BEiT; the bias by relative position comes as the mask."""

    eager = staticmethod(beit.eager_attention_forward)
    forward = ViTAttention.forward


@register_compact_form(fits=has_projections)
class VivitAttention(vivit.VivitAttention):
    """Attention of ViViT."""

    eager = staticmethod(vivit.eager_attention_forward)
    forward = ViTAttention.forward


@register_compact_form(fits=has_projections)
class SwinAttention(swin.SwinAttention):
    """Attention of Swin, with a bias by relative position and a mask between shifted windows."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        bias = self.relative_position_bias()
        if attention_mask is not None:  # (windows of an image, tokens, tokens)
            masks = attention_mask.repeat(len(hidden_states) // len(attention_mask), 1, 1)
            bias = bias + masks[:, None]
        inputs, eager = (hidden_states,) * 3, swin.eager_attention_forward
        out, weights = attend_by_heads(self, Projections.of(self), inputs, bias, eager, kwargs)
        return self.o_proj(out), weights
