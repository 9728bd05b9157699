"""Attention of transformers' models at any width: heads are counted, and `head_dim` is not used."""

# mypy: disable-error-code="no-any-return,no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention_math import split_heads

WIDTH_INDEPENDENT = ("eager", "sdpa")  # implementations that accept values of another width than keys


def accepts_any_width(module: Any) -> bool:
    """Return whether the attention function that the model's configuration selects accepts separate widths."""
    return module.config._attn_implementation in WIDTH_INDEPENDENT


def has_projections(module: Any) -> bool:
    """Return whether a module has the projections that its form uses, which older versions of transformers lack."""
    return hasattr(module, "q_proj") and accepts_any_width(module)


class Projections(NamedTuple):
    """Parts of an attention module, under whatever names its class gives them."""

    query: nn.Module
    key: nn.Module
    value: nn.Module
    num_heads: int
    scale: float
    dropout: float

    @classmethod
    def of(cls, module: Any) -> Projections:
        """Return the parts of a module with the names of ViT."""
        layers = (module.q_proj, module.k_proj, module.v_proj)
        return cls(*layers, module.num_attention_heads, module.scaling, module.attention_dropout)


def attend_by_heads(
    module: Any,
    parts: Projections,
    inputs: tuple[Tensor, Tensor, Tensor],
    bias: Tensor | None,
    eager: Callable[..., Any],
    options: dict[str, Any],
    rotate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the joined heads, of the width of the values, and the attention weights if `eager` computes them.

    Args:
        module: the attention module, as the attention function wants it.
        parts: its projections, of any widths.
        inputs: the inputs of the projections of queries, keys and values.
        bias: what is added to the scores.
        eager: the function that runs if the configuration selects no other.
        options: what the model passes on to the attention function.
        rotate: applies position embeddings to queries and keys.
    """
    layers = (parts.query, parts.key, parts.value)
    q, k, v = (split_heads(layer(x), parts.num_heads) for layer, x in zip(layers, inputs, strict=True))
    if rotate is not None:
        q, k = rotate(q, k)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, eager)
    dropout = parts.dropout if module.training else 0.0
    out, weights = attend(module, q, k, v, bias, dropout=dropout, scaling=parts.scale, **options)
    return out.flatten(2), weights
