"""What is said of a group in the wrong is found out: planted errors, one at a time, in networks of all widths."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import timm
import torch
from case import Net
from networks_plain import cbr, head
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import compress
from compress import proof
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


class Narrowing(nn.Module):
    """The sum over channels is divided by how many there are: no width but the dense one computes the same."""

    def __init__(self, ends: str = "floats", bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ends, self.first, self.last = ends, nn.Conv2d(3, 16, 3, bias=bias), nn.Conv2d(16, 5, 1)

    def forward(self, x: Tensor) -> Any:
        h = self.first(x).relu()
        out = self.last(h * h.shape[1] ** 2)
        if self.ends == "labels":
            return out, out.sum((2, 3)) * 0, out.mean(1).gt(0)
        if self.ends == "complex":
            return torch.complex(out, out.square())
        return {"floats": out, "nothing": out[:0], "integers": out.flatten(1).gt(0).long()}[self.ends]


@pytest.mark.parametrize("value", [0.0, 1.0, 0.5])
@pytest.mark.parametrize("bias", [False, True])
def test_constant_images_do_not_hide_an_error(value: float, bias: bool) -> None:
    groups = compress.find_groups(Narrowing(bias=bias), torch.full((1, 3, 8, 8), value))
    assert [g.name for g in groups] == []


def test_complex_numbers_are_compared() -> None:
    assert [g.name for g in compress.find_groups(Narrowing("complex"), torch.randn(2, 3, 8, 8))] == []


def test_integers_are_compared_and_are_said_to_be_coarse() -> None:
    x = torch.randn(2, 3, 16, 16)
    groups = compress.find_groups(Narrowing("integers"), x)
    assert [g.name for g in groups] == [] and proof.COARSE in groups.notes
    assert "zeroed and sliced outputs differ" in next(r.reason for r in groups.refused if r.name == "first")
    assert proof.COARSE not in compress.find_groups(Narrowing("labels"), x).notes


def test_nothing_is_proved_on_numbers_that_are_none() -> None:
    x = torch.randn(2, 3, 8, 8)
    for model, inputs in ((Narrowing(), x * torch.nan), (Narrowing(), x * torch.inf)):
        groups = compress.find_groups(model, inputs)
        reason = next(r.reason for r in groups.refused if r.name == "first")
        assert not len(groups) and "no output on the example inputs is finite" in reason
    with pytest.raises(compress.TraceError, match=r"expected at least one example; got shape \[0, 3, 8, 8\]"):
        compress.find_groups(Narrowing(), x[:0])


def test_outputs_that_are_empty_are_noted() -> None:
    assert proof.UNSEEN in compress.find_groups(Narrowing("nothing"), torch.randn(2, 3, 8, 8)).notes


def test_code_for_more_than_one_example_is_proved_along() -> None:
    class Careful(nn.Module):
        """Has no norm for a batch of one."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 5, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            out: Tensor = self.last((self.norm(h) if len(x) > 1 else h).relu())
            return out

    groups = compress.find_groups(Careful(), torch.randn(4, 3, 8, 8))
    assert [g.name for g in groups] == []
    assert "the code of norm does not run at another width" in groups.refused[-1].reason
    assert any("norm.bias among them: code that uses them on other inputs" in note for note in groups.notes)
    alone = compress.find_groups(Careful(), torch.randn(1, 3, 8, 8))
    assert [g.name for g in alone] == ["first"]  # nobody has seen the other way


def test_model_that_runs_on_one_and_on_all_and_on_no_two_is_proved_on_one() -> None:
    class Choosy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 5, 1)

        def forward(self, x: Tensor) -> Tensor:
            assert len(x) != 2
            out: Tensor = self.last(self.first(x).relu())
            return out

    assert [g.name for g in compress.find_groups(Choosy(), torch.randn(4, 3, 8, 8))] == ["first"]


@pytest.mark.parametrize("first", [True, False])
def test_sequences_that_come_first_cost_what_they_cost(first: bool) -> None:
    """Counted by torch's own counter, whatever the order of the dimensions."""
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=first)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    x = torch.randn(1, 40, 16) if first else torch.randn(40, 1, 16)
    groups = compress.find_groups(model, x, Target(mlp=True))
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model.train()(x)
    assert int(groups.cost.macs(groups.cost.widths)) == counter.get_total_flops() // 2
    many = compress.find_groups(model, x.expand(3, -1, -1) if first else x.expand(-1, 3, -1), Target(mlp=True))
    ratio = int(many.cost.macs(many.cost.widths)) / int(groups.cost.macs(groups.cost.widths))
    assert ratio == (1 if first else 3)
