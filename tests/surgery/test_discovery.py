"""find_groups: its arguments are checked, and a model without parameters has no groups."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import compress
from helpers.block_network import block_network


def test_what_is_no_model_and_no_target_is_named() -> None:
    x = torch.randn(1, 3, 8, 8)
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module; got str 'resnet18'"):
        compress.find_groups("resnet18", x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module; got the class Identity"):
        compress.find_groups(nn.Identity, x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"target: expected a compress\.recipe\.Target; got dict \{'residual': True\}"):
        compress.find_groups(block_network(), x, {"residual": True})  # type: ignore[arg-type]


def test_model_without_parameters_has_no_groups() -> None:
    groups = compress.find_groups(nn.Sequential(nn.ReLU(), nn.Flatten()), torch.randn(1, 3, 8, 8))
    assert len(groups) == 0
