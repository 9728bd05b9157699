"""Compact forms of attention: the same function, the same parameters, any width."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from case import distance, run
from families import BOTH, FAMILIES, family
from torch import Tensor, nn

import compress
from compress import Plan
from compress.attention import attend, compact, form_of, join_heads, make_compact_, split_heads


@pytest.mark.parametrize("name", FAMILIES)
def test_compact_form_computes_what_the_original_does(name: str) -> None:
    model, x = family(name)
    changed = make_compact_(copy.deepcopy(model))
    if all(type(a) is type(b) for a, b in zip(model.modules(), changed.modules(), strict=True)):
        pytest.skip("needs no compact form")
    assert distance(run(changed, x), run(model, x)) < 1e-12
    assert list(changed.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("mask", ["none", "bool", "float", "per head", "padding", "both"])
def test_compact_multihead_attention_takes_every_mask(mask: str, weights: bool, first: bool) -> None:
    torch.manual_seed(0)
    original = nn.MultiheadAttention(24, 3, batch_first=first).double().eval()
    changed = make_compact_(copy.deepcopy(original))
    q, k = torch.randn(2, 5, 24).double(), torch.randn(2, 6, 24).double()
    given: dict[str, Any] = {"need_weights": weights, "average_attn_weights": mask != "per head"}
    if mask in ("bool", "both"):
        given["attn_mask"] = torch.rand(5, 6) > 0.7
    elif mask == "float":
        given["attn_mask"] = torch.randn(5, 6).double()
    elif mask == "per head":
        given["attn_mask"] = torch.randn(6, 5, 6).double()
    if mask in ("padding", "both"):
        given["key_padding_mask"] = torch.tensor([[False] * 4 + [True] * 2, [False] * 6])
    call = (q, k, k) if first else tuple(t.transpose(0, 1) for t in (q, k, k))
    for one, other in zip(original(*call, **given), changed(*call, **given), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert torch.allclose(one, other, atol=1e-12)


def test_compact_multihead_attention_without_a_batch() -> None:
    torch.manual_seed(0)
    original = nn.MultiheadAttention(24, 3).double().eval()
    x = torch.randn(5, 24).double()
    for one, other in zip(original(x, x, x), make_compact_(copy.deepcopy(original))(x, x, x), strict=True):
        assert torch.allclose(one, other, atol=1e-12)
    odd = nn.MultiheadAttention(24, 3, add_bias_kv=True)
    assert form_of(odd) is None, "a bias of keys is not known to the compact form"


class Known(nn.Module):
    """Attention for one width only: the last reshape takes the width of the input."""

    def __init__(self, width: int = 24, heads: int = 3) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        out = attend(q, k, v, self.scale)
        return self.proj(out.transpose(1, 2).reshape(b, n, c))  # type: ignore[no-any-return]


def test_attention_of_ones_own_gets_a_compact_form_in_a_few_lines() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(Known(), nn.Linear(24, 5)).double()
    x = torch.randn(2, 7, 24).double()
    before = compress.find_groups(network, x, BOTH)
    assert not len(before)
    assert any("does not run at another width" in r.reason for r in before.refused)
    assert any("A compact form of Known would do: see compress/attention.py" in r.reason for r in before.refused)

    @compact
    class Told(Known):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (split_heads(t, self.heads) for t in self.qkv(x).chunk(3, -1))
            return self.proj(join_heads(attend(q, k, v, self.scale)))  # type: ignore[no-any-return]

    groups = compress.find_groups(network, x, BOTH)
    assert [(g.name, g.width) for g in groups] == [("0.qkv", 8)]
    plan = Plan.build(network, groups, {"0.qkv": [0, 3, 4]})
    zeroed = run(plan.zero_(copy.deepcopy(network)), x)
    assert distance(run(plan.apply_(copy.deepcopy(network)), x), zeroed) < 1e-12
    with pytest.raises(TypeError, match="expected a subclass of the attention it stands for"):
        compact(nn.Module)
    with pytest.raises(compress.PlanError, match=r"expected .*Known, which has a compact form; got Linear"):
        plan.apply_(nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 5)))
