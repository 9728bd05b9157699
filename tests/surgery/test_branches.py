"""Removing residual branches preserves the function and leaves fewer layers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import compress
from cases import distance, randomise_, run, same_bits
from cases.families import FAMILIES
from compress import Plan
from compress.graph import Groups
from compress.recipe import Target
from compress.surgery.branches import ConstantLayer, OutputLayerOnly
from compress.surgery.slicing import slice_

ALL = Target(attention=True, mlp=True, branches=True)


def _vision(name: str) -> Callable[[], tuple[nn.Module, Tensor]]:
    return lambda: (torchvision.models.get_model(name, num_classes=5), torch.randn(2, 3, 64, 64))


NETWORKS: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor]], int]] = {  # and how many branches may go
    "resnet18": (_vision("resnet18"), 5),
    "resnet50": (_vision("resnet50"), 12),
    "mobilenet_v2": (_vision("mobilenet_v2"), 10),
    "timm vit": (FAMILIES["timm vit"][0], 4),
    "timm vit, swiglu": (FAMILIES["timm vit, swiglu"][0], 4),
    "timm swin": (FAMILIES["timm swin"][0], 8),
    "torchvision vit": (FAMILIES["torchvision vit"][0], 4),
    "torchvision swin": (FAMILIES["torchvision swin"][0], 8),
    "transformers vit": (FAMILIES["transformers vit"][0], 4),
    "timm mobilevit": (FAMILIES["timm mobilevit"][0], 21),
}


def network(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = NETWORKS[name][0]()
    model = model.double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * (0.5 if p.ndim < 2 else 1.5 / p[0].numel() ** 0.5))
        for key, buffer in model.named_buffers():
            if key.endswith(("running_mean", "running_var")):
                buffer.copy_(torch.rand_like(buffer) + 0.5)
    return model, x.double()


@pytest.mark.parametrize("name", NETWORKS)
def test_network_without_branches_computes_what_the_zeroed_one_does(name: str, tmp_path: Path) -> None:
    model, x = network(name)
    groups = compress.find_groups(model, x, ALL)
    assert len(groups.branches) == NETWORKS[name][1]
    keep: dict[str, list[int]] = {branch: [] for branch in [*groups.branches][::2]}
    first = next(
        g for g in groups if g.name not in keep and g.name not in groups.branches[next(iter(keep))].unread_groups
    )
    keep[first.name] = list(range(first.width // 2))
    plan = Plan.build(model, groups, keep)
    plan.save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    zeroed = plan.zero_(copy.deepcopy(model))
    small = plan.apply_(copy.deepcopy(model))
    assert distance(run(zeroed, x), run(model, x)) > 1e-3, "the cut is to be seen"
    assert distance(run(small, x), run(zeroed, x)) < 1e-10
    wider = torch.cat([x, x.flip(0)])
    assert distance(run(small, wider), run(zeroed, wider)) < 1e-10, "whatever the batch"
    assert set(small.state_dict()) < set(model.state_dict()), "what stays has its name"
    kept = [len(plan.keep[n]) for n in groups.cost.names]
    assert sum(p.numel() for p in small.parameters()) == int(groups.cost.params(kept))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        small(x[:1])
    assert counter.get_total_flops() // 2 == int(groups.cost.macs(kept))
    assert same_bits(run(pickle.loads(pickle.dumps(small)), x), run(small, x))


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "timm vit"])
def test_gradients_and_training_mode_agree(name: str) -> None:
    model, x = network(name)
    groups = compress.find_groups(model, x, ALL)
    plan = Plan.build(model, groups, {branch: [] for branch in [*groups.branches][::2]})
    slopes = []
    for side in (plan.zero_(copy.deepcopy(model)).train(), plan.apply_(copy.deepcopy(model)).train()):
        torch.manual_seed(0)
        for module in side.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        side(x).square().sum().backward()
        slopes.append({n: p.grad for n, p in side.named_parameters()})
    for key, slope in slopes[1].items():
        if slope is None:  # a norm that only the branch read
            assert not slopes[0][key].any()
        elif key not in plan.slices:
            assert torch.allclose(slope, slopes[0][key], rtol=1e-6, atol=1e-8), key


@pytest.mark.parametrize("linear", [False, True])
def test_constant_layer_has_the_output_shape_of_the_original(linear: bool) -> None:
    if linear:
        layer: nn.Module = nn.Linear(6, 4)
        shapes = [(6,), (2, 6), (2, 3, 5, 6)]
    else:
        shapes = [(3, 11, 9), (2, 3, 11, 9)]
    for kernel, stride, padding, dilation in [
        (3, 1, 1, 1),
        (3, 2, 1, 1),
        (1, 1, 0, 1),
        (5, 3, 2, 2),
        (3, 1, "same", 2),
    ]:
        if not linear:
            layer = nn.Conv2d(3, 4, kernel, stride, padding, dilation, bias=kernel == 3)
        with torch.no_grad():
            layer.weight.zero_()
            for shape in shapes:
                assert torch.equal(ConstantLayer(layer)(torch.randn(shape)), layer(torch.randn(shape)))
                assert (
                    ConstantLayer(layer, single_channel=True)(torch.randn(shape)).numel()
                    == layer(torch.randn(shape)).numel() // 4
                )


class Net(nn.Module):
    """A stem of two layers and three branches, one of which contributes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 8)) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for branch in self.branches:
            x = x + branch(x)
        return self.head(x)  # type: ignore[no-any-return]


