"""Compact forms of the attention of transformers' ViT, DeiT, DINOv2 and Swin.

The originals reshape queries, keys and values by one `head_dim`; these forms count heads instead. The attention itself
is the function that the model's configuration selects.
"""

# mypy: disable-error-code="no-any-return,misc,no-untyped-call,override,assignment"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deit import modeling_deit as deit
from transformers.models.dinov2 import modeling_dinov2 as dinov2
from transformers.models.dinov2_with_registers import modeling_dinov2_with_registers as dinov2_registers
from transformers.models.swin import modeling_swin as swin
from transformers.models.vit import modeling_vit as vit

from ..compact_forms import register_compact_form
from .attention_math import split_heads

WIDTH_INDEPENDENT = ("eager", "sdpa")  # implementations that accept values of another width than keys


def _fits(module: Any) -> bool:
    has_separate_projections = hasattr(module, "q_proj")  # not before version 5
    return has_separate_projections and module.config._attn_implementation in WIDTH_INDEPENDENT


def _attend(
    module: Any, x: Tensor, bias: Tensor | None, eager: Callable[..., Any], options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Return the output of a self-attention module and, if `eager` computes it, the attention weights.

    Args:
        module: the module, with projections of any widths.
        x: its input.
        bias: what is added to the scores.
        eager: the function that runs if the configuration selects no other.
        options: what the model passes on to the attention function.
    """
    layers = (module.q_proj, module.k_proj, module.v_proj)
    q, k, v = (split_heads(layer(x), module.num_attention_heads) for layer in layers)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, eager)
    dropout = module.attention_dropout if module.training else 0.0
    out, weights = attend(module, q, k, v, bias, dropout=dropout, scaling=module.scaling, **options)
    return module.o_proj(out.flatten(2)), weights


@register_compact_form(fits=_fits)
class ViTAttention(vit.ViTAttention):
    """Attention of ViT."""

    eager = staticmethod(vit.eager_attention_forward)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        return _attend(self, hidden_states, attention_mask, self.eager, kwargs)


@register_compact_form(fits=_fits)
class DeiTAttention(deit.DeiTAttention):
    """Attention of DeiT."""

    eager = staticmethod(deit.eager_attention_forward)
    forward = ViTAttention.forward


@register_compact_form(fits=_fits)
class Dinov2Attention(dinov2.Dinov2Attention):
    """Attention of DINOv2."""

    eager = staticmethod(dinov2.eager_attention_forward)
    forward = ViTAttention.forward


@register_compact_form(fits=_fits)
class Dinov2WithRegistersAttention(dinov2_registers.Dinov2WithRegistersAttention):
    """Attention of DINOv2 with registers."""

    eager = staticmethod(dinov2_registers.eager_attention_forward)
    forward = ViTAttention.forward


@register_compact_form(fits=_fits)
class SwinAttention(swin.SwinAttention):
    """Attention of Swin, with a bias by relative position and a mask between shifted windows."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        bias = self.relative_position_bias()
        if attention_mask is not None:  # (windows of an image, tokens, tokens)
            masks = attention_mask.repeat(len(hidden_states) // len(attention_mask), 1, 1)
            bias = bias + masks[:, None]
        return _attend(self, hidden_states, bias, swin.eager_attention_forward, kwargs)
