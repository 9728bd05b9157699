"""Compact forms of the attention of transformers' CLIP, SigLIP and SigLIP 2, for images and texts."""

# mypy: disable-error-code="no-any-return,misc,no-untyped-call,override,assignment"

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.clip import modeling_clip as clip
from transformers.models.siglip import modeling_siglip as siglip
from transformers.models.siglip2 import modeling_siglip2 as siglip2

from ..compact_forms import register_compact_form
from .transformers_math import Projections, accepts_any_width, attend_by_heads


def _projections(module: Any) -> Projections:
    layers = (module.q_proj, module.k_proj, module.v_proj)
    return Projections(*layers, module.num_heads, module.scale, module.dropout)


@register_compact_form(fits=accepts_any_width)
class CLIPAttention(clip.CLIPAttention):
    """Attention of CLIP."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        inputs, eager = (hidden_states,) * 3, clip.eager_attention_forward
        out, weights = attend_by_heads(self, _projections(self), inputs, attention_mask, eager, kwargs)
        return self.out_proj(out), weights


@register_compact_form(fits=accepts_any_width)
class SiglipAttention(siglip.SiglipAttention):
    """Attention of SigLIP."""

    eager = staticmethod(siglip.eager_attention_forward)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        inputs, options = (hidden_states,) * 3, {"is_causal": self.is_causal}
        out, weights = attend_by_heads(self, _projections(self), inputs, attention_mask, self.eager, options)
        return self.out_proj(out), weights


@register_compact_form(fits=accepts_any_width)
class Siglip2Attention(siglip2.Siglip2Attention):
    """Attention of SigLIP 2."""

    eager = staticmethod(siglip2.eager_attention_forward)
    forward = SiglipAttention.forward
