"""Compact forms of the attention of transformers' VideoMAE and TimeSformer."""

# mypy: disable-error-code="no-any-return,misc,no-untyped-call,override"

from __future__ import annotations

from torch import Tensor
from transformers.models.timesformer import modeling_timesformer as timesformer
from transformers.models.videomae import modeling_videomae as videomae

from ..compact_forms import register_compact_form
from .attention_math import join_heads, split_heads
from .transformers_math import Projections, accepts_any_width, attend_by_heads


@register_compact_form(fits=accepts_any_width)
class VideoMAESelfAttention(videomae.VideoMAESelfAttention):
    """Attention of VideoMAE, without its output layer."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        layers = (self.query, self.key, self.value)
        parts = Projections(*layers, self.num_attention_heads, self.scaling, self.dropout_prob)
        options, eager = {"is_causal": self.is_causal}, videomae.eager_attention_forward
        return attend_by_heads(self, parts, (hidden_states,) * 3, None, eager, options)


@register_compact_form
class TimesformerSelfAttention(timesformer.TimesformerSelfAttention):
    """Attention of TimeSformer, without its output layer; queries, keys and values have one width."""

    def forward(self, hidden_states: Tensor, output_attentions: bool = False) -> tuple[Tensor, ...]:
        q, k, v = (split_heads(t, self.num_heads) for t in self.qkv(hidden_states).chunk(3, -1))
        weights = self.attn_drop((q @ k.transpose(-2, -1) * self.scale).softmax(-1))
        out = join_heads(weights @ v)
        return (out, weights) if output_attentions else (out,)
