"""Compact forms of attention with rotary position embeddings in transformers: DINOv3.

Rotation mixes two dimensions of a head by an angle that depends on both, so queries and keys stay whole. Values are not
rotated: they have a width of their own.
"""

# mypy: disable-error-code="no-any-return,misc,no-untyped-call,override"

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from transformers.models.dinov3_vit import modeling_dinov3_vit as dinov3

from ..compact_forms import register_compact_form
from .transformers_math import Projections, accepts_any_width, attend_by_heads


@register_compact_form(fits=accepts_any_width)
class DINOv3ViTAttention(dinov3.DINOv3ViTAttention):
    """Attention of DINOv3."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        assert position_embeddings is not None
        cos, sin = position_embeddings
        layers = (self.q_proj, self.k_proj, self.v_proj)
        parts = Projections(*layers, self.num_heads, self.scaling, self.dropout)
        rotate = partial(dinov3.apply_rotary_pos_emb, cos=cos, sin=sin)
        inputs, eager = (hidden_states,) * 3, dinov3.eager_attention_forward
        out, weights = attend_by_heads(self, parts, inputs, attention_mask, eager, kwargs, rotate)
        return self.o_proj(out), weights
