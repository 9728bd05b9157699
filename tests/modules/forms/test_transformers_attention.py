"""Compact forms of transformers' attention: every implementation that fits, and the attention weights they return."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from cases.families import family
from compress.modules import compact_form_of, use_compact_forms_

NAMES = ["transformers vit, eager", "transformers dinov2, eager", "transformers swin, eager"]


def attention_of(model: nn.Module) -> Any:
    return next(module for module in model.modules() if hasattr(module, "q_proj"))


@pytest.mark.parametrize("name", NAMES)
def test_attention_weights_are_those_of_the_original(name: str) -> None:
    model, x = family(name)
    changed = use_compact_forms_(copy.deepcopy(model))
    assert type(attention_of(changed)) is not type(attention_of(model))
    with torch.no_grad():
        expected, weights = (m.model(x, output_attentions=True).attentions for m in (model, changed))
    assert len(expected) == len(weights) > 0
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(expected, weights, strict=True))


@pytest.mark.parametrize(("implementation", "fits"), [("eager", True), ("sdpa", True), ("flex_attention", False)])
def test_form_fits_implementations_that_accept_two_widths(implementation: str, fits: bool) -> None:
    attention = attention_of(family("transformers vit")[0])
    attention.config._attn_implementation = implementation
    assert (compact_form_of(attention) is not None) == fits


def test_form_does_not_fit_attention_of_older_versions() -> None:
    attention = attention_of(family("transformers vit")[0])
    del attention.q_proj
    assert compact_form_of(attention) is None
