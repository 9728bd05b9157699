"""Attention cut by queries and keys, by values, per head, by whole heads, and along the residual stream."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import compress
from cases import distance, run, same_bits
from cases.families import FAMILIES, Small, family
from compress import Plan
from compress.graph import Groups
from compress.modules import attend, join_heads, split_heads, use_compact_forms_
from compress.recipe import Target
from compress.surgery.gates import attach_, fold_

WAYS: dict[str, dict[str, Any]] = {
    "qk and v": {"attention": ["qk", "v"]},
    "per head": {"attention": "per_head"},
    "all apart": {"attention": ["qk", "v", "per_head"]},
    "heads": {"attention": "heads"},
    "embedding": {"embedding": True},
}
NAMES = ["timm vit", "timm vit, qk norm", "timm swin", "timm swin v2", "timm beit", "timm pvt v2", "timm cait"]
NAMES += ["timm mobilevit", "torchvision vit", "torchvision swin", "torchvision swin v2", "torch encoder"]
NAMES += ["transformers vit", "transformers swin", "transformers dinov2", "own"]
STREAMLESS = ("torch encoder", "own")  # theirs are outputs, or pass through no norm


def target(way: str) -> Target:
    return Target(channels=False, **WAYS[way])


def part(groups: Groups, of: float = 0.4, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {g.name: g.indices_per_head(max(1, int(of * g.width // g.num_heads)), random) for g in groups}


CASES = [(n, w) for n in NAMES for w in WAYS if not (w == "embedding" and n in STREAMLESS)]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_zeroed_scored_and_sliced_networks_are_one_function(name: str, way: str, tmp_path: Path) -> None:
    model, x = family(name)
    groups = compress.find_groups(model, x, target(way))
    assert len(groups), groups.refused
    keep = part(groups)
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
    assert distance(run(scored, x), zeroed) < 1e-10
    assert distance(run(fold_(scored), x), zeroed) < 1e-10


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["timm vit", "timm swin", "torchvision swin"])
def test_costs_are_those_that_torch_counts(name: str, way: str) -> None:
    model, x = family(name)
    groups = compress.find_groups(model, x, target(way))
    keep = part(groups)
    small = Plan.build(model, groups, keep).apply_(use_compact_forms_(copy.deepcopy(model)))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        small(x[:1])
    widths = [len(keep[n]) for n in groups.cost.names]
    assert counter.get_total_flops() // 2 == int(groups.cost.macs(widths))
    assert sum(p.numel() for p in small.parameters()) == int(groups.cost.params(widths))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", ["magnitude", "netslim"])
def test_whole_pruning_reloads_to_the_same_bits(method: str, way: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = family("timm vit")[0].float()
    x, y = torch.randn(4, 3, 64, 64), torch.randint(0, 7, (4,))
    search = {"method": method} | ({"epochs": "2 steps"} if method == "netslim" else {})
    recipe = {
        "target": {"channels": False, **WAYS[way], "min_keep": 1},
        "budget": {"dims": "70%"},
        "search": search,
        "timing": {"repeats": 3},
    }
    pruned = compress.prune(model, recipe, train=[(x, y)], quiet=True)
    assert sum(g.kept for g in pruned.report.groups) <= 0.7 * sum(g.width for g in pruned.report.groups)
    pruned.save(tmp_path / "out")
    expected = run(pruned.model.eval(), x)
    assert same_bits(run(compress.load(copy.deepcopy(model), tmp_path / "out").eval(), x), expected)


def test_a_head_is_one_dimension_for_round_to_and_min_keep() -> None:
    model, x = family("timm vit")
    recipe = {"target": {"channels": False, "attention": "heads", "round_to": 8, "min_keep": 4}}
    recipe |= {"budget": {"dims": "34%"}, "timing": {"repeats": 3}}
    pruned = compress.prune(model, recipe, example_inputs=x, quiet=True)
    assert [(g.kind, g.kept, g.width) for g in pruned.report.groups] == [("heads", 1, 3)] * 2
    assert [block.attn.num_heads for block in pruned.model.blocks] == [1, 1]


@pytest.mark.parametrize("only", ["qk", "v"])
def test_one_part_alone(only: str) -> None:
    model, x = family("torchvision swin")
    groups = compress.find_groups(model, x, Target(channels=False, attention=only))
    assert {g.attention_part for g in groups} == {only}
    other = {"qk": "v", "v": "qk"}[only]
    assert any(r.reason == f"target.attention has no {other}" for r in groups.refused)


class Fused(nn.Module):
    """Attention of one's own whose code takes a fused projection to three equal pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(t, 3) for t in self.qkv(x).chunk(3, -1))
        return self.proj(join_heads(attend(q, k, v, 0.3)))  # type: ignore[no-any-return]


