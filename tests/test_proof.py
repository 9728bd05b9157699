"""What is said of a group in the wrong is found out: planted errors, one at a time, in networks of all widths."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import timm
import torch
from case import Net
from networks_plain import cbr, head
from torch import Tensor, nn

import compress
from compress.groups import Group, Groups, Slot
from compress.proof import prove
from compress.recipe import Target
from compress.silence import MANY, silenced

DIMENSIONS = Target(channels=False, attention=True, mlp=True)


def _shuffled(x: Tensor) -> Tensor:
    return x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def convolutional(width: int) -> nn.Module:
    """A stream with a branch, a shuffle, two that are concatenated, and layers with biases."""

    def run(net: Net, x: Tensor) -> Tensor:
        x = net.stem(x)
        x = x + net.second(net.first(x))
        x = _shuffled(net.third(x))
        return net.head(torch.cat([net.left(x), net.right(x)], 1))

    return Net(
        run,
        stem=cbr(3, width),
        first=cbr(width, width + 8, 1),
        second=nn.Conv2d(width + 8, width, 3, padding=1),
        third=cbr(width, 2 * width),
        left=cbr(2 * width, width),
        right=nn.Sequential(nn.Conv2d(2 * width, width, 1), nn.GELU()),
        head=head(2 * width),
    )


def transformer(width: int) -> nn.Module:
    options = {"img_size": 16, "patch_size": 8, "depth": 2, "num_heads": 2, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", embed_dim=width, **options)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, Target]] = {
    "narrow": (lambda: convolutional(12), 12, Target(residual=True)),
    "wide": (lambda: convolutional(80), 12, Target(residual=True)),
    "transformer": (lambda: transformer(128), 16, DIMENSIONS),
}
every_network = pytest.mark.parametrize("name", NETWORKS)


@cache
def found(name: str) -> tuple[nn.Module, Groups]:
    make, size, target = NETWORKS[name]
    torch.manual_seed(0)
    model = make().eval()
    return model, compress.find_groups(model, torch.randn(1, 3, size, size), target)


def planted(groups: Groups, group: Group, slots: tuple[Slot, ...]) -> Groups:
    """The same groups, but that one of them lies elsewhere."""
    offered = [replace(g, slots=slots) if g is group else g for g in groups.offered]
    return replace(groups, offered=offered, refused=[], attributes=list(groups.attributes), hints=[])


def refused(model: nn.Module, groups: Groups) -> list[str]:
    prove(model, groups)
    return [r.name for r in groups.refused]


@every_network
def test_what_is_right_is_offered(name: str) -> None:
    model, groups = found(name)
    assert len(groups) >= 4 and refused(model, planted(groups, groups.offered[0], groups.offered[0].slots)) == []
    if name == "wide":
        assert min(g.width for g in groups) // 8 >= MANY  # layers write a part of what is dropped


@every_network
def test_positions_that_are_off_by_one_are_found_out(name: str) -> None:
    """In any place of any group: rows, columns, norms, biases."""
    model, groups = found(name)
    for group in groups:
        for number, slot in enumerate(group.slots):
            if slot.tensor.endswith("num_batches_tracked") or len(group.slots) < 2:
                continue
            slots = list(group.slots)
            slots[number] = replace(slot, index=np.roll(slot.index, 1, axis=0))
            assert refused(model, planted(groups, group, tuple(slots))) == [group.name], slot.tensor


@every_network
def test_two_positions_that_are_swapped_are_found_out(name: str) -> None:
    """Where one of them is kept in the proof: two that are dropped may well change places."""
    model, groups = found(name)
    for group in groups:
        slots = list(group.slots)
        number = next(n for n, slot in enumerate(slots) if slot.column)
        half = slots[number].index.copy()
        half[: len(half) // 2] = half[: len(half) // 2][::-1].copy()
        slots[number] = replace(slots[number], index=half)
        assert refused(model, planted(groups, group, tuple(slots))) == [group.name]


@every_network
def test_place_that_is_forgotten_is_found_out(name: str) -> None:
    model, groups = found(name)
    for group in groups:
        for slot in group.slots:
            rest = tuple(s for s in group.slots if s is not slot)
            assert refused(model, planted(groups, group, rest)) == [group.name], slot.tensor


def test_scale_of_attention_that_follows_the_width_is_found_out() -> None:
    model, groups = found("transformer")
    scaled = [g for g in groups if any(slot.power for slot in g.slots)]
    assert scaled
    for group in scaled:
        slots = tuple(replace(slot, power=0.0) for slot in group.slots)
        assert refused(model, planted(groups, group, slots)) == [group.name]


def test_network_that_mixes_what_is_dropped_into_the_rest_is_found_out() -> None:
    """The graph of one network, the code of another: a group norm where there was a batch norm."""
    model, groups = found("wide")
    other = copy.deepcopy(model)
    old = other.third[1]
    mixing = nn.GroupNorm(4, old.num_features)
    other.third[1] = nn.Sequential(old, mixing)  # the batch norm's tensors have another name now
    renamed = {f"third.1.{leaf}": f"third.1.0.{leaf}" for leaf in ("weight", "bias", "running_mean", "running_var")}
    offered = [
        replace(g, slots=tuple(replace(s, tensor=renamed.get(s.tensor, s.tensor)) for s in g.slots)) for g in groups
    ]
    moved = [replace(a, module="third.1.0") if a.module == "third.1" else a for a in groups.attributes]
    wrong = replace(groups, offered=offered, refused=[], attributes=moved, hints=[])
    assert refused(other, wrong) != []


@every_network
def test_silenced_network_computes_what_the_zeroed_one_does(name: str) -> None:
    """But for loudness, by which layers hear what is left; here it is taken back."""
    model, groups = found(name)
    model = copy.deepcopy(model).double()
    x = groups.parts[0].args[0].double()
    keep = {g.name: g.per_way(max(1, g.width // g.ways // 2), np.random.default_rng(0)) for g in groups}
    plan = compress.Plan.build(model, groups, keep)
    zeroed = plan.zero_(copy.deepcopy(model))(x)
    with pytest.MonkeyPatch.context() as patch, silenced(model, groups, plan):
        patch.setattr("compress.silence.loudness", lambda width, kept: 1.0)
        quiet = model(x)
    assert torch.allclose(quiet, zeroed, rtol=1e-9, atol=1e-12)
    with torch.no_grad():
        assert not torch.allclose(model(x), zeroed)  # and afterwards it is as it was
