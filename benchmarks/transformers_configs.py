"""Small configurations of the vision models of transformers, by class.

Shares are as in the real models: MLPs are four times as wide as the embedding, and patches are so small that their
embedding, which cannot be cut where it is the output, takes a few percent of the multiply-adds.
"""

from __future__ import annotations

from typing import Any

WIDTHS = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 192}
WIDTHS_BY_RATIO = {k: v for k, v in WIDTHS.items() if k != "intermediate_size"}
VIT = WIDTHS | {"image_size": 64, "patch_size": 8}
STAGES = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1]}
PYRAMID = {"hidden_sizes": [16, 32, 64, 96], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 4, 4]}
WINDOWS = {"image_size": 64, "patch_size": 2, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
DETR = {
    "use_timm_backbone": True,
    "backbone": "resnet18",
    "use_pretrained_backbone": False,
    "backbone_kwargs": {},
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_queries": 10,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "ViTForImageClassification": VIT | {"num_labels": 10},
    "DeiTForImageClassification": VIT | {"num_labels": 10},
    "BeitForImageClassification": VIT | {"num_labels": 10},
    "Data2VecVisionForImageClassification": VIT | {"num_labels": 10},
    "Dinov2ForImageClassification": WIDTHS_BY_RATIO | {"image_size": 64, "patch_size": 8, "num_labels": 10},
    "Dinov2WithRegistersForImageClassification": WIDTHS_BY_RATIO | {"image_size": 64, "patch_size": 8},
    "DINOv3ViTModel": VIT,
    "IJepaModel": VIT,
    "CLIPVisionModel": VIT,
    "SiglipVisionModel": VIT,
    "Siglip2VisionModel": WIDTHS | {"patch_size": 8, "num_patches": 16},
    "YolosForObjectDetection": WIDTHS | {"image_size": [64, 64], "patch_size": 8, "num_detection_tokens": 10},
    "DetrForObjectDetection": DETR,
    "ConditionalDetrForObjectDetection": DETR,
    "SwinForImageClassification": WINDOWS | {"num_labels": 10},
    "Swinv2ForImageClassification": WINDOWS | {"num_labels": 10},
    "Swin2SRForImageSuperResolution": WINDOWS | {"image_size": 32, "patch_size": 1, "num_heads": [2, 2]},
    "HieraForImageClassification": {
        "image_size": [64, 64],
        "embed_dim": 24,
        "depths": [1, 1, 2, 1],
        "num_heads": [1, 2, 4, 8],
    },
    "FocalNetForImageClassification": {"image_size": 64, "embed_dim": 24, "depths": [1, 1, 2, 1]},
    "SegformerForSemanticSegmentation": PYRAMID | {"decoder_hidden_size": 48, "num_labels": 5},
    "GLPNForDepthEstimation": PYRAMID | {"decoder_hidden_size": 16},
    "PvtForImageClassification": PYRAMID | {"image_size": 64},
    "PvtV2ForImageClassification": PYRAMID | {"image_size": 64, "num_labels": 10},
    "LevitForImageClassification": {
        "image_size": 64,
        "hidden_sizes": [32, 48, 64],
        "num_attention_heads": [2, 4, 4],
        "depths": [1, 1, 1],
        "key_dim": [8, 8, 8],
    },
    "MobileViTForImageClassification": {
        "image_size": 64,
        "hidden_sizes": [48, 64, 80],
        "neck_hidden_sizes": [8, 16, 24, 32, 40, 48, 64],
    },
    "MobileViTV2ForImageClassification": {"image_size": 64, "width_multiplier": 0.5},
    "SwiftFormerForImageClassification": {
        "image_size": 64,
        "embed_dims": [16, 32, 48, 64],
        "depths": [1, 1, 2, 1],
        "num_labels": 10,
    },
    "VideoMAEForVideoClassification": VIT | {"num_frames": 4},
    "VivitForVideoClassification": WIDTHS | {"image_size": 64, "num_frames": 4, "tubelet_size": [2, 8, 8]},
    "TimesformerForVideoClassification": VIT | {"num_frames": 4},
    "ConvNextForImageClassification": STAGES | {"num_labels": 10},
    "ConvNextV2ForImageClassification": STAGES | {"num_labels": 10},
    "PoolFormerForImageClassification": STAGES | {"num_labels": 10},
    "ResNetForImageClassification": STAGES | {"embedding_size": 16, "layer_type": "basic"},
    "RegNetForImageClassification": STAGES | {"embedding_size": 16, "groups_width": 8},
    "EfficientNetForImageClassification": {
        "image_size": 64,
        "width_coefficient": 0.5,
        "depth_coefficient": 0.5,
        "hidden_dim": 640,
    },
    "MobileNetV1ForImageClassification": {"image_size": 64, "depth_multiplier": 0.25},
    "MobileNetV2ForImageClassification": {"image_size": 64, "depth_multiplier": 0.35},
    "UperNetForSemanticSegmentation": {"hidden_size": 32, "auxiliary_channels": 16, "num_labels": 5},
}
