"""The families of networks that the benchmarks run on, untrained, with nothing hidden behind zeros or ones."""

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


def build(name: str, **options: Any) -> nn.Module:
    """An untrained network in eval mode, every constant vector of it made random."""
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
    return randomise_(model.eval())


@torch.no_grad()
def randomise_(model: nn.Module) -> nn.Module:
    """Fresh norms, biases and layer scales are constant, and a factor of zero or one hides what is behind it."""
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


def example(name: str) -> Any:
    """What the network is called with: one image."""
    generator = torch.Generator().manual_seed(2)
    if name in DETECTORS:
        return [torch.rand(3, 224, 224, generator=generator)]
    size = 299 if name == "inception_v3" else 224
    return torch.randn(1, 3, size, size, generator=generator)


def compared(name: str, model: nn.Module) -> nn.Module:
    """The part whose outputs are compared: a detector's boxes are sorted and filtered, its feature maps are not."""
    return model.get_submodule("backbone") if name in DETECTORS else model


def compared_input(name: str) -> Tensor:
    inputs = example(name)
    return torch.stack(inputs) if name in DETECTORS else inputs


@torch.no_grad()
def outputs(name: str, model: nn.Module, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """What the network computes in double precision; changes the model's dtype."""
    result = compared(name, model.eval().to(dtype))(compared_input(name).to(dtype))
    return [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]


def difference(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest difference, relative to the largest value of the same tensor; infinite if shapes differ."""
    if [t.shape for t in a] != [t.shape for t in b]:
        return float("inf")
    return max(float((x - y).abs().max() / x.abs().max().clamp_min(1e-300)) for x, y in zip(a, b, strict=True))


@torch.no_grad()
def count_macs(module: nn.Module, *args: Any, **kwargs: Any) -> int:
    """Multiply-adds of one run, as torch's own counter has them."""
    with FlopCounterMode(display=False) as counter:
        module(*args, **kwargs)
    return counter.get_total_flops() // 2
