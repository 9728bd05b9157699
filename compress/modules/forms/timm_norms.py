"""Compact forms of timm's layer norms and RMS norm over a dimension that was cut."""

# mypy: disable-error-code="misc"

from __future__ import annotations

from timm.layers import norm
from torch import Tensor

from ..compact_forms import FormUse, register_compact_form
from .norms import cut_layer_norm, cut_rms_norm, has_one_weighted_dimension, store_dense_width_


@register_compact_form(use=FormUse.WHEN_CUT, fits=has_one_weighted_dimension, prepare_=store_dense_width_)
class TimmLayerNorm(norm.LayerNorm):
    """Layer norm of timm."""

    def forward(self, x: Tensor) -> Tensor:
        return cut_layer_norm(self, x)


@register_compact_form(use=FormUse.WHEN_CUT, fits=has_one_weighted_dimension, prepare_=store_dense_width_)
class LayerNorm2d(norm.LayerNorm2d):
    """Layer norm of timm over the channels of a feature map."""

    def forward(self, x: Tensor) -> Tensor:
        return cut_layer_norm(self, x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@register_compact_form(fits=has_one_weighted_dimension, prepare_=store_dense_width_)
class TimmRmsNorm(norm.RmsNorm):
    """RMS norm of timm."""

    def forward(self, x: Tensor) -> Tensor:
        return cut_rms_norm(self, x)
