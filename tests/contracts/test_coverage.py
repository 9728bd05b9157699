"""Well-known networks can be cut exactly to half of their multiply-adds."""

from __future__ import annotations

import copy
import warnings

import pytest
import timm
import torch
import torchvision
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import compress
from cases import distance, randomise_, run, tensors_of

RECIPE = {"budget": {"macs": "50%"}, "target": {"channels": True, "residual": True}, "search": {"method": "random"}}

# name -> input size, fewest groups
TORCHVISION = {
    "resnet18": (64, 12),
    "mobilenet_v2": (64, 20),
    "mobilenet_v3_small": (64, 20),
    "shufflenet_v2_x0_5": (64, 15),
    "squeezenet1_1": (64, 15),
    "densenet121": (64, 100),
    "googlenet": (64, 50),
    "regnet_y_400mf": (64, 20),
    "convnext_tiny": (64, 18),
}
TIMM = {
    "resnetv2_50": (64, 30),
    "res2net50_26w_4s": (64, 20),
    "ghostnet_100": (64, 20),
    "skresnet18": (64, 12),
    "repvgg_a0": (64, 5),
}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name in TIMM:
            return timm.create_model(name)
        return torchvision.models.get_model(name, weights=None)


def statistics_(model: nn.Module, x: torch.Tensor) -> None:
    """Random norms, and running statistics that keep the numbers of a deep network in range."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            randomise_(module)
            module.momentum = 1.0
    model.train()
    with torch.no_grad():
        model(x)
    model.eval()


@pytest.mark.parametrize("name", [*TORCHVISION, *TIMM])
def test_half_of_a_known_network_is_exact(name: str) -> None:
    size, fewest = (TORCHVISION | TIMM)[name]
    model = make(name).double()
    x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1)).double()
    statistics_(model, x)
    pruned = compress.prune(model, RECIPE, example_inputs=x)
    assert len(pruned.report.groups) >= fewest, pruned.report.refused
    zeroed = pruned.plan.zero_(copy.deepcopy(model))
    assert distance(run(zeroed, x), run(pruned.model, x)) <= 1e-10
    with FlopCounterMode(display=False) as counter:
        run(pruned.model, x[:1])
    assert counter.get_total_flops() == 2 * pruned.report.pruned.macs
    assert 0.45 * pruned.report.dense.macs <= pruned.report.pruned.macs <= 0.5 * pruned.report.dense.macs
    assert sum(p.numel() for p in pruned.model.parameters()) == pruned.report.pruned.params


@pytest.mark.parametrize("inner", [True, False])
def test_half_of_convnext_v2_is_exact(inner: bool) -> None:
    """By inner channels, whose GRN keeps the dense mean, and by streams with their norms."""
    torch.manual_seed(0)
    model = timm.create_model("convnextv2_atto").double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.02 * torch.randn_like(p)  # what GRN is multiplied with is zero at first
    x = torch.randn(2, 3, 64, 64).double()
    pruned = compress.prune(model, RECIPE | {"target": {"channels": inner, "embedding": not inner}}, example_inputs=x)
    assert {row.kind for row in pruned.report.groups} == ({"channels"} if inner else {"embedding"})
    assert distance(run(pruned.plan.zero_(copy.deepcopy(model)), x), run(pruned.model, x)) <= 1e-10
    assert 0.45 * pruned.report.dense.macs <= pruned.report.pruned.macs <= 0.5 * pruned.report.dense.macs


def test_auxiliary_heads_run_in_training_mode() -> None:
    model = make("googlenet").eval()
    x = torch.randn(2, 3, 64, 64)
    pruned = compress.prune(model, RECIPE, example_inputs=x)
    outputs = tensors_of(pruned.model.train()(x))
    assert [tuple(t.shape) for t in outputs] == [(2, 1000)] * 3
    sum(t.square().mean() for t in outputs).backward()
    assert all(p.grad is not None for p in pruned.model.parameters())
