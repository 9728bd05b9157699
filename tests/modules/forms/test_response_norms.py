"""Norms over channels of feature maps: ConvNeXt V2's global response norm and RMS norms, cut to random widths."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compress
from cases import Net, distance, randomise_, run
from cases.families import Logits
from compress import Plan
from compress.recipe import Target
from helpers.random_plans import check_random_plans, unequal_keep

PLANS = 20
TARGETS = {"inner": {}, "all": {"residual": True, "embedding": True, "mlp": True}}


def _timm(name: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        return pytest.importorskip("timm").create_model(name, num_classes=5, **settings)  # type: ignore[no-any-return]

    return make


def _transformers() -> nn.Module:
    library = pytest.importorskip("transformers")
    config = library.ConvNextV2Config(hidden_sizes=[8, 12, 16, 20], depths=[1, 1, 1, 1], num_labels=5)
    return Logits(library.ConvNextV2ForImageClassification(config))


def _rms_blocks() -> nn.Module:
    layers = pytest.importorskip("timm.layers")

    def run_blocks(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        x = x + m.project(m.norm2(m.depthwise(m.norm1(m.expand(x)))))
        return m.head(m.norm(x).mean((2, 3)))  # type: ignore[no-any-return]

    norms = {f"norm{i}": layers.RmsNormAct2d(24, act_layer=nn.GELU) for i in (1, 2)}
    convs = {"expand": nn.Conv2d(8, 24, 1, bias=False), "project": nn.Conv2d(24, 8, 1)}
    depthwise = nn.Conv2d(24, 24, 3, padding=1, groups=24)
    return Net(
        run_blocks,
        stem=nn.Conv2d(3, 8, 3),
        depthwise=depthwise,
        norm=layers.RmsNorm2d(8),
        head=nn.Linear(8, 5),
        **norms,
        **convs,
    )


SMALL = {"depths": (1, 1, 1, 1), "dims": (8, 12, 16, 20)}
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # and how many groups have a norm over them
    "timm, channels first": (_timm("convnextv2_atto", **SMALL), 4),
    "timm, channels last": (_timm("convnextv2_atto", conv_mlp=False, **SMALL), 4),
    "transformers": (_transformers, 4),
    "timm, RMS norms": (_rms_blocks, 1),
}


def build(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return randomise_(NETWORKS[name][0]().double()).eval(), torch.randn(2, 3, 64, 64).double()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NETWORKS)
def test_channels_under_a_norm_are_cut_exactly(name: str, target: str, tmp_path: Path) -> None:
    model, x = build(name)
    groups = compress.find_groups(model, x, Target(**TARGETS[target]))
    gated = [g for g in groups if g.gated_on_output and g.kind in ("channels", "mlp")]
    assert len(gated) == NETWORKS[name][1], groups.refused
    check_random_plans(model, x, groups, PLANS, tmp_path)


def test_response_norm_divides_by_the_dense_width() -> None:
    """The compact form against timm's own on a feature map with zero channels."""
    grn = pytest.importorskip("timm.layers.grn").GlobalResponseNorm(9).double()
    torch.manual_seed(0)
    kept, x = torch.tensor([0, 2, 3, 7]), torch.zeros(2, 5, 6, 9).double()
    x[..., kept] = torch.randn(2, 5, 6, 4).double()
    with torch.no_grad():
        for p in grn.parameters():
            p.copy_(torch.randn_like(p))
        expected = grn(x)[..., kept]
        compress.modules.use_compact_form_(grn)
        for p in grn.parameters():
            p.data = p.data[kept]
        assert torch.allclose(grn(x[..., kept]), expected, atol=1e-13)


def test_response_norm_is_exported(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    from compress.exporters import onnx as exporter

    model, x = build("timm, channels last")
    groups = compress.find_groups(model, x, Target())
    small = Plan.build(model, groups, unequal_keep(groups, 3)).apply_(copy.deepcopy(model)).float()
    exporter.export(small, tmp_path / "small.onnx", x.float())  # compares the file with the network
    assert (tmp_path / "small.onnx").exists()


def test_sum_over_channels_is_cut_where_zero_rows_make_it_zero() -> None:
    def total(m: Any, x: Tensor) -> Tensor:
        x = m.first(x).tanh()
        return m.second(x / (1 + x.abs().sum(1, keepdim=True)))  # type: ignore[no-any-return]

    def total_of_cosines(m: Any, x: Tensor) -> Tensor:
        x = m.first(x).cos()
        return m.second(x / x.sum(1, keepdim=True))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 6).double()
    layers = {"first": nn.Conv2d(3, 12, 3), "second": nn.Conv2d(12, 4, 1)}
    model = randomise_(Net(total, **layers).double()).eval()
    groups = compress.find_groups(model, x)
    assert [(g.name, g.gated_on_output) for g in groups] == [("first", True)]
    for seed in range(PLANS):
        plan = Plan.build(model, groups, unequal_keep(groups, seed))
        zeroed = run(plan.zero_(copy.deepcopy(model)), x)
        assert distance(run(plan.apply_(copy.deepcopy(model)), x), zeroed) < 1e-12
    refused = compress.find_groups(Net(total_of_cosines, **layers).double(), x)
    assert not len(refused)
    assert any("summed over by `sum`" in r.reason for r in refused.refused)
