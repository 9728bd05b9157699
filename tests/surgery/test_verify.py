"""Verification finds planted errors in groups, one at a time, in networks of different widths."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import compress
from cases import Net
from cases.networks_plain import cbr, head
from compress.graph import Groups
from compress.graph.group import Group, Slot
from compress.recipe import Target
from compress.surgery import Plan
from compress.surgery.compare_outputs import depends_on_rounding
from compress.surgery.masking import MIN_KEPT_ROWS, masked_reference
from compress.surgery.verify import verify_groups
from helpers.width_dependent import WidthDependent

DIMENSIONS = Target(channels=False, attention=True, mlp=True)


def _shuffled(x: Tensor) -> Tensor:
    return x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def convolutional(width: int) -> nn.Module:
    """A residual stream with a branch, a channel shuffle, a concatenation, and layers with biases."""

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
    """Return the same groups as tracing left them, with other slots for one of them."""
    offered = [replace(g, slots=slots) if g is group else g for g in groups.offered]
    return replace(groups, offered=offered, refused=[], attributes=list(groups.attributes), num_passes=1)


def refused(model: nn.Module, groups: Groups) -> list[str]:
    verify_groups(model, groups)
    return [r.name for r in groups.refused]


@every_network
def test_correct_groups_are_offered(name: str) -> None:
    model, groups = found(name)
    assert len(groups) >= 4 and refused(model, planted(groups, groups.offered[0], groups.offered[0].slots)) == []
    if name == "wide":
        assert min(g.width for g in groups) // 8 >= MIN_KEPT_ROWS  # layers write a part of what is dropped


@every_network
def test_positions_that_are_off_by_one_are_detected(name: str) -> None:
    """In every slot of every group: rows, columns, norms, biases."""
    model, groups = found(name)
    for group in groups:
        for number, slot in enumerate(group.slots):
            if slot.tensor.endswith("num_batches_tracked") or len(group.slots) < 2:
                continue
            slots = list(group.slots)
            slots[number] = replace(slot, index=np.roll(slot.index, 1, axis=0))
            assert refused(model, planted(groups, group, tuple(slots))) == [group.name], slot.tensor


@every_network
def test_two_swapped_positions_are_detected(name: str) -> None:
    """If verification keeps one of them: swapping two dropped positions changes nothing."""
    model, groups = found(name)
    for group in groups:
        slots = list(group.slots)
        number = next(n for n, slot in enumerate(slots) if slot.is_input)
        half = slots[number].index.copy()
        half[: len(half) // 2] = half[: len(half) // 2][::-1].copy()
        slots[number] = replace(slots[number], index=half)
        assert refused(model, planted(groups, group, tuple(slots))) == [group.name]


@every_network
def test_missing_slot_is_detected(name: str) -> None:
    model, groups = found(name)
    for group in groups:
        for slot in group.slots:
            rest = tuple(s for s in group.slots if s is not slot)
            assert refused(model, planted(groups, group, rest)) == [group.name], slot.tensor


def test_missing_rescaling_of_attention_is_detected() -> None:
    model, groups = found("transformer")
    scaled = [g for g in groups if any(slot.rescale_power for slot in g.slots)]
    assert scaled
    for group in scaled:
        slots = tuple(replace(slot, rescale_power=0.0) for slot in group.slots)
        assert refused(model, planted(groups, group, slots)) == [group.name]


@pytest.mark.parametrize("factor", [1e-3, 1.0, 100.0])
def test_neither_faint_nor_saturated_attention_hides_a_missing_rescaling(factor: float) -> None:
    model, groups = found("transformer")
    scaled = copy.deepcopy(model)
    with torch.no_grad():
        for block in scaled.blocks:
            block.attn.qkv.weight.mul_(factor)
    group = next(g for g in groups if any(slot.rescale_power for slot in g.slots))
    slots = tuple(replace(slot, rescale_power=0.0) for slot in group.slots)
    assert refused(scaled, planted(groups, group, slots)) == [group.name]


def test_network_that_mixes_dropped_into_kept_channels_is_detected() -> None:
    """The groups of one network, the code of another: a group norm in place of a batch norm."""
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
    wrong = replace(groups, offered=offered, refused=[], attributes=moved)
    assert refused(other, wrong) != []


@pytest.mark.parametrize("value", [0.0, 1.0, 0.5])
@pytest.mark.parametrize("bias", [False, True])
def test_constant_images_do_not_hide_an_error(value: float, bias: bool) -> None:
    groups = compress.find_groups(WidthDependent(bias=bias), torch.full((1, 3, 8, 8), value))
    assert [g.name for g in groups] == []


def test_nothing_is_verified_on_non_finite_outputs() -> None:
    x = torch.randn(2, 3, 8, 8)
    for model, inputs in ((WidthDependent(), x * torch.nan), (WidthDependent(), x * torch.inf)):
        groups = compress.find_groups(model, inputs)
        reason = next(r.reason for r in groups.refused if r.name == "first")
        assert not len(groups) and "no output on the example inputs is finite" in reason
    with pytest.raises(compress.TraceError, match=r"expected at least one example; got shape \[0, 3, 8, 8\]"):
        compress.find_groups(WidthDependent(), x[:0])


def test_code_for_more_than_one_example_is_verified_too() -> None:
    class Careful(nn.Module):
        """Skips its norm for a batch of one."""

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
    assert any("norm.bias: code that uses them on other inputs" in note for note in groups.notes)
    alone = compress.find_groups(Careful(), torch.randn(1, 3, 8, 8))
    assert [g.name for g in alone] == ["first"]  # nobody has seen the other way


def test_model_that_does_not_run_on_two_examples_is_verified_on_one() -> None:
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
    """As counted by torch's FlopCounterMode, for both orders of the dimensions."""
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


