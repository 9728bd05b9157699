"""Random small networks: every group that is offered can be cut exactly, and enough groups are offered."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import compress
from cases import distance, random_keep, randomise_, run, same_bits, zero_scores_
from cases.networks_plain import Excite, cbr
from compress import Plan
from compress.surgery.gates import attach_, fold_

KINDS = (
    *("conv", "conv", "act", "norm", "residual", "branch", "depthwise", "grouped", "excite", "shuffle", "dense"),
    *("pool", "pad", "transposed", "split", "scale", "bottleneck", "sum", "again"),
)
Step = tuple[str, int]
steps = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 5)), min_size=2, max_size=7)


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Random(nn.Module):
    """A stem, a list of steps, a head."""

    def __init__(self, plan: list[Step]) -> None:
        super().__init__()
        self.stem = cbr(2, 8)
        self.kinds: list[str] = []
        self.steps = nn.ModuleList()
        width = 8
        for kind, choice in plan:
            if kind == "again" and not self.kinds:
                continue
            step, width = make(kind, choice, width)
            self.kinds.append(kind)
            self.steps.append(step)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for kind, step in zip(self.kinds, self.steps, strict=True):
            x = apply(kind, step, x)
        return self.head(x.mean((2, 3)))


def make(kind: str, choice: int, width: int) -> tuple[nn.Module, int]:
    """One step and the width that it leaves."""
    wide = (4, 6, 8, 8, 10, 12)[choice]
    activations = (nn.ReLU, nn.Sigmoid, nn.Hardswish, nn.GELU, nn.ReLU6, nn.Softplus)
    if kind == "conv":
        return nn.Conv2d(width, wide, (1, 3)[choice % 2], padding=choice % 2, bias=choice > 2), wide
    if kind == "act":
        return activations[choice](), width
    if kind == "norm":
        return (nn.BatchNorm2d(width), nn.InstanceNorm2d(width, affine=True), nn.PReLU(width))[choice % 3], width
    if kind in ("residual", "bottleneck", "again"):
        inner = wide if kind == "bottleneck" else width
        return nn.Sequential(cbr(width, inner), nn.Conv2d(inner, width, 1), nn.BatchNorm2d(width)), width
    if kind == "branch":
        return nn.ModuleList([cbr(width, wide, 1), cbr(width, 5), nn.MaxPool2d(3, 1, 1)]), wide + 5 + width
    if kind == "depthwise":
        return nn.Conv2d(width, width * (1 + choice % 2), 3, padding=1, groups=width), width * (1 + choice % 2)
    if kind == "grouped":
        groups = next(g for g in (4, 3, 2, 1) if width % g == 0 and (g < 4 or choice % 2))
        return nn.Conv2d(width, 2 * groups, 3, padding=1, groups=groups), 2 * groups
    if kind == "excite":
        return Excite(width, 3, nn.Sigmoid() if choice % 2 else nn.Hardsigmoid()), width
    if kind == "shuffle":
        return nn.ChannelShuffle(2) if width % 2 == 0 else nn.Identity(), width
    if kind == "dense":
        return nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 4, 3, padding=1)), width + 4
    if kind == "split":
        return (cbr(width // 2, wide), wide) if width % 2 == 0 else (nn.Identity(), width)
    if kind == "transposed":
        return nn.ConvTranspose2d(width, wide, 3, padding=1, bias=choice > 2), wide
    if kind == "scale":
        return Scale(width), width
    if kind == "sum":
        return nn.ModuleList([nn.Conv2d(width, wide, 1), nn.Conv2d(width, wide, 3, padding=1)]), wide
    return (nn.AvgPool2d(3, 1, 1) if kind == "pool" else nn.ConstantPad2d(1, 0.3)), width


def apply(kind: str, step: Any, x: Tensor) -> Tensor:
    if kind in ("residual", "bottleneck"):
        return F.relu(x + step(x))
    if kind == "again":
        return step(step(x))
    if kind in ("branch", "dense"):
        parts = [x, step(x)] if kind == "dense" else [part(x) for part in step]
        return torch.cat(parts, 1)
    if kind == "split" and not isinstance(step, nn.Identity):
        a, b = x.chunk(2, 1)
        return step(torch.sigmoid(a) * b)
    if kind == "sum":
        return step[0](x) - step[1](x)
    return step(x)


OFFERED: list[tuple[int, int]] = []  # groups that were offered and refused, over all examples


@settings(max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(plan=steps, ratio=st.sampled_from((0.2, 0.5, 0.8)), number=st.integers(0, 3))
def check_random_network(plan: list[Step], ratio: float, number: int) -> None:
    torch.manual_seed(number)
    model = randomise_(Random(plan).double(), number).eval()
    x = torch.randn(2, 2, 6, 6).double()
    groups = compress.find_groups(model, x)
    OFFERED.append((len(groups), sum("output of the network" not in r.reason for r in groups.refused)))
    keep = random_keep(groups, ratio, number)
    cut = Plan.build(model, groups, keep)
    zeroed = run(cut.zero_(copy.deepcopy(model)), x)
    sliced = cut.apply_(copy.deepcopy(model))
    assert distance(zeroed, run(sliced, x)) <= 1e-10
    kept = [len(keep[name]) for name in groups.cost.names]
    assert sum(p.numel() for p in sliced.parameters()) == int(groups.cost.params(kept))
    dense = run(model, x)
    scores = attach_(model, groups)
    assert same_bits(run(model, x), dense)
    zero_scores_(scores, keep)
    scored = run(model, x)
    assert same_bits(scored, zeroed)
    assert same_bits(run(fold_(model), x), scored)


def test_random_networks_are_cut_exactly() -> None:
    OFFERED.clear()
    check_random_network()
    offered, refused = sum(o for o, _ in OFFERED), sum(r for _, r in OFFERED)
    assert offered >= 2.5 * len(OFFERED)
    assert refused <= 0.1 * offered
