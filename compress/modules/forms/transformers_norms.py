"""Compact forms of the norms of transformers' models over a dimension that was cut."""

# mypy: disable-error-code="misc,no-untyped-call"

from __future__ import annotations

from torch import Tensor
from transformers.models.convnextv2 import modeling_convnextv2 as convnextv2

from ..compact_forms import register_compact_form
from .norms import cut_response_norm, store_number_of_weights_


@register_compact_form(prepare_=store_number_of_weights_)
class ConvNextV2GRN(convnextv2.ConvNextV2GRN):
    """Global response normalization of ConvNeXt V2."""

    dense: int
    eps = 1e-6  # a constant in the code of transformers

    def forward(self, hidden_states: Tensor) -> Tensor:
        return cut_response_norm(hidden_states, self.weight, self.bias, self.dense, self.eps, (1, 2), -1)
