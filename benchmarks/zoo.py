"""Untrained torchvision and timm networks for the benchmarks, with randomized constants, and how to compare them."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

TORCHVISION = """
alexnet vgg16_bn squeezenet1_1 googlenet inception_v3 densenet121 shufflenet_v2_x1_0 mnasnet1_0 mobilenet_v2
mobilenet_v3_large efficientnet_b0 regnet_y_400mf resnet18 resnet50 resnext50_32x4d wide_resnet50_2 convnext_tiny
deeplabv3_resnet50 lraspp_mobilenet_v3_large fcos_resnet50_fpn maskrcnn_resnet50_fpn
""".split()  # noqa: SIM905
TIMM = """
resnetv2_50 hrnet_w18_small res2net50_26w_4s dla34 ghostnet_100 repvgg_a0 convnextv2_nano nfnet_f0 skresnet18 resnest14d
edgenext_x_small fastvit_t8 poolformer_s12 mobilevit_s efficientvit_b0 dm_nfnet_f0 cspdarknet53 darknet53 xception41
selecsls42b tresnet_m vovnet39a
""".split()  # noqa: SIM905
NAMES = TORCHVISION + TIMM
TRANSFORMERS = """
vit_small_patch16_224 deit_tiny_patch16_224 swin_tiny_patch4_window7_224 maxvit_tiny_rw_224 coatnet_0_rw_224
""".split()  # noqa: SIM905  (timm's)
DETECTORS = ("fcos_resnet50_fpn", "maskrcnn_resnet50_fpn")
SEGMENTERS = ("deeplabv3_resnet50", "lraspp_mobilenet_v3_large")


def build_network(name: str, **options: Any) -> nn.Module:
    """Return an untrained network in eval mode with randomized constants."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name in TIMM + TRANSFORMERS:
            import timm

            model = timm.create_model(name, pretrained=False, **options)
        else:
            import torchvision

            options = {"weights": None} | options
            if name in DETECTORS + SEGMENTERS:
                options["weights_backbone"] = None
            if name in DETECTORS:
                options |= {"min_size": 224, "max_size": 320}
            if name in ("googlenet", "inception_v3"):
                options["init_weights"] = False
            model = torchvision.models.get_model(name, **options)
    return randomize_(model.eval())


@torch.no_grad()
def randomize_(model: nn.Module) -> nn.Module:
    """Randomize tensors that are constant at initialization (norms, biases, layer scales), which could hide errors."""
    generator = torch.Generator().manual_seed(1)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        constant = tensor.is_floating_point() and tensor.numel() and bool((tensor == tensor.flatten()[0]).all())
        if not constant:
            continue
        leaf = name.rpartition(".")[2]
        if "bias" in leaf or "mean" in leaf or "beta" in leaf:
            tensor.copy_(0.2 * torch.randn(tensor.shape, generator=generator))
        else:
            tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
    return model


def example_inputs(name: str) -> Any:
    """Return the example inputs of a network: one image."""
    generator = torch.Generator().manual_seed(2)
    if name in DETECTORS:
        return [torch.rand(3, 224, 224, generator=generator)]
    size = 299 if name == "inception_v3" else 224
    return torch.randn(1, 3, size, size, generator=generator)


def compared_module(name: str, model: nn.Module) -> nn.Module:
    """Return the module whose outputs are compared: for detectors the backbone, since boxes are sorted and filtered."""
    return model.get_submodule("backbone") if name in DETECTORS else model


def compared_inputs(name: str) -> Tensor:
    """Return the inputs of the compared module."""
    inputs = example_inputs(name)
    return torch.stack(inputs) if name in DETECTORS else inputs


@torch.no_grad()
def compute_outputs(name: str, model: nn.Module, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return the outputs in double precision; changes the dtype of the model."""
    result = compared_module(name, model.eval().to(dtype))(compared_inputs(name).to(dtype))
    return [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]


def relative_difference(a: list[Tensor], b: list[Tensor]) -> float:
    """Return the largest difference relative to the largest value of the same tensor; infinite if shapes differ."""
    if [t.shape for t in a] != [t.shape for t in b]:
        return float("inf")
    return max(float((x - y).abs().max() / x.abs().max().clamp_min(1e-300)) for x, y in zip(a, b, strict=True))


@torch.no_grad()
def count_macs(module: nn.Module, *args: Any, **kwargs: Any) -> int:
    """Return the MACs of one forward pass by torch's FLOP counter."""
    with FlopCounterMode(display=False) as counter:
        module(*args, **kwargs)
    return counter.get_total_flops() // 2
