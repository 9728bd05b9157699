"""Properties of dimensions that follow from the marks of their atoms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compress


class CosineAttention(nn.Module):
    """Attention with normalized queries and keys and the default scale."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v)
        return self.proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def test_normalized_queries_with_a_scale_from_their_width_are_refused() -> None:
    groups = compress.find_groups(CosineAttention(), torch.randn(2, 5, 16), compress.recipe.Target(attention=True))
    reasons = {refused.reason for refused in groups.refused}
    assert len(groups) == 0
    assert "is normalized without a weight, and the scale of its attention depends on its width" in reasons
