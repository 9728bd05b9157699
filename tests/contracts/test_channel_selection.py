"""Channel selection: norms read parts of a stream that stays whole; cuts are exact, saved, counted, exported, searched.

The oracle of exactness is the dense network with zeros in the input columns of the layers behind a norm, set by hand.
"""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

import compress
from benchmarks.models import PreResNet
from cases import CASES, Case, build, distance, example, randomise_, run, same_bits
from cases.networks_plain import PreActivation, head
from compress import Plan, PlanError
from compress.errors import NotReady
from compress.exporters import onnx as exporter
from compress.graph import Groups
from compress.modules import is_selective
from compress.recipe import Target, Timing
from compress.surgery import verify_plan
from helpers.random_plans import check_random_plans, unequal_keep

X = torch.randn(2, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def small_preresnet() -> nn.Module:
    return randomise_(PreResNet(20).double()).eval()


def selections(model: nn.Module, x: Tensor = X, **target: Any) -> Groups:
    return compress.find_groups(model, x, Target(selection=True, **target))


def of_kind(groups: Groups, kind: str) -> list[str]:
    return [group.name for group in groups if group.kind == kind]


class DenseLayers(nn.Module):
    """Every layer reads all features before it, through a norm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(6 + 4 * i) for i in range(4))
        self.layers = nn.ModuleList(nn.Conv2d(6 + 4 * i, 4, 3, padding=1) for i in range(3))
        self.linear = nn.Linear(18, 5)

    def forward(self, x: Tensor) -> Tensor:
        features = self.stem(x)
        for norm, layer in zip(self.norms, self.layers, strict=False):
            features = torch.cat([features, layer(F.relu(norm(features)))], 1)
        return self.linear(F.relu(self.norms[-1](features)).mean((2, 3)))  # type: ignore[no-any-return]


class DepthwiseBehindNorm(nn.Module):
    """A depthwise convolution and a norm of its own stand between the norm that selects and the layer that reads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.norm, self.depthwise = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.inner, self.project = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)
        self.head = head(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.project(F.relu(self.inner(self.depthwise(torch.sigmoid(self.norm(x))))))
        return self.head(x)  # type: ignore[no-any-return]


class NormOfStreamThatIsAdded(nn.Module):
    """The norm's output is the next stream, so the norm cannot select."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, padding=1)
        self.norm, self.other, self.head = nn.BatchNorm2d(6), nn.Conv2d(6, 6, 1), head(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm(x + self.conv(x))
        return self.head(y + self.other(y))  # type: ignore[no-any-return]


def test_preresnet_offers_every_norm_that_reads_a_stream_and_all_inner_channels() -> None:
    groups = selections(small_preresnet())
    blocks = [f"layer{stage}.{block}" for stage in (1, 2, 3) for block in (0, 1)]
    assert of_kind(groups, "selection") == [*[f"{block}.bn1" for block in blocks], "bn"]
    assert of_kind(groups, "channels") == [f"{block}.conv{i}" for block in blocks for i in (1, 2)]
    assert {r.name for r in groups.refused if "target.selection" in r.reason} == {
        "conv1",
        *[f"layer{stage}.0.conv3" for stage in (1, 2, 3)],
    }


@pytest.mark.parametrize("seed", range(3))
def test_cut_equals_zeros_that_are_set_by_hand(seed: int) -> None:
    """Also where the network trains: norms behind the selection see the same statistics."""
    model = small_preresnet()
    groups = selections(model)
    keep = unequal_keep(groups, seed)
    plan = Plan.build(model, groups, keep)
    zeroed = copy.deepcopy(model)
    for name, kept in keep.items():
        block, _, layer = name.rpartition(".")
        reader = {"bn": "linear", "bn1": f"{block}.conv1", "conv1": f"{block}.conv2", "conv2": f"{block}.conv3"}[layer]
        weight = zeroed.get_submodule(reader).weight
        assert isinstance(weight, Tensor)
        weight.data[:, np.setdiff1d(np.arange(weight.shape[1]), kept)] = 0
    sliced = plan.apply_(copy.deepcopy(model))
    for training in (False, True):
        outputs = [run(network.train(training), X) for network in (zeroed, sliced)]
        assert distance(*outputs) < 1e-12
    assert distance(run(zeroed.eval(), X), run(model, X)) > 1e-3


def test_first_layer_reads_part_of_the_stream_and_the_last_one_writes_all_of_it() -> None:
    model = small_preresnet()
    groups = selections(model)
    plan = Plan.build(model, groups, {"layer2.1.bn1": [3, 50, 51], "layer2.1.conv2": [0, 7]})
    block = plan.apply_(copy.deepcopy(model)).get_submodule("layer2.1")
    assert block.conv1.weight.shape == (32, 3, 1, 1)  # type: ignore[union-attr]
    assert block.conv3.weight.shape == (128, 2, 1, 1)  # type: ignore[union-attr]
    assert block.bn1.index.tolist() == [3, 50, 51]  # type: ignore[operator, union-attr]
    assert block.bn1.num_features == 3  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("make", "norms"),
    [
        (DenseLayers, ["norms.0", "norms.1", "norms.2", "norms.3"]),
        (DepthwiseBehindNorm, ["norm"]),
        (NormOfStreamThatIsAdded, []),
    ],
)
def test_other_networks_are_cut_exactly_at_random_widths(make: Any, norms: list[str], tmp_path: Path) -> None:
    model = randomise_(make().double()).eval()
    groups = selections(model)
    assert of_kind(groups, "selection") == norms
    check_random_plans(model, X, groups, 8, tmp_path)


@pytest.mark.parametrize("name", ["resnetv2_50", "densenet121"])
def test_networks_of_libraries_are_cut_exactly(name: str, tmp_path: Path) -> None:
    """timm's norms include the activation function, and a stream may be read after the activation, too."""
    if name == "resnetv2_50":
        model = timm.create_model(name, layers=(1, 2, 1, 1), channels=(16, 24, 32, 40), stem_chs=8, num_classes=5)
    else:
        model = torchvision.models.DenseNet(4, (2, 2), 8, bn_size=2, num_classes=5)
    model = randomise_(model.double()).eval()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    groups = selections(model, x)
    assert len(of_kind(groups, "selection")) >= 5
    check_random_plans(model, x, groups, 3, tmp_path)


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_all_small_networks_are_cut_exactly_or_refused(case: Case) -> None:
    model, x = build(case), example(case)
    groups = selections(model, x, residual=True)
    for seed in range(2):
        plan = Plan.build(model, groups, unequal_keep(groups, seed))
        zeroed, sliced = plan.zero_(copy.deepcopy(model)), plan.apply_(copy.deepcopy(model))
        torch.manual_seed(seed)
        expected = run(zeroed, x)
        torch.manual_seed(seed)
        assert distance(run(sliced, x), expected) < 1e-9


def test_verification_notices_a_wrong_index() -> None:
    model = small_preresnet()
    groups = selections(model)
    plan = Plan.build(model, groups, {"layer1.1.bn1": range(20)})
    assert not verify_plan(model, groups, plan)
    plan.selections["layer1.1.bn1"] = np.arange(1, 21)
    assert "layer1.1.bn1" in verify_plan(model, groups, plan)


def test_plan_survives_json_and_fits_a_fresh_network(tmp_path: Path) -> None:
    model = small_preresnet()
    groups = selections(model)
    plan = Plan.build(model, groups, unequal_keep(groups, 0))
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.digest() == plan.digest()
    fresh = PreResNet(20).double().eval()
    fresh.load_state_dict(model.state_dict())
    sliced = plan.apply_(copy.deepcopy(model))
    assert same_bits(run(loaded.apply_(fresh), X), run(sliced, X))
    assert list(sliced.state_dict()) == list(model.state_dict())
    assert same_bits(run(pickle.loads(pickle.dumps(sliced)), X), run(sliced, X))


def test_plans_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = small_preresnet()
    groups = selections(model)
    plan = Plan.build(model, groups, {"layer1.1.bn1": [0, 9], "bn": range(100)})
    data = plan.to_dict()
    with pytest.raises(PlanError, match=r"selections layer1.1.bn1: expected an index into `indices`; got 99"):
        Plan.from_dict(data | {"selections": {"layer1.1.bn1": 99}})
    other = Plan.from_dict(json.loads(json.dumps(data)))
    other.selections["layer1.1.bn1"] = np.array([0, 64])
    message = (
        r"layer1.1.bn1: expected a batch norm that selects 2 channels up to number 64 and keeps as many; got Batch"
    )
    with pytest.raises(PlanError, match=message):
        other.apply_(copy.deepcopy(model))
    other.selections["layer1.1.bn1"] = np.array([0, 1, 2])
    with pytest.raises(PlanError, match=r"selects 3 channels.*got BatchNorm2d of 64, which keeps 2"):
        other.apply_(copy.deepcopy(model))
    with pytest.raises(PlanError, match="made for another model"):
        plan.apply_(plan.apply_(copy.deepcopy(model)))


def test_second_cut_of_a_selection_is_one_plan_for_the_dense_network() -> None:
    model = small_preresnet()
    first = Plan.build(model, groups := selections(model), unequal_keep(groups, 0))
    small = first.apply_(copy.deepcopy(model))
    again = selections(small)
    assert of_kind(again, "selection") == [
        g.name for g in groups if g.kind == "selection" and len(first.keep[g.name]) > 1
    ]
    second = Plan.build(small, again, unequal_keep(again, 1))
    zeroed = second.zero_(copy.deepcopy(small))
    smaller = second.apply_(copy.deepcopy(small))
    assert distance(run(smaller, X), run(zeroed, X)) < 1e-12
    both = first.then(second)
    at_once = Plan.from_dict(both.to_dict()).apply_(copy.deepcopy(model))
    assert same_bits(run(at_once, X), run(smaller, X))


def test_stream_that_was_cut_before_is_selected_by_its_own_positions() -> None:
    """The index counts the channels of the cut stream, the tensors of the norm those of the dense one."""
    model = small_preresnet()
    streams = compress.find_groups(model, X, Target(residual=True))
    first = Plan.build(model, streams, unequal_keep(streams, 3))
    small = first.apply_(copy.deepcopy(model))
    groups = selections(small)
    second = Plan.build(small, groups, unequal_keep(groups, 4))
    smaller = second.apply_(copy.deepcopy(small))
    at_once = first.then(second).apply_(copy.deepcopy(model))
    assert same_bits(run(at_once, X), run(smaller, X))


def test_a_norm_that_selects_is_left_alone_without_the_target() -> None:
    model = small_preresnet()
    plan = Plan.build(model, groups := selections(model), unequal_keep(groups, 0))
    small = plan.apply_(copy.deepcopy(model))
    again = compress.find_groups(small, X, Target(residual=True))
    assert {group.kind for group in again} == {"channels"}
    refused = {r.reason for r in again.refused if r.kind in ("residual", "selection")}
    assert refused <= {"target.selection is off", "has one dimension only"} | {r for r in refused if "by index" in r}
    cut = Plan.build(small, again, unequal_keep(again, 1))
    zeroed, sliced = cut.zero_(copy.deepcopy(small)), cut.apply_(copy.deepcopy(small))
    assert distance(run(zeroed, X), run(sliced, X)) < 1e-12


def test_branches_are_removed_with_what_they_select() -> None:
    model = small_preresnet()
    groups = selections(model, branches=True)
    assert groups.branches
    keep = unequal_keep(groups, 0) | {"layer2.1.conv2": np.zeros(0, dtype=np.int64)}
    plan = Plan.build(model, groups, keep)
    zeroed, sliced = plan.zero_(copy.deepcopy(model)), plan.apply_(copy.deepcopy(model))
    assert distance(run(zeroed, X), run(sliced, X)) < 1e-12
    widths = [len(plan.keep[name]) for name in groups.cost.names]
    assert sum(p.numel() for p in sliced.parameters()) == int(groups.cost.params(widths))


def test_costs_equal_those_of_the_sliced_network() -> None:
    model = small_preresnet()
    groups = selections(model)
    for seed in range(3):
        keep = unequal_keep(groups, seed)
        sliced = Plan.build(model, groups, keep).apply_(copy.deepcopy(model))
        widths = [len(keep[name]) for name in groups.cost.names]
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            sliced(X[:1])
        assert counter.get_total_flops() // 2 == int(groups.cost.macs(widths))
        assert sum(p.numel() for p in sliced.parameters()) == int(groups.cost.params(widths))


def test_exported_file_computes_what_the_network_computes(tmp_path: Path) -> None:
    model = randomise_(PreResNet(11)).eval()
    x = X.float()
    groups = selections(model, x)
    sliced = Plan.build(model, groups, unequal_keep(groups, 0)).apply_(copy.deepcopy(model))
    exporter.export(sliced, tmp_path / "model.onnx", x, dense=model, timing=Timing(repeats=3))
    assert "Gather" in {node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node}
    session = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert distance([torch.from_numpy(output)], run(sliced, x)) < 1e-4


def planted_batches(count: int) -> DataLoader[Any]:
    torch.manual_seed(0)
    x, y = torch.randn(count, 3, 8, 8), torch.randint(5, (count,))
    x[torch.arange(count), y % 3] += y.view(-1, 1, 1) - 2.0
    return DataLoader(TensorDataset(x, y), 16)


@pytest.mark.parametrize("steps", [1, 2])
def test_netslim_prunes_selections_within_the_budget_and_the_result_can_be_loaded(steps: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    blocks = [PreActivation(8) for _ in range(2)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.BatchNorm2d(8), nn.ReLU(), head(8))
    recipe = {
        "target": {"selection": True, "round_to": 1},
        "budget": {"dims": "60%"},
        "search": {"method": "netslim", "epochs": "8 steps", "distill": None},
        "finetune": {"epochs": "4 steps", "distill": None},
        "steps": steps,
        "timing": {"repeats": 3},
    }
    batches = planted_batches(128)
    dense = copy.deepcopy(model)
    pruned = compress.prune(model, recipe, train=batches, val=batches, quiet=True)
    assert {row.kind for row in pruned.report.groups} == {"channels", "selection"}
    kept = sum(map(len, pruned.plan.keep.values()))
    assert kept == int(0.6 * (3 * 8 + 2 * 10))
    assert any(is_selective(module) for module in pruned.model.modules())
    pruned.save(tmp_path / "out")
    loaded = compress.load(dense, tmp_path / "out").eval()
    x = torch.randn(2, 3, 8, 8)
    assert same_bits(run(loaded, x), run(pruned.model.eval(), x))


@pytest.mark.parametrize("method", ["magnitude", "taylor", "rarts", "bayesnas"])
@pytest.mark.parametrize("compensate", [False, "mean", "least_squares"])
def test_other_searches_and_repairs_run_with_selections(method: str, compensate: Any) -> None:
    if compensate and method != "magnitude":
        pytest.skip("the repair does not depend on the search")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), PreActivation(8), nn.BatchNorm2d(8), nn.ReLU(), head(8))
    settings = {} if method in ("magnitude",) else {"epochs": "4 steps"}
    recipe = {
        "target": {"selection": True, "channels": False, "round_to": 1},
        "budget": {"dims": "50%"},
        "search": {"method": method} | settings,
        "compensate": compensate,
        "timing": {"repeats": 3},
    }
    batches = planted_batches(64)
    pruned = compress.prune(model, recipe, train=batches, val=batches, quiet=True)
    assert sum(map(len, pruned.plan.keep.values())) == 8


