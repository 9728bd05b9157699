"""Attention at random widths, every group with one of its own: zeroed and sliced networks are one function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import compress
from cases.families import FAMILIES, family
from compress.recipe import Target
from helpers.random_plans import check_random_plans, randomize_

PLANS = 20
WAYS: dict[str, dict[str, Any]] = {
    "together": {"channels": False, "attention": True, "mlp": True},
    "qk and v": {"channels": False, "attention": ["qk", "v"], "mlp": True},
    "per head": {"channels": False, "attention": "per_head"},
    "all apart": {"channels": False, "attention": ["qk", "v", "per_head"]},
    "heads": {"channels": False, "attention": "heads", "mlp": True},
    "everything": {"residual": True, "embedding": True, "attention": ["qk", "v"], "mlp": True},
    "everything, by heads": {"residual": True, "embedding": True, "attention": "heads", "mlp": True},
}
NAMES = ["ultralytics attention", "ultralytics area attention", "own, on images", "own, by head width"]
NAMES += ["own, in blocks", "torch encoder, batch second"]
NAMES += ["transformers vit", "transformers vit, eager", "transformers deit", "transformers dinov2"]
NAMES += ["transformers dinov2, eager", "transformers dinov2 with registers", "transformers swin"]
NAMES += ["transformers swin, eager", "timm cait", "timm levit", "timm levit, convolutions", "timm efficientvit"]
NAMES += [
    "timm vit",
    "timm vit, as many heads as dimensions",
    "timm vit, attention pool",
    "timm vit, relative positions",
]
NAMES += ["timm vit, table of relative positions", "timm vit, shared relative positions", "timm crossvit", "timm nest"]
NAMES += ["timm twins", "torch encoder", "torch attention, widths of its own"]
NAMES += ["torch attention, widths of its own, no bias"]

NEWER = ["transformers ijepa", "transformers beit", "transformers clip", "transformers clip, eager"]
NEWER += ["transformers siglip", "transformers yolos", "transformers vivit", "transformers videomae"]
NEWER += ["transformers detr", "timm davit", "torchvision swin on video"]
VALUES_ALONE = {  # ways to cut attention whose queries and keys stay whole, or have the width of the values
    "transformers timesformer": ["together", "heads", "everything, by heads"],
    "transformers dinov3": ["together", "qk and v", "heads", "everything"],
}

# Heads of EfficientViT are modules, not a dimension of a tensor.
CASES = [(name, way) for name in NAMES for way in WAYS if not (name == "timm efficientvit" and "heads" in way)]

CASES += [(name, way) for name in NEWER for way in ("together", "all apart", "everything", "everything, by heads")]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_random_unequal_widths_are_exact(name: str, way: str, tmp_path: Path) -> None:
    model, x = family(name)
    groups = compress.find_groups(model, x, Target(**WAYS[way]))
    kind = "heads" if "heads" in way else "attention"
    assert sum(g.kind == kind for g in groups) >= (1 if kind == "heads" else FAMILIES[name][1]), groups.refused
    assert not [r for r in groups.refused if "does not run" in r.reason or "differ" in r.reason]
    parts = {g.attention_part for g in groups if g.kind == "attention"}
    assert parts == {"qk", "v"} or way not in ("qk and v", "all apart", "everything")
    check_random_plans(model, x, groups, PLANS, tmp_path)


@pytest.mark.parametrize(("name", "way"), [(name, way) for name, ways in VALUES_ALONE.items() for way in ways])
def test_attention_that_is_cut_in_part_is_exact(name: str, way: str, tmp_path: Path) -> None:
    model, x = family(name)
    groups = compress.find_groups(model, x, Target(**WAYS[way]))
    kind = "heads" if "heads" in way else "attention"
    assert sum(g.kind == kind for g in groups) == FAMILIES[name][1], groups.refused
    parts = {g.attention_part for g in groups if g.kind == "attention"}
    assert parts <= ({"v"} if "dinov3" in name else {"qkv"})
    assert not [r for r in groups.refused if "does not run" in r.reason or "differ" in r.reason]
    check_random_plans(model, x, groups, PLANS, tmp_path)


def test_features_of_a_single_head_are_no_heads() -> None:
    model, x = family("timm efficientvit")
    groups = compress.find_groups(model, x, Target(**WAYS["heads"]))
    assert not [g for g in groups if g.kind == "heads"]


@pytest.mark.parametrize("way", ["all apart", "heads", "everything"])
@pytest.mark.parametrize("name", ["yolov10n", "yolo11n", "yolo12n", "yolo26n"])
def test_random_unequal_widths_of_yolo_are_exact(name: str, way: str, tmp_path: Path) -> None:
    tasks = pytest.importorskip("ultralytics.nn.tasks")
    torch.manual_seed(0)
    x = torch.randn(2, 3, 96, 96).double()
    model = randomize_(tasks.DetectionModel(f"{name}.yaml", verbose=False).double(), x)
    groups = compress.find_groups(model, x[:1], Target(**WAYS[way]))
    kind = "heads" if way == "heads" else "attention"
    blocks = {"yolov10n": 1, "yolo11n": 1, "yolo12n": 8, "yolo26n": 2}[name]
    assert sum(g.kind == kind for g in groups) == (blocks if way == "heads" else 2 * blocks)
    check_random_plans(model, x[:1], groups, PLANS, tmp_path)
