"""Small networks with attention, from every library, for the contracts of attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from compress.modules import attend, join_heads, split_heads
from compress.recipe import Target

from .attention_networks import (
    BlockAttention,
    ConvAttention,
    CrossAttention,
    HeadWidthAttention,
    Residual,
    on_images,
    on_tokens,
)

SWIN = torchvision.models.swin_transformer
BOTH = Target(channels=False, attention=True, mlp=True)


def _timm(name: str, size: int = 64, **settings: Any) -> Callable[[], tuple[nn.Module, Tensor]]:
    return lambda: (timm.create_model(name, **settings), torch.randn(2, 3, size, size))


def _swin(v2: bool, size: tuple[int, int]) -> tuple[nn.Module, Tensor]:
    more = {"block": SWIN.SwinTransformerBlockV2, "downsample_layer": SWIN.PatchMergingV2} if v2 else {}
    return SWIN.SwinTransformer([4, 4], 32, [2, 2], [2, 4], [4, 4], num_classes=7, **more), torch.randn(2, 3, *size)


def _video_swin() -> tuple[nn.Module, Tensor]:
    model = torchvision.models.video.SwinTransformer3d([2, 4, 4], 16, [2, 2], [2, 4], [2, 4, 4], num_classes=7)
    return model, torch.randn(2, 3, 6, 36, 32)


def _encoder(first: bool) -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(24, 3, 40, dropout=0.1, batch_first=first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 7, 24)


class Own(nn.Module):
    """Attention as people write it: parts apart, unfused, one width for keys and another for values."""

    def __init__(self, width: int = 24, heads: int = 3, keys: int = 10, values: int = 6) -> None:
        super().__init__()
        self.heads, self.scale = heads, keys**-0.5
        self.q, self.k = nn.Linear(width, heads * keys), nn.Linear(width, heads * keys, bias=False)
        self.v, self.out = nn.Linear(width, heads * values), nn.Linear(heads * values, width)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weights = (q * self.scale @ k.transpose(-2, -1)).softmax(-1)
        out: Tensor = self.head(x + self.out((weights @ v).transpose(1, 2).flatten(2)))
        return out


class Logits(nn.Module):
    """A network of transformers, called with images alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits  # type: ignore[no-any-return]