def test_attention_that_cannot_be_scored_apart_says_what_would_help() -> None:
    model, x = nn.Sequential(Fused(), nn.Linear(24, 5)), torch.randn(2, 7, 24)
    groups = compress.find_groups(model, x, target("qk and v"))
    assert not len(groups)
    reason = next(r.reason for r in groups.refused if r.name == "0.qkv")
    assert "Fused uses one width for queries, keys and values" in reason
    assert "Write a compact form of Fused to cut it: see compress/modules/compact_forms.py" in reason


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["heads", "per_head"], r"whole heads and dimensions within them cannot be cut at the same time.* Prune twice"),
        (["heads", "qk"], r"expected heads alone, or some of qk, v, per_head"),
        ("head", r"expected true, false, auto, or some of qk, v, per_head, heads, as \[qk, v\]; got 'head'"),
        ([], r"expected true, false, auto, or some of"),
        (2, r"expected true, false, auto, or some of .*; got 2"),
    ],
)
def test_wrong_words_for_attention(value: Any, message: str) -> None:
    with pytest.raises(compress.RecipeError, match=f"target.attention.*{message}"):
        compress.Recipe.load({"target": {"attention": value}, "budget": {"dims": "50%"}})


def test_words_survive_yaml_and_json(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("target: {attention: [v, qk]}\nbudget: {dims: 50%}\n")
    recipe = compress.Recipe.load(tmp_path / "a.yaml")
    assert recipe.target.attention == ("qk", "v")
    assert compress.Recipe.model_validate_json(recipe.model_dump_json()) == recipe


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("method", ["netslim", "rarts", "taylor", "bayesnas"])
def test_planted_useless_head_comes_last(method: str, seed: int) -> None:
    """Labels come from a network in which one head of four is never read."""
    torch.manual_seed(seed)
    truth = Small(width=16, heads=4)
    dead = int(torch.randint(4, ()))
    with torch.no_grad():
        for p in truth.parameters():
            p.copy_(torch.randn_like(p) * (0.3 if p.ndim < 2 else 2.0 / p[0].numel() ** 0.5))
        truth.proj.weight[:, dead * 4 : dead * 4 + 4] = 0
        x = torch.randn(1024, 5, 16)
        y = truth(x).argmax(-1)
        model = copy.deepcopy(truth)
        model.proj.weight[:, dead * 4 : dead * 4 + 4] = 1e-2 * torch.randn(16, 4)
    data = list(zip(x.split(64), y.split(64), strict=True))
    recipe = {
        "budget": {"dims": 0.75},
        "search": {"method": method, "epochs": 4} | ({} if method == "taylor" else {"lr": 0.01}),
        "target": {"channels": False, "attention": "heads"},
        "timing": {"repeats": 3},
        "seed": seed,
    }
    keep = compress.prune(model, recipe, train=data, quiet=True).plan.keep
    assert set(range(4)) - set(keep["qkv"]) == {dead}


def test_every_family_has_its_rows_here() -> None:
    assert set(NAMES) <= set(FAMILIES)
