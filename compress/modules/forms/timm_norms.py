"""Compact forms of timm's norms over a dimension that was cut, and batch norms that select the channels they read."""

# mypy: disable-error-code="misc,no-any-return,no-untyped-call"

from __future__ import annotations

from timm.layers import grn, norm, norm_act
from torch import Tensor

from ..compact_forms import FormUse, register_compact_form
from ..selective_norms import register_selective_norm
from .norms import (
    cut_layer_norm,
    cut_response_norm,
    cut_rms_norm,
    has_one_weighted_dimension,
    store_dense_width_,
    store_number_of_weights_,
)


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


@register_compact_form(fits=has_one_weighted_dimension, prepare_=store_dense_width_)
class RmsNorm2d(norm.RmsNorm2d):
    """RMS norm of timm over the channels of a feature map."""

    def forward(self, x: Tensor) -> Tensor:
        return cut_rms_norm(self, x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@register_compact_form(fits=has_one_weighted_dimension, prepare_=store_dense_width_)
class RmsNormAct2d(norm_act.RmsNormAct2d):
    """RMS norm of timm over the channels of a feature map, and an activation function."""

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(cut_rms_norm(self, x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)))


@register_compact_form(prepare_=store_number_of_weights_)
class GlobalResponseNorm(grn.GlobalResponseNorm):
    """Global response normalization of ConvNeXt V2."""

    dense: int

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (vector.view(self.wb_shape) for vector in (self.weight, self.bias))
        return cut_response_norm(x, weight, bias, self.dense, self.eps, self.spatial_dim, self.channel_dim)


@register_selective_norm(norm_act.BatchNormAct2d)
class SelectiveBatchNormAct2d(norm_act.BatchNormAct2d):
    """Batch norm of some of the channels of an image, and an activation function."""

    index: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.index_select(1, self.index))
