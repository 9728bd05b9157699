"""Attention and MLP dimensions in networks of every library: zeroed and sliced networks are one function."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import compress
from cases import distance, run, same_bits, tensors_of
from cases.families import BOTH, FAMILIES, WITHOUT_MLP, Own, Small, family, random_part
from compress import Plan
from compress.modules import join_heads, use_compact_forms_
from compress.recipe import Target
from compress.surgery.gates import attach_, fold_


@pytest.mark.parametrize("name", FAMILIES)
def test_zeroed_scored_folded_and_sliced_networks_are_one_function(name: str, tmp_path: Path) -> None:
    model, x = family(name)
    groups = compress.find_groups(model, x, BOTH)
    assert sum(g.kind == "attention" for g in groups) >= FAMILIES[name][1], groups.refused
    assert name in WITHOUT_MLP or any(g.kind == "mlp" for g in groups)
    keep = random_part(groups)
    plan = Plan.build(model, groups, keep)
    plan.save(tmp_path / "plan.json")
    dense, zeroed = run(model, x), run(plan.zero_(copy.deepcopy(model)), x)
    small = Plan.load(tmp_path / "plan.json").apply_(copy.deepcopy(model))
    assert distance(zeroed, dense) > 1e-3, "the cut is to be seen"
    assert distance(run(small, x), zeroed) < 1e-10
    scored = copy.deepcopy(model)
    made = attach_(scored, groups)
    assert same_bits(run(scored, x), dense)
    with torch.no_grad():
        for group, score in made.items():
            mask = torch.zeros_like(score)
            mask[torch.as_tensor(keep[group])] = 1
            score.mul_(mask)
    at_zero = run(scored, x)
    assert distance(at_zero, zeroed) < 1e-10
    assert same_bits(run(fold_(scored), x), at_zero)


UNCOUNTED = ("timm cait", "timm vit, attention pool")  # torch's counter stumbles over its hooks


@pytest.mark.parametrize("name", [n for n in FAMILIES if n not in UNCOUNTED])
def test_multiply_adds_are_those_that_torch_counts(name: str) -> None:
    model, x = family(name)
    groups = compress.find_groups(model, x, BOTH)
    keep = random_part(groups)
    small = Plan.build(model, groups, keep).apply_(use_compact_forms_(copy.deepcopy(model)))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        small(x if name == "torch encoder, batch second" else x[:1])  # whose first dimension is none of examples
    widths = [len(keep[n]) for n in groups.cost.names]
    assert counter.get_total_flops() // 2 == int(groups.cost.macs(widths))
    assert sum(p.numel() for p in small.parameters()) == int(groups.cost.params(widths))


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_of_the_sliced_network_are_those_of_the_zeroed_one(name: str) -> None:
    """Of what is kept and not scaled: the same loss, the same slopes."""
    model, x = family(name)
    groups = compress.find_groups(model, x, BOTH)
    plan = Plan.build(model, groups, random_part(groups))
    sides = plan.zero_(copy.deepcopy(model)), plan.apply_(copy.deepcopy(model))
    slopes = []
    for side in sides:
        torch.stack([o.square().sum() for o in tensors_of(side(x))]).sum().backward()
        slopes.append({n: p.grad for n, p in side.named_parameters() if p.grad is not None})
    scaled = {name for name, *_ in plan.scales}
    compared = 0
    for key, gradient in slopes[1].items():
        if key in plan.slices or key in scaled:
            continue
        assert torch.allclose(gradient, slopes[0][key], rtol=1e-7, atol=1e-8), key
        compared += 1
    assert compared > 0


@pytest.mark.parametrize("name", ["timm vit", "timm swin", "torchvision swin", "torch encoder"])
def test_saved_network_reloads_to_the_same_bits_and_pickles(name: str, tmp_path: Path) -> None:
    model, x = family(name)
    recipe = {"budget": {"dims": "60%"}, "target": {"attention": True, "mlp": True}, "timing": {"repeats": 3}}
    pruned = compress.prune(model, recipe, example_inputs=x, quiet=True)
    assert any(g.kind == "attention" and g.kept < g.width for g in pruned.report.groups)
    pruned.save(tmp_path / "out")
    expected = run(pruned.model, x)
    assert same_bits(run(compress.load(copy.deepcopy(model), tmp_path / "out"), x), expected)
    assert same_bits(run(pickle.loads(pickle.dumps(pruned.model)), x), expected)
    assert same_bits(run(copy.deepcopy(pruned.model), x), expected)


@pytest.mark.parametrize("fused", [True, False])
def test_scale_is_that_of_the_dense_head(fused: bool) -> None:
    """Fused attention takes the root of whatever width comes: queries and keys make up for it."""
    model, x = family("timm vit")
    for block in model.blocks:
        block.attn.fused_attn = fused
    groups = compress.find_groups(model, x, BOTH)
    plan = Plan.build(model, groups, random_part(groups, 0.25))
    assert bool(plan.scales) == fused
    zeroed = run(plan.zero_(copy.deepcopy(model)), x)
    assert distance(run(plan.apply_(copy.deepcopy(model)), x), zeroed) < 1e-10
    plan.scales = []
    if fused:
        assert distance(run(plan.apply_(copy.deepcopy(model)), x), zeroed) > 1e-3, "without it the function is another"


def test_two_cuts_are_one_plan() -> None:
    model, x = family("timm vit")
    groups = compress.find_groups(model, x, BOTH)
    first = Plan.build(model, groups, random_part(groups, 0.6))
    half = first.apply_(copy.deepcopy(model))
    again = compress.find_groups(half, x, BOTH)
    second = Plan.build(half, again, random_part(again, 0.5))
    expected = run(second.apply_(copy.deepcopy(half)), x)
    assert distance(run(first.then(second).apply_(copy.deepcopy(model)), x), expected) < 1e-12


class Rooted(Own):
    """Its scale follows from the width of what it multiplies, in Python, where no operator shows it."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weights = (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).softmax(-1)
        out: Tensor = self.head(x + self.out((weights @ v).transpose(1, 2).flatten(2)))
        return out