@every_network
def test_masked_reference_computes_what_the_zeroed_network_does(name: str) -> None:
    """With the rescale factor at 1."""
    model, groups = found(name)
    model = copy.deepcopy(model).double()
    x = groups.parts[0].args[0].double()
    keep = {g.name: g.indices_per_head(max(1, g.width // g.num_heads // 2), np.random.default_rng(0)) for g in groups}
    plan = compress.Plan.build(model, groups, keep)
    zeroed = plan.zero_(copy.deepcopy(model))(x)
    with pytest.MonkeyPatch.context() as patch, masked_reference(model, groups, plan):
        patch.setattr("compress.surgery.masking.rescale_factor", lambda width, kept: 1.0)
        masked = model(x)
    assert torch.allclose(masked, zeroed, rtol=1e-9, atol=1e-12)
    with torch.no_grad():
        assert not torch.allclose(model(x), zeroed)  # and afterwards it is as it was


class Selecting(nn.Module):
    """A traced stack of layers, and code that keeps some columns of its output: by last digits, or by signs."""

    def __init__(self, digits: bool) -> None:
        super().__init__()
        self.stack = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 8))
        self.digits = digits

    def forward(self, x: Tensor) -> Tensor:
        y = self.stack(x)
        return y[:, : 2 + int(y.double().sum() * 1e15) % 5] if self.digits else y[:, (y.sum(0) > 0).nonzero()[:, 0]]


@pytest.mark.parametrize("digits", [True, False])
def test_code_that_depends_on_rounding_is_told_from_code_that_depends_on_values(digits: bool) -> None:
    torch.manual_seed(0)
    model = Selecting(digits)
    groups = compress.find_groups(model, torch.randn(4, 8))
    assert [group.name for group in groups] == ["stack.0"]
    assert groups.untraced_model is not None, "its code depends on values"
    plan = Plan.build(model, groups, {"stack.0": np.arange(12)})
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    assert depends_on_rounding(model, groups, plan, groups.untraced_model) is digits
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
