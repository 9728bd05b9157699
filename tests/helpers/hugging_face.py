"""Small Hugging Face models from configs, and batches for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

import compress

transformers = pytest.importorskip("transformers", reason="needs transformers (pip install -e '.[dev]')")

Batch = dict[str, Any]


def vit(**changes: Any) -> Any:
    shape = {"image_size": 8, "patch_size": 2, "num_channels": 3, "hidden_size": 32, "intermediate_size": 64}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 10}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**shape | changes)).eval()


def segformer() -> Any:
    blocks = {"num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [16, 32], "num_attention_heads": [1, 2]}
    blocks |= {"sr_ratios": [2, 1], "patch_sizes": [3, 3], "strides": [4, 2], "mlp_ratios": [2, 2]}
    config = transformers.SegformerConfig(**blocks, decoder_hidden_size=16, num_labels=3)
    return transformers.SegformerForSemanticSegmentation(config).eval()


def detr() -> Any:
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "num_queries": 5, "num_labels": 3}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_attention_heads": 4, f"{side}_ffn_dim": 128}
    config = transformers.DetrConfig(use_timm_backbone=False, backbone=None, backbone_config=backbone, **sizes)
    return transformers.DetrForObjectDetection(config).eval()


MODELS = {"vit": vit, "segformer": segformer, "detr": detr}


def build(name: str) -> Any:
    """Return a model with the same fresh weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODELS[name]()


def batches(name: str, count: int = 3, size: int = 4) -> list[Batch]:
    """Return batches of noise for a model, the same each time."""
    draw = torch.Generator().manual_seed(1)
    side = 8 if name == "vit" else 32

    def labels() -> Any:
        if name == "vit":
            return torch.randint(10, (size,), generator=draw)
        if name == "segformer":
            mask = torch.randint(3, (size, side, side), generator=draw)
            mask[:, :4] = 255  # no class
            return mask
        return [
            {
                "class_labels": torch.randint(3, (2,), generator=draw),
                "boxes": 0.3 + 0.3 * torch.rand(2, 4, generator=draw),
            }
            for _ in range(size)
        ]

    return [
        {"pixel_values": torch.randn(size, 3, side, side, generator=draw), "labels": labels()} for _ in range(count)
    ]


def segmentation_task() -> Any:
    """Return the task of `segformer`, as a command names it."""
    return compress.hf.task(segformer(), batches("segformer"), batches("segformer", 1))


def inputs_of(batch: Batch) -> Batch:
    return {name: value for name, value in batch.items() if name != "labels"}


def same_outputs(one: Any, other: Any, batch: Batch) -> bool:
    """Return whether two models in eval mode return the same bits."""
    with torch.no_grad():
        results = [model(**inputs_of(batch)) for model in (one, other)]
    pairs = [(value, results[1][name]) for name, value in results[0].items() if isinstance(value, Tensor)]
    return bool(pairs) and all(torch.equal(a, b) for a, b in pairs)


class Samples(Dataset[Batch]):
    """The samples of batches, as the Trainer's collator takes them."""

    def __init__(self, source: Sequence[Batch]) -> None:
        self.samples = [
            {"pixel_values": x, "labels": y}
            for batch in source
            for x, y in zip(batch["pixel_values"], batch["labels"], strict=True)
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> Batch:
        return self.samples[i]