@pytest.mark.parametrize("small", [1.0, 1e-2])
def test_scale_that_code_takes_from_the_width_is_refused(small: float) -> None:
    """Even where queries and keys are so small that single precision would hardly see it."""
    torch.manual_seed(0)
    model = Rooted()
    with torch.no_grad():
        model.q.weight.mul_(small)
        model.k.weight.mul_(small)
    groups = compress.find_groups(model, torch.randn(2, 7, 24), BOTH)
    assert [g.name for g in groups] == ["v"]
    assert any(r.name == "q" and "differ" in r.reason for r in groups.refused)


class Doubled(Own):
    """Attention that takes its scale from the width, fused where there is a kernel for it."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.head(x + self.out(join_heads(out)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_scale_is_found_with_every_kernel(kernel: SDPBackend) -> None:
    torch.manual_seed(0)
    model, x = Doubled(values=10).double(), torch.randn(2, 7, 24).double()
    with sdpa_kernel(kernel):
        groups = compress.find_groups(model, x, BOTH)
        plan = Plan.build(model, groups, {"q": [0, 3, 4]})
        zeroed = run(plan.zero_(copy.deepcopy(model)), x)
        assert distance(run(plan.apply_(copy.deepcopy(model)), x), zeroed) < 1e-12


@pytest.mark.parametrize("target", [{"attention": True}, {"mlp": True}, {}])
def test_target_says_what_is_offered(target: dict[str, bool]) -> None:
    model, x = family("timm vit")
    groups = compress.find_groups(model, x, Target(channels=False, **target))
    kinds = {g.kind for g in groups}
    assert kinds == set(target)
    off = {"attention", "mlp"} - kinds
    assert {r.reason for r in groups.refused if r.kind in off} >= {f"target.{kind} is off" for kind in off}
    assert {g.kind for g in compress.find_groups(model, x, Target())} == {"attention", "mlp"}, "auto: all of them"
    assert {g.kind for g in compress.find_groups(model, x, Target(channels=True))} == {"mlp"}


def test_parameters_and_multiply_adds_of_table_4_3() -> None:
    """MSA 4 rho d^2 and 4 rho n d^2 + 2 rho n^2 d, MLP 2 rho d d_m and 2 rho n d d_m, biases beside."""
    d, heads, hidden = 48, 4, 96
    model = torchvision.models.VisionTransformer(32, 8, 1, heads, d, hidden, num_classes=7).double().eval()
    x = torch.randn(1, 3, 32, 32).double()
    groups = compress.find_groups(model, x, BOTH)
    n = 17  # tokens: sixteen patches and the class
    names = groups.cost.names
    msa, mlp = (next(i for i, m in enumerate(names) if w in m) for w in ("self_attention", "mlp"))
    full = groups.cost.widths
    for left in (1, 3, 6, 9, 12):
        widths = full.copy()
        widths[msa] = left
        rho = left / 12
        gone = int(groups.cost.params(full) - groups.cost.params(widths))
        assert gone == round((1 - rho) * (4 * d * d + 3 * d)), "and the biases of queries, keys and values"
        gone = int(groups.cost.macs(full) - groups.cost.macs(widths))
        assert gone == round((1 - rho) * (4 * n * d * d + 2 * n * n * d))
    for left in (2, 48, 96):
        widths = full.copy()
        widths[mlp] = left
        rho = left / hidden
        assert int(groups.cost.params(full) - groups.cost.params(widths)) == round(
            (1 - rho) * (2 * d * hidden + hidden)
        )
        assert int(groups.cost.macs(full) - groups.cost.macs(widths)) == round((1 - rho) * 2 * n * d * hidden)


def test_swin_t_brackets_tables_4_4_and_4_5() -> None:
    """Parameters in millions and multiply-adds in billions, every layer giving the same part."""
    model = torchvision.models.swin_t(num_classes=20).eval()
    cost = compress.find_groups(model, torch.randn(1, 3, 224, 224), BOTH).cost
    assert int(cost.params(cost.widths)) == pytest.approx(27.53e6, rel=0.001)
    assert int(cost.macs(cost.widths)) == pytest.approx(4.49e9, rel=0.001)
    tables = {20: (20.34, 23.28, 3.53, 3.65), 40: (14.61, 17.89, 2.60, 2.82), 60: (10.06, 11.92, 1.73, 1.93)}
    tables[80] = (5.93, 7.17, 0.92, 1.09)
    for pruned, (few, many, fast, slow) in tables.items():
        widths = np.rint((1 - pruned / 100) * cost.widths).astype(np.int64)
        params, macs = int(cost.params(widths)) / 1e6, int(cost.macs(widths)) / 1e9
        assert 0.95 * few < params < 1.05 * many, (pruned, params)
        assert 0.95 * fast < macs < 1.05 * slow, (pruned, macs)


def test_round_to_beyond_a_head_is_noted() -> None:
    model, x = family("timm vit")
    groups = compress.find_groups(model, x, Target(channels=False, attention=True, round_to=64))
    assert any("no more than target.round_to = 64 dimensions" in note for note in groups.notes)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("method", ["netslim", "rarts", "taylor", "bayesnas"])
def test_planted_useless_dimensions_of_heads_and_mlps_come_last(method: str, seed: int) -> None:
    """Labels come from a network in which two dimensions of every head and three hidden ones do nothing."""
    torch.manual_seed(seed)
    truth = Small()
    dead, idle = sorted(torch.randperm(6)[:2].tolist()), sorted(torch.randperm(10)[:3].tolist())
    with torch.no_grad():
        for p in truth.parameters():
            p.copy_(torch.randn_like(p) * (0.3 if p.ndim < 2 else 2.0 / p[0].numel() ** 0.5))
        rows = [part * 12 + head * 6 + d for part in range(3) for head in range(2) for d in dead]
        truth.qkv.weight[rows], truth.qkv.bias[rows] = 0, 0
        truth.proj.weight[:, [head * 6 + d for head in range(2) for d in dead]] = 0
        truth.fc1.bias[idle] = -30  # never above zero, with large weights all the same
        x = torch.randn(1024, 5, 12)
        y = truth(x).argmax(-1)
    data = list(zip(x.split(64), y.split(64), strict=True))
    model = copy.deepcopy(truth)
    with torch.no_grad():
        model.qkv.weight[rows] = 1e-3 * torch.randn(len(rows), 12)
    search = {"method": method, "epochs": 4} | ({} if method == "taylor" else {"lr": 0.01})
    recipe = {
        "budget": {"dims": 11 / 16},
        "search": search,
        "target": {"channels": False, "attention": True, "mlp": True},
        "timing": {"repeats": 3},
        "seed": seed,
    }
    keep = compress.prune(model, recipe, train=data, quiet=True).plan.keep
    assert sorted(set(range(6)) - set(keep["qkv"])) == dead
    assert sorted(set(range(10)) - set(keep["fc1"])) == idle
