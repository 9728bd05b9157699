"""Every head has its own scores and keeps as many dimensions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import compress
from cases.families import Small, family
from compress import Plan, PlanError
from compress.modules import attend, join_heads, split_heads
from compress.recipe import Target


def test_heads_keep_as_many_dimensions_each_and_not_the_same() -> None:
    model, x = family("timm vit")
    recipe = {"target": {"channels": False, "attention": "per_head", "round_to": 4}, "budget": {"dims": "50%"}}
    plan = compress.prune(model, recipe | {"timing": {"repeats": 3}}, example_inputs=x, quiet=True).plan
    for kept in plan.keep.values():
        heads = [[i % 64 for i in kept if i // 64 == head] for head in range(3)]
        assert len({len(head) for head in heads}) == 1
        assert len(heads[0]) % 4 == 0
        assert heads[0] != heads[1], "each has its own"
    groups = compress.find_groups(model, x, Target(channels=False, attention="per_head"))
    with pytest.raises(PlanError, match=r"expected as many kept dimensions in each of its 3 heads, got \[2, 1, 0\]"):
        Plan.build(model, groups, {"blocks.0.attn.qkv": [0, 1, 64]})


def test_best_dimensions_of_each_head_are_kept() -> None:
    """Brute force: of all even choices, the one with the largest sum."""
    model, x = Small(), torch.randn(2, 5, 12)
    groups = compress.find_groups(model, x, Target(channels=False, attention="per_head"))
    importance = {"qkv": torch.rand(12, generator=torch.Generator().manual_seed(0))}
    budget = compress.Recipe.load({"budget": {"dims": 8 / 12}}).budget
    kept = compress.budget.choose_widths(groups, importance, budget, Target(min_keep=1))["qkv"]
    runs = importance["qkv"].view(2, 6)
    expected = sorted(head * 6 + d for head in range(2) for d in runs[head].topk(4).indices.tolist())
    assert kept.tolist() == expected


class Shared(nn.Module):
    """Queries and keys pass through norms whose weights all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj, self.norm = nn.Linear(24, 72), nn.Linear(24, 5), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(t, 3) for t in self.qkv(x).chunk(3, -1))
        return self.proj(join_heads(attend(self.norm(q), self.norm(k), v, 0.3)))  # type: ignore[no-any-return]


def test_heads_that_share_tensors_stay_alike_and_it_is_noted() -> None:
    groups = compress.find_groups(Shared(), torch.randn(2, 7, 24), Target(channels=False, attention="per_head"))
    assert [(g.width, g.num_heads) for g in groups] == [(8, 1)]
    assert any("have the same scores in all heads, for example qkv" in note for note in groups.notes)
