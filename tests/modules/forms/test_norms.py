"""Norms over a dimension that was cut divide by the dense width."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import compress


def test_norms_count_the_dense_width() -> None:
    """A compact layer norm against torch's own on a vector with zeros in it."""
    torch.manual_seed(0)
    for norm in (nn.LayerNorm(9), nn.RMSNorm(9, eps=1e-3)):
        norm = norm.double()
        x, kept = torch.randn(4, 9).double(), torch.tensor([0, 2, 3, 7])
        with torch.no_grad():
            for p in norm.parameters():
                p.copy_(torch.rand_like(p))
            zeros = torch.zeros_like(x)
            zeros[:, kept] = x[:, kept]
            expected = norm(zeros)[:, kept]
            compress.modules.use_compact_form_(norm)
            for p in norm.parameters():
                p.data = p.data[kept]
            assert torch.allclose(norm(x[:, kept]), expected, atol=1e-14)
    with pytest.raises(TypeError, match="Conv2d has no compact form"):
        compress.modules.use_compact_form_(nn.Conv2d(1, 1, 1))
