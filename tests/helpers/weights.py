"""Compare the weights of two models."""

from __future__ import annotations

import torch
from torch import nn


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    one, other = a.state_dict(), b.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
