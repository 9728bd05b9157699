"""Compact forms of ultralytics' attention: the same function in both modes, traced at one size and run at another."""

from __future__ import annotations

import copy

import pytest
import torch

from compress.modules import use_compact_forms_

block = pytest.importorskip("ultralytics.nn.modules.block")
MODULES = {
    "position sensitive": lambda: block.Attention(24, num_heads=3, attn_ratio=0.5),
    "one area": lambda: block.AAttn(24, num_heads=3, area=1),
    "four areas": lambda: block.AAttn(24, num_heads=3, area=4),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_form_computes_what_the_original_does(name: str, training: bool) -> None:
    torch.manual_seed(0)
    original = MODULES[name]().double().train(training)
    changed = use_compact_forms_(copy.deepcopy(original))
    assert type(changed) is not type(original)
    x = torch.randn(2, 24, 8, 6).double()
    assert torch.allclose(changed(x), original(x), atol=1e-12)


@pytest.mark.parametrize("name", MODULES)
def test_traced_form_runs_at_other_sizes(name: str) -> None:
    torch.manual_seed(0)
    form = use_compact_forms_(MODULES[name]().double().eval())
    traced, x = torch.jit.trace(form, torch.randn(1, 24, 4, 4).double()), torch.randn(2, 24, 8, 6).double()
    assert torch.allclose(traced(x), form(x), atol=1e-12)
