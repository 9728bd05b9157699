"""Compact forms of the attention of transformers' DETR and YOLOS."""

# mypy: disable-error-code="no-any-return,misc,no-untyped-call,override,assignment"

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.detr import modeling_detr as detr
from transformers.models.yolos import modeling_yolos as yolos

from ..compact_forms import FormUse, register_compact_form
from .transformers_math import Projections, accepts_any_width, attend_by_heads, has_projections


def _store_num_heads_(module: Any) -> None:
    """Store the number of heads, which the original derives from `head_dim`, the width of queries, keys and values."""
    module.num_heads = module.q_proj.out_features // module.head_dim


def _detr_projections(module: Any) -> Projections:
    layers = (module.q_proj, module.k_proj, module.v_proj)
    return Projections(*layers, module.num_heads, module.scaling, module.attention_dropout)


def _add(x: Tensor, position: Tensor | None) -> Tensor:
    return x if position is None else x + position


@register_compact_form(use=FormUse.SEPARATE_QKV, fits=has_projections, prepare_=_store_num_heads_)
class DetrSelfAttention(detr.DetrSelfAttention):
    """Self-attention of DETR; positions are added to the inputs of queries and keys."""

    num_heads: int

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        located = _add(hidden_states, position_embeddings)
        inputs, eager = (located, located, hidden_states), detr.eager_attention_forward
        out, weights = attend_by_heads(self, _detr_projections(self), inputs, attention_mask, eager, kwargs)
        return self.o_proj(out), weights


@register_compact_form(use=FormUse.SEPARATE_QKV, fits=has_projections, prepare_=_store_num_heads_)
class DetrCrossAttention(detr.DetrCrossAttention):
    """Attention of DETR's object queries to the image."""

    num_heads: int

    def forward(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: Tensor | None = None,
        encoder_position_embeddings: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        keys = _add(key_value_states, encoder_position_embeddings)
        inputs, eager = (_add(hidden_states, position_embeddings), keys, key_value_states), detr.eager_attention_forward
        out, weights = attend_by_heads(self, _detr_projections(self), inputs, attention_mask, eager, kwargs)
        return self.o_proj(out), weights


@register_compact_form(fits=accepts_any_width)
class YolosSelfAttention(yolos.YolosSelfAttention):
    """Attention of YOLOS, without its output layer."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        layers = (self.query, self.key, self.value)
        parts = Projections(*layers, self.num_attention_heads, self.scaling, self.dropout_prob)
        options = {"is_causal": self.is_causal, **kwargs}
        return attend_by_heads(self, parts, (hidden_states,) * 3, None, yolos.eager_attention_forward, options)
