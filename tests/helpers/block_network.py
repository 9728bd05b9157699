"""A network with one residual block, and a recipe for half of its multiply-adds."""

from __future__ import annotations

from torch import nn

from cases.networks_plain import Block, cbr, head

HALF_MACS = {"budget": {"macs": "50%"}}


def block_network() -> nn.Module:
    return nn.Sequential(cbr(3, 6), Block(6, 6), head(6)).eval()
