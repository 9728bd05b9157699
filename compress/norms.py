"""Compact forms of norms over a dimension that was cut: zeros that are gone still count in the mean.

A layer norm over d numbers of which only k can differ from zero is, with sums over those k,

    mean = sum x / d,   var = (sum (x - mean)^2 + (d - k) mean^2) / d,   y = (x - mean) / sqrt(var + eps) * w + b

and an RMS norm likewise. So a stream that passes through norms, and queries and keys that are normed, can be cut
exactly.
"""

# mypy: disable-error-code="misc,no-any-return"

from __future__ import annotations

from typing import Any

import torch
from timm.layers import norm as timm_norms
from torch import Tensor, nn

from .attention import compact


class _Counted:
    """What the dense norm divides by."""

    when = "cut"
    dense: int

    @staticmethod
    def fits(module: Any) -> bool:
        return module.weight is not None and len(module.normalized_shape) == 1

    @staticmethod
    def note_(module: Any) -> None:
        module.dense = module.normalized_shape[0]


def _normed(module: Any, x: Tensor) -> Tensor:
    """The layer norm above along the last dimension."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = wide.sum(-1, keepdim=True) / module.dense
    centred = wide - mean
    gone = module.dense - x.shape[-1]
    var = (centred.square().sum(-1, keepdim=True) + gone * mean.square()) / module.dense
    out = centred * torch.rsqrt(var + module.eps) * module.weight
    return (out if module.bias is None else out + module.bias).to(x.dtype)


@compact
class LayerNorm(nn.LayerNorm):
    """torch's."""

    when, fits, note_ = _Counted.when, _Counted.fits, _Counted.note_

    def forward(self, x: Tensor) -> Tensor:
        return _normed(self, x)


@compact
class TimmLayerNorm(timm_norms.LayerNorm):
    """timm's."""

    when, fits, note_ = _Counted.when, _Counted.fits, _Counted.note_

    def forward(self, x: Tensor) -> Tensor:
        return _normed(self, x)


@compact
class LayerNorm2d(timm_norms.LayerNorm2d):
    """timm's, over the channels of a map."""

    when, fits, note_ = _Counted.when, _Counted.fits, _Counted.note_

    def forward(self, x: Tensor) -> Tensor:
        return _normed(self, x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def _scaled(module: Any, x: Tensor) -> Tensor:
    """An RMS norm: what is zero adds nothing to the norm of a vector."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    eps = torch.finfo(x.dtype).eps if module.eps is None else module.eps
    size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / module.dense
    return (wide / torch.sqrt(size + eps) * module.weight).to(x.dtype)


@compact
class RMSNorm(nn.RMSNorm):
    """torch's: made of operators that show what it does, so it is followed in this form."""

    fits, note_ = _Counted.fits, _Counted.note_

    def forward(self, x: Tensor) -> Tensor:
        return _scaled(self, x)


@compact
class TimmRmsNorm(timm_norms.RmsNorm):
    """timm's."""

    fits, note_ = _Counted.fits, _Counted.note_

    def forward(self, x: Tensor) -> Tensor:
        return _scaled(self, x)