def test_layer_that_starts_a_residual_stream_is_not_a_branch() -> None:
    groups = compress.find_groups(Net(), torch.randn(2, 8), ALL)
    assert set(groups.branches) == {"branches.0.0", "branches.1.0", "branches.2.0"}
    assert not compress.find_groups(Net(), torch.randn(2, 8), Target()).branches, "only where it is asked for"


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("method", ["netslim", "rarts", "taylor", "bayesnas"])
def test_planted_dead_branch_is_removed(method: str, seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    truth = Net()
    dead = int(torch.randint(3, ()))
    with torch.no_grad():
        for p in truth.parameters():
            p.copy_(torch.randn_like(p) * (0.3 if p.ndim < 2 else 1.5 / p[0].numel() ** 0.5))
        truth.branches[dead][0].bias.fill_(-30)  # never above zero, with large weights all the same
        x = torch.randn(1024, 8)
        y = truth(x).argmax(-1)
        model = copy.deepcopy(truth)
    data = list(zip(x.split(64), y.split(64), strict=True))
    recipe = {
        "target": {"branches": True},
        "budget": {"dims": 22 / 30},
        "search": {"method": method, "epochs": 4} | ({} if method == "taylor" else {"lr": 0.01}),
        "timing": {"repeats": 3},
        "seed": seed,
    }
    pruned = compress.prune(model, recipe, train=data, quiet=True)
    assert pruned.plan.keep[f"branches.{dead}.0"] == []
    assert sum(not kept for kept in pruned.plan.keep.values()) == 1
    assert isinstance(pruned.model.get_submodule(f"branches.{dead}.2"), ConstantLayer)
    assert any(f"1 residual branch is removed entirely: branches.{dead}.0" in n for n in pruned.report.notes)
    pruned.save(tmp_path / "out")
    again = compress.load(Net(), tmp_path / "out")
    assert same_bits(run(again, x[:4]), run(pruned.model, x[:4]))


def test_branch_that_stays_keeps_min_keep() -> None:
    """A branch keeps nothing or at least `min_keep` dimensions."""
    groups = compress.find_groups(Net(), torch.randn(2, 8), ALL)
    target = Target(branches=True, min_keep=4)
    random = np.random.default_rng(0)
    budget = compress.Recipe.load({"budget": {"dims": "50%"}}).budget
    seen = set()
    for _ in range(40):
        kept = compress.budget.choose_widths(
            groups, {g.name: random.random(g.width) ** 4 for g in groups}, budget, target
        )
        seen |= {len(kept[name]) for name in groups.branches}
        assert sum(map(len, kept.values())) <= 15
    assert seen <= {0, 4, 5, 6}
    assert 0 in seen


def test_two_cuts_are_one_plan_and_optimizer_state_is_sliced() -> None:
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(4, 8).double()
    groups = compress.find_groups(model, x, ALL)
    first = Plan.build(model, groups, {"branches.1.0": [], "stem.0": [0, 3, 4, 5]})
    half = copy.deepcopy(model)
    optimizer = torch.optim.Adam(half.parameters())
    half(x).sum().backward()
    optimizer.step()
    before = copy.deepcopy(half)
    slice_(half, first, optimizer=optimizer)
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in half.parameters()}
    assert len(optimizer.state) == len([*half.parameters()])
    again = compress.find_groups(half, x, ALL)
    assert "branches.1.0" not in again.cost.names
    second = Plan.build(half, again, {"branches.0.0": []})
    expected = run(second.apply_(copy.deepcopy(half)), x)
    assert distance(run(first.then(second).apply_(before), x), expected) < 1e-12


