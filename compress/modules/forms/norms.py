"""Norms over a dimension that was cut, in which removed zeros still count; compact forms of torch's own norms.

A layer norm over d numbers of which only k can differ from zero is, with sums over those k,

    mean = sum x / d,   var = (sum (x - mean)^2 + (d - k) mean^2) / d,   y = (x - mean) / sqrt(var + eps) * w + b

and an RMS norm is analogous. So a residual stream that passes through norms, and normalized queries and keys, can be
cut exactly. Global response normalization (ConvNeXt V2) divides by the mean over channels, which is sum / d as well.
"""

# mypy: disable-error-code="misc,no-any-return"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..compact_forms import FormUse, register_compact_form


def has_one_weighted_dimension(module: Any) -> bool:
    """Return whether a norm has a weight and acts on the last dimension only."""
    return module.weight is not None and len(module.normalized_shape) == 1


def store_dense_width_(module: Any) -> None:
    """Store the dense width, by which the norm still divides after it was cut."""
    module.dense = module.normalized_shape[0]


def cut_layer_norm(module: Any, x: Tensor) -> Tensor:
    """Return the layer norm along the last dimension, of which `module.dense - x.shape[-1]` zeros were removed."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = wide.sum(-1, keepdim=True) / module.dense
    centered = wide - mean
    num_removed = module.dense - x.shape[-1]
    var = (centered.square().sum(-1, keepdim=True) + num_removed * mean.square()) / module.dense
    out = centered * torch.rsqrt(var + module.eps) * module.weight
    return (out if module.bias is None else out + module.bias).to(x.dtype)


def cut_rms_norm(module: Any, x: Tensor) -> Tensor:
    """Return the RMS norm along the last dimension; removed zeros add nothing to the norm of the vector."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    eps = torch.finfo(x.dtype).eps if module.eps is None else module.eps
    mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / module.dense
    return (wide / torch.sqrt(mean_square + eps) * module.weight).to(x.dtype)


def store_number_of_weights_(module: Any) -> None:
    """Store the dense width of a norm that does not say it."""
    module.dense = module.weight.numel()


def cut_response_norm(
    x: Tensor, weight: Tensor, bias: Tensor, dense: int, eps: float, spatial_dims: tuple[int, int], channel_dim: int
) -> Tensor:
    """Return the global response normalization of a feature map, of which `dense - len(weight)` zeros were removed.

    Args:
        x: the feature map.
        weight: the factor of each channel, of a shape that broadcasts with `x`.
        bias: the bias of each channel, likewise.
        dense: the number of channels before the cut, over which the mean is taken.
        eps: what is added to the mean.
        spatial_dims: height and width.
        channel_dim: the dimension of the channels.
    """
    response = torch.linalg.vector_norm(x, dim=spatial_dims, keepdim=True)
    mean = response.sum(channel_dim, keepdim=True) / dense
    return x * (response / (mean + eps) * weight + 1) + bias  # as a product: `x +` would look like a residual stream


@register_compact_form(use=FormUse.WHEN_CUT, fits=has_one_weighted_dimension, prepare_=store_dense_width_)
class LayerNorm(nn.LayerNorm):
    """Layer norm of torch."""

    dense: int

    def forward(self, x: Tensor) -> Tensor:
        return cut_layer_norm(self, x)


@register_compact_form(fits=has_one_weighted_dimension, prepare_=store_dense_width_)
class RMSNorm(nn.RMSNorm):
    """RMS norm of torch; traced in this form, whose operators show that zeros add nothing."""

    dense: int

    def forward(self, x: Tensor) -> Tensor:
        return cut_rms_norm(self, x)