def _hugging(name: str, **settings: Any) -> tuple[nn.Module, Tensor]:
    library = pytest.importorskip("transformers")
    shape = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 8}
    swin = {"patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
    settings |= {"image_size": 32, **(swin if name == "Swin" else shape)}
    config = getattr(library, f"{name}Config")(**settings)
    return Logits(getattr(library, f"{name}ForImageClassification")(config)), torch.randn(2, 3, 32, 32)


class Features(nn.Module):
    """A network of transformers without a head, called with images alone; returns its features."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).last_hidden_state  # type: ignore[no-any-return]


def _hugging_features(name: str, frames: int = 0, **settings: Any) -> tuple[nn.Module, Tensor]:
    model_class = getattr(pytest.importorskip("transformers"), name, None)
    if model_class is None:
        pytest.skip(f"this version of transformers has no {name}")
    shape = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
    shape |= {"image_size": 16, "patch_size": 8, **({"num_frames": frames} if frames else {})}
    x = torch.randn(2, frames, 3, 16, 16) if frames else torch.randn(2, 3, 16, 16)
    return Features(model_class(model_class.config_class(**shape | settings))), x


class Detr(nn.Module):
    """Self-attention of DETR on the queries, then attention to them, with positions of its own."""

    def __init__(self) -> None:
        super().__init__()
        library = pytest.importorskip("transformers.models.detr.modeling_detr")
        config = library.DetrConfig(d_model=24, use_timm_backbone=True, backbone="resnet18", backbone_kwargs={})
        config._attn_implementation = "sdpa"
        self.own = library.DetrSelfAttention(config, 24, 3)
        self.cross = library.DetrCrossAttention(config, 24, 3)
        self.position, self.head = nn.Parameter(torch.randn(1, 7, 24)), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.own(x, position_embeddings=self.position)[0]
        y = y + self.cross(y, x, position_embeddings=self.position, encoder_position_embeddings=self.position)[0]
        return self.head(y)  # type: ignore[no-any-return]


def _ultralytics(name: str, **settings: Any) -> tuple[nn.Module, Tensor]:
    make = getattr(pytest.importorskip("ultralytics.nn.modules.block"), name)
    return on_images(*(make(24, num_heads=3, **settings) for _ in range(2)))


TINY_VIT = {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 4}
FAMILIES: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor]], int]] = {  # and how many groups of attention
    "timm vit": (_timm("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=7), 2),
    "timm vit, pooled, layer scale": (
        _timm("vit_tiny_patch16_224", img_size=64, depth=2, global_pool="avg", class_token=False, init_values=1e-5),
        2,
    ),
    "timm vit, swiglu": (_timm("vit_tiny_patch16_224", img_size=64, depth=2, mlp_layer=timm.layers.SwiGLU), 2),
    "timm deit, distilled": (_timm("deit_tiny_distilled_patch16_224", img_size=64, depth=2), 2),
    "timm swin": (_timm("swin_tiny_patch4_window7_224", 56, img_size=56, depths=(2, 2), embed_dim=24), 4),
    "timm swin v2": (
        _timm("swinv2_tiny_window8_256", img_size=64, window_size=4, depths=(2, 2), embed_dim=24, num_heads=(2, 4)),
        4,
    ),
    "timm beit": (_timm("beit_base_patch16_224", img_size=64, depth=2, embed_dim=48, num_heads=4), 2),
    "timm pvt v2": (_timm("pvt_v2_b0", depths=(1, 1, 1, 1)), 4),
    "timm pvt v2, linear": (_timm("pvt_v2_b2_li", depths=(1, 1, 1, 1), embed_dims=(16, 32, 40, 64)), 4),
    "timm cait": (_timm("cait_xxs24_224", img_size=64, depth=2), 6),
    "timm vit, qk norm": (_timm("vit_tiny_patch16_224", img_size=64, depth=2, qk_norm=True), 2),
    "timm vit, qk norm of squares": (
        _timm("vit_tiny_patch16_224", img_size=64, depth=2, qk_norm=True, norm_layer=timm.layers.RmsNorm),
        2,
    ),
    "timm levit": (
        lambda: (
            timm.models.levit.Levit(64, embed_dim=(32, 48), key_dim=8, depth=(1, 1), num_heads=(2, 3)),
            torch.randn(2, 3, 64, 64),
        ),
        6,
    ),
    "timm coat": (
        lambda: (
            timm.models.coat.CoaT(64, 4, embed_dims=(64,) * 4, serial_depths=(1,) * 4, mlp_ratios=(2,) * 4),
            torch.randn(2, 3, 64, 64),
        ),
        4,
    ),
    "timm xcit, class attention": (_timm("xcit_nano_12_p16_224", img_size=32, depth=1), 2),
    "timm efficientvit": (
        lambda: (
            timm.models.efficientvit_msra.EfficientVitMsra(
                64,
                embed_dim=(32, 48),
                key_dim=(8, 8),
                depth=(1, 1),
                num_heads=(2, 2),
                window_size=(4, 4),
                kernels=(3, 3),
                down_ops=(("", 1), ("subsample", 2)),
            ),
            torch.randn(2, 3, 64, 64),
        ),
        8,
    ),
    "timm levit, convolutions": (
        lambda: (
            timm.models.levit.Levit(64, embed_dim=(32, 48), key_dim=8, depth=(1, 1), num_heads=(2, 3), use_conv=True),
            torch.randn(2, 3, 64, 64),
        ),
        6,
    ),
    "timm vit, as many heads as dimensions": (_timm("vit_tiny_patch16_224", **TINY_VIT | {"embed_dim": 16}), 2),
    "timm vit, attention pool": (_timm("test_vit3", img_size=64, depth=2, num_classes=7), 3),
    "timm vit, relative positions": (_timm("vit_relpos_small_patch16_224", **TINY_VIT), 2),
    "timm vit, table of relative positions": (
        _timm("vit_relpos_base_patch16_rpn_224", rel_pos_type="bias", class_token=True, fc_norm=False, **TINY_VIT),
        2,
    ),
    "timm vit, shared relative positions": (_timm("vit_srelpos_small_patch16_224", **TINY_VIT), 2),
    "timm crossvit": (
        _timm(
            *("crossvit_9_240", 48),
            img_size=48,
            img_scale=(1.0, 2 / 3),
            embed_dim=(24, 36),
            depth=((1, 2, 0),),
            num_heads=(3, 3),
        ),
        5,
    ),
    "timm nest": (
        lambda: (
            timm.models.nest.Nest(32, patch_size=4, num_levels=2, embed_dims=(24, 36), num_heads=(3, 3), depths=(1, 1)),
            torch.randn(2, 3, 32, 32),
        ),
        2,
    ),
    "timm twins": (_timm("twins_svt_small", img_size=64, depths=(2, 2, 1, 1), embed_dims=(16, 24, 32, 48)), 6),
    "timm davit": (_timm("davit_tiny", depths=(1, 1), embed_dims=(24, 36), num_heads=(3, 3)), 2),
    "timm maxvit": (_timm("maxvit_pico_rw_256", img_size=64, depths=(1, 1), embed_dim=(32, 64)), 4),
    "timm mobilevit": (_timm("mobilevit_xxs", 64), 9),
    "torchvision vit": (
        lambda: (torchvision.models.VisionTransformer(32, 8, 2, 4, 48, 96, num_classes=7), torch.randn(2, 3, 32, 32)),
        2,
    ),
    "torchvision maxvit": (
        lambda: (torchvision.models.MaxVit((64, 64), 8, 4, [8, 16], [1, 1], 4, 0.0), torch.randn(2, 3, 64, 64)),
        4,
    ),
    "torchvision swin": (lambda: _swin(False, (72, 64)), 4),
    "torchvision swin v2": (lambda: _swin(True, (64, 72)), 4),
    "torchvision swin on video": (_video_swin, 4),
    "torch encoder": (lambda: _encoder(True), 2),
    "torch encoder, batch second": (lambda: _encoder(False), 2),
    "torch attention, widths of its own": (lambda: on_tokens(CrossAttention(bias=True)), 1),
    "torch attention, widths of its own, no bias": (lambda: on_tokens(CrossAttention(bias=False)), 1),
    "transformers vit": (lambda: _hugging("ViT", intermediate_size=96, attn_implementation="sdpa"), 2),
    "transformers vit, eager": (lambda: _hugging("ViT", intermediate_size=96, attn_implementation="eager"), 2),
    "transformers deit": (lambda: _hugging("DeiT", intermediate_size=96), 2),
    "transformers dinov2": (lambda: _hugging("Dinov2"), 2),
    "transformers dinov2, eager": (lambda: _hugging("Dinov2", attn_implementation="eager"), 2),
    "transformers dinov2 with registers": (lambda: _hugging("Dinov2WithRegisters"), 2),
    "transformers swin": (lambda: _hugging("Swin"), 4),
    "transformers swin, eager": (lambda: _hugging("Swin", attn_implementation="eager"), 4),
    "transformers ijepa": (lambda: _hugging_features("IJepaModel"), 2),
    "transformers beit": (lambda: _hugging_features("BeitModel", use_relative_position_bias=True), 2),
    "transformers clip": (lambda: _hugging_features("CLIPVisionModel"), 2),
    "transformers clip, eager": (lambda: _hugging_features("CLIPVisionModel", attn_implementation="eager"), 2),
    "transformers siglip": (lambda: _hugging_features("SiglipVisionModel"), 3),
    "transformers yolos": (
        lambda: _hugging_features("YolosModel", image_size=[16, 16], num_detection_tokens=3),
        2,
    ),
    "transformers vivit": (lambda: _hugging_features("VivitModel", frames=4, tubelet_size=[2, 8, 8]), 2),
    "transformers videomae": (lambda: _hugging_features("VideoMAEModel", frames=4), 2),
    "transformers detr": (lambda: (Detr(), torch.randn(2, 7, 24)), 2),
    "transformers timesformer": (lambda: _hugging_features("TimesformerModel", frames=4), 4),
    "transformers dinov3": (lambda: _hugging_features("DINOv3ViTModel", num_register_tokens=2), 2),
    "ultralytics attention": (lambda: _ultralytics("PSABlock"), 4),
    "ultralytics area attention": (lambda: _ultralytics("ABlock", area=4), 4),
    "own": (lambda: (Own(), torch.randn(2, 7, 24)), 2),
    "own, on images": (lambda: on_images(*(Residual(ConvAttention()) for _ in range(2))), 4),
    "own, in blocks": (lambda: on_tokens(Residual(BlockAttention())), 1),
    "own, by head width": (lambda: on_tokens(*(Residual(HeadWidthAttention()) for _ in range(2))), 2),
}
WITHOUT_MLP = (
    "timm efficientvit",
    "timm levit, convolutions",
    "own",
    "own, on images",
    "own, by head width",
    "own, in blocks",
)
WITHOUT_MLP += ("torch attention, widths of its own", "torch attention, widths of its own, no bias")
WITHOUT_MLP += ("ultralytics attention", "ultralytics area attention", "transformers detr")


def family(name: str, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """In double precision, with weights of a size that lets attention choose."""
    torch.manual_seed(seed)
    model, x = FAMILIES[name][0]()
    model = model.double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * (0.5 if p.ndim < 2 else 1.5 / p[0].numel() ** 0.5))
    return model, x.double()


def random_part(groups: Any, part: float = 0.4, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {g.name: np.sort(random.permutation(g.width)[: max(1, int(part * g.width))]) for g in groups}


class Small(nn.Module):
    """One block of attention and one MLP over five tokens, then the mean."""

    def __init__(self, width: int = 12, heads: int = 2, hidden: int = 10) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2, self.head = nn.Linear(width, hidden), nn.Linear(hidden, width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(t, self.heads) for t in self.qkv(x).chunk(3, -1))
        x = x + self.proj(join_heads(attend(q, k, v, self.scale)))
        x = x + self.fc2(torch.nn.functional.gelu(self.fc1(x)))
        return self.head(x.mean(1))  # type: ignore[no-any-return]
