"""The compact form of nn.MultiheadAttention: every mask, with and without a batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from compress.modules import (
    compact_form_of,
    use_compact_forms_,
)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("mask", ["none", "bool", "float", "per head", "padding", "both"])
def test_compact_multihead_attention_takes_every_mask(mask: str, weights: bool, first: bool) -> None:
    torch.manual_seed(0)
    original = nn.MultiheadAttention(24, 3, batch_first=first).double().eval()
    changed = use_compact_forms_(copy.deepcopy(original))
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


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_compact_multihead_attention_reads_keys_and_values_of_other_widths(first: bool, bias: bool) -> None:
    torch.manual_seed(0)
    original = nn.MultiheadAttention(24, 3, bias=bias, kdim=10, vdim=14, batch_first=first).double().eval()
    changed = use_compact_forms_(copy.deepcopy(original))
    assert type(changed) is not type(original)
    call = [torch.randn(2, n, width).double() for n, width in ((5, 24), (6, 10), (6, 14))]
    call = call if first else [t.transpose(0, 1) for t in call]
    for one, other in zip(original(*call), changed(*call), strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def test_compact_multihead_attention_without_a_batch() -> None:
    torch.manual_seed(0)
    original = nn.MultiheadAttention(24, 3).double().eval()
    x = torch.randn(5, 24).double()
    for one, other in zip(original(x, x, x), use_compact_forms_(copy.deepcopy(original))(x, x, x), strict=True):
        assert torch.allclose(one, other, atol=1e-12)
    odd = nn.MultiheadAttention(24, 3, add_bias_kv=True)
    assert compact_form_of(odd) is None, "a bias of keys is not known to the compact form"
