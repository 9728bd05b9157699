"""Properties of dimensions that follow from the marks of their atoms."""

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compress
from cases import randomise_
from compress.recipe import Target


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


class AttentionAfterBatchNorms(nn.Module):
    """One head on feature maps: queries and keys come from convolutions with batch norms; their width is the scale."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Sequential(nn.Conv2d(6, n, 1), nn.BatchNorm2d(n)) for n in (10, 10, 12))
        self.proj = nn.Conv2d(12, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).flatten(2).transpose(1, 2).unsqueeze(1) for layer in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v).squeeze(1).transpose(1, 2).unflatten(2, x.shape[2:])
        result: Tensor = x + self.proj(out)
        return result


def test_queries_and_keys_after_batch_norms_are_rescaled_once() -> None:
    model = randomise_(AttentionAfterBatchNorms().double()).eval()
    x = torch.randn(2, 6, 4, 4, dtype=torch.float64)
    groups = compress.find_groups(model, x, Target(attention=True))
    assert {g.attention_part for g in groups} == {"qk", "v"}
    for seed in range(10):
        random = np.random.default_rng(seed)
        keep = {g.name: np.sort(random.permutation(g.width)[: random.integers(1, g.width + 1)]) for g in groups}
        plan = compress.Plan.build(model, groups, keep)
        with torch.no_grad():
            zeroed, sliced = plan.zero_(copy.deepcopy(model))(x), plan.apply_(copy.deepcopy(model))(x)
        assert torch.allclose(zeroed, sliced, rtol=1e-10, atol=1e-12)