def test_planted_useless_channel_of_one_block_is_not_selected_there() -> None:
    """One block does not use channel 2, another not channel 5; the stream needs both."""
    torch.manual_seed(0)
    blocks = [PreActivation(8) for _ in range(2)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.BatchNorm2d(8), nn.ReLU(), head(8)).eval()
    for block, useless in zip(blocks, (2, 5), strict=True):
        block.conv1.weight.data[:, useless] = 0
    x = torch.randn(2, 3, 8, 8)
    dims = "83%"  # 20 of 24: not exactly as many as there are useless ones, so that order matters
    recipe = {"target": {"selection": True, "channels": False, "round_to": 1}, "budget": {"dims": dims}, "search": {}}
    pruned = compress.prune(model, recipe, example_inputs=x, quiet=True)
    assert 2 not in pruned.plan.keep["1.bn1"]
    assert 5 not in pruned.plan.keep["2.bn1"]
    assert pruned.model[0].weight.shape[0] == 8  # type: ignore[index, union-attr]


def test_networks_without_such_norms_are_refused() -> None:
    model = torchvision.models.resnet18(num_classes=3)
    recipe = {"target": {"selection": True}, "budget": {"macs": "50%"}, "search": {}}
    with pytest.raises(NotReady, match=r"target.selection: expected batch norms that read a residual stream.*has none"):
        compress.prune(model, recipe, example_inputs=torch.randn(1, 3, 32, 32), quiet=True)