class Block(nn.Module):
    """A residual block of two convolutions, the second with or without a bias."""

    def __init__(self, width_in: int, width: int, bias: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, 6, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, width, 3, padding=1, bias=bias)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Identity() if width_in == width else nn.Conv2d(width_in, width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return (self.shortcut(x) + branch).relu()  # type: ignore[no-any-return]


def residual_network(bias: bool) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    blocks = [Block(*widths, bias) for widths in [(9, 9), (9, 9), (9, 12), (12, 12)]]
    stem, head = nn.Conv2d(3, 9, 3), [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4)]
    return randomise_(nn.Sequential(stem, *blocks, *head).double()).eval(), torch.randn(3, 3, 8, 8).double()


def random_cut(groups: Groups, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Random widths for all groups; about half of the branches are removed."""
    keep = {g.name: np.sort(random.permutation(g.width)[: random.integers(1, g.width + 1)]) for g in groups}
    return keep | {name: np.zeros(0, dtype=int) for name in groups.branches if random.random() < 0.5}


STREAMS = Target(residual=True, branches=True)


@pytest.mark.parametrize("bias", [False, True])
def test_branches_are_removed_from_streams_that_are_cut(bias: bool) -> None:
    model, x = residual_network(bias)
    groups = compress.find_groups(model, x, STREAMS)
    assert set(groups.branches) == {"1.conv1", "2.conv1", "4.conv1"}
    assert {g.kind for g in groups} == {"channels", "residual"}
    random = np.random.default_rng(0)
    for _ in range(10):
        plan = Plan.build(model, groups, random_cut(groups, random))
        zeroed, sliced = plan.zero_(copy.deepcopy(model)), plan.apply_(copy.deepcopy(model))
        assert distance(run(sliced, x), run(zeroed, x)) < 1e-10
        again = Plan.from_dict(plan.to_dict()).apply_(copy.deepcopy(model))
        assert same_bits(run(again, x), run(sliced, x))


@pytest.mark.parametrize("bias", [False, True])
def test_streams_can_be_cut_further_after_branches_are_removed(bias: bool) -> None:
    model, x = residual_network(bias)
    groups = compress.find_groups(model, x, STREAMS)
    streams = [g.name for g in groups if g.kind == "residual"]
    random = np.random.default_rng(0)
    for width in (6, 9):  # of the stream that is cut first; 9 leaves it whole
        keep = {streams[0]: random.permutation(9)[:width], "1.conv1": [], "4.conv1": [], "2.conv1": [0, 3]}
        first = Plan.build(model, groups, keep)
        once = first.apply_(copy.deepcopy(model))
        groups_left = compress.find_groups(once, x, STREAMS)
        assert [g.name for g in groups_left if g.kind == "residual"] == streams
        second = Plan.build(once, groups_left, random_cut(groups_left, random))
        zeroed, twice = second.zero_(copy.deepcopy(once)), second.apply_(copy.deepcopy(once))
        assert distance(run(twice, x), run(zeroed, x)) < 1e-10
        both = Plan.from_dict(first.then(second).to_dict())
        assert distance(run(both.apply_(copy.deepcopy(model)), x), run(twice, x)) < 1e-12


def test_output_layer_only_accepts_its_input_by_name() -> None:
    layer = nn.Linear(4, 4)
    x = torch.randn(2, 3, 4)
    assert torch.equal(OutputLayerOnly("proj", layer, returns_pair=False)(hidden_states=x), layer.bias.expand(2, 3, 4))
    out, weights = OutputLayerOnly("proj", layer, returns_pair=True)(x, x, x, need_weights=False)
    assert torch.equal(out, layer.bias.expand(2, 3, 4))
    assert weights is None


def test_compensation_leaves_removed_branches_alone() -> None:
    with pytest.raises(compress.RecipeError, match="compensate: a branch that is removed has no reader"):
        compress.Recipe.load({"budget": {"macs": "50%"}, "compensate": "mean", "target": {"branches": True}})


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_evidence_alone_removes_a_dead_branch(seed: int) -> None:
    """Without a budget, dimensions without evidence are dropped, and a branch without any is removed entirely."""
    torch.manual_seed(seed)
    model, dead = Net(), int(torch.randint(3, ()))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * (0.3 if p.ndim < 2 else 1.5 / p[0].numel() ** 0.5))
        model.branches[dead][0].bias.fill_(-30)
        x = torch.randn(1024, 8)
        y = model(x).argmax(-1)
    recipe = {
        "target": {"branches": True},
        "budget": "auto",
        "search": {"method": "bayesnas", "epochs": 4, "lr": 0.01, "gamma": 1e-3},
        "timing": {"repeats": 3},
    }
    data = list(zip(x.split(64), y.split(64), strict=True))
    plan = compress.prune(model, recipe, train=data, quiet=True).plan
    assert [name for name, kept in plan.keep.items() if not kept] == [f"branches.{dead}.0"]
