"""Networks of the sweep: untrained models of five libraries, with small example inputs.

timm: the smallest model of each of its model modules (timm 1.0.31; a depth is given where it has over 80 M parameters).
torchvision: the smallest model of each family. The other libraries: one small model of each architecture.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from compress.modules import as_call_inputs

from . import zoo
from .transformers_configs import CONFIGS

# Models that take `img_size`, which sets the size of position embeddings and windows.
TIMM_SIZED = """
beit_base_patch16_224:depth=3 cait_xxs24_224 coat_tiny convit_tiny deit_tiny_patch16_224 efficientformerv2_s0
efficientvit_m0 gcvit_xxtiny gemma4_vit_167m:depth=6 gmlp_ti16_224 hiera_tiny_224 levit_128s maxvit_pico_rw_256
mobileone_s1 mobilevit_xxs mvitv2_tiny naflexvit_base_patch16_parfac_gap:depth=3 nest_tiny pit_ti_224
qwen3_vit_88m:depth=3 repvit_m1 samvit_base_patch16_224:depth=4 sequencer2d_s swiftformer_xs
swin_tiny_patch4_window7_224 swinv2_cr_tiny_224 swinv2_tiny_window8_256 tnt_s_legacy_patch16_224 twins_svt_small
visformer_tiny vit_srelpos_small_patch16_224 vit_tiny_patch16_224 vit_tiny_patch16_dinov3_qkvb vit_tiny_r_s16_p8_224
vitamin_small_224 volo_d1_224 xcit_nano_12_p16_224 deepseek_vit_412m:depth=2 efficientformer_l1 halonet_h1
""".split()  # noqa: SIM905
TIMM = """
convmixer_768_32 convnext_zepto_rms cpubone_nano crossvit_tiny_240 cs3darknet_focus_s csatv2 cspnext_tiny davit_tiny
densenet121 dla46x_c dpn48b edgenext_xx_small efficientvim_m1 efficientvit_b0 ese_vovnet19b_slim_dw fasternet_t0
fastvit_t8 focalnet_tiny_srf ghostnet_050 hardcorenas_b hgnetv2_b0 hrnet_w18_small iformer_t inception_next_atto
inception_resnet_v2 inception_v3 inception_v4 lcnetv2_small legacy_seresnet18 legacy_xception lowformer_b0
mambaout_femto mobilenetv2_035 mobilenetv3_small_050 mobilenetv5_base nasnetalarge nextvit_small nf_regnet_b0
pnasnet5large poolformerv2_s12 pvt_v2_b0 rdnet_tiny regnetx_002 repghostnet_050 res2next50 resnest14d resnet10t
resnetv2_18 rexnet_100 sam2_hiera_tiny selecsls42 shvit_s1 skresnet18 starnet_s050 tiny_vit_5m_224 tresnet_m vgg11
xception41p
""".split()  # noqa: SIM905
TORCHVISION = """
alexnet vgg11_bn squeezenet1_1 googlenet inception_v3 densenet121 shufflenet_v2_x0_5 mnasnet0_5 mobilenet_v2
mobilenet_v3_small efficientnet_b0 efficientnet_v2_s regnet_x_400mf regnet_y_400mf resnet18 resnet50 resnext50_32x4d
wide_resnet50_2 convnext_tiny vit_b_32 swin_t swin_v2_t maxvit_t deeplabv3_mobilenet_v3_large fcn_resnet50
lraspp_mobilenet_v3_large fasterrcnn_mobilenet_v3_large_320_fpn fcos_resnet50_fpn keypointrcnn_resnet50_fpn
maskrcnn_resnet50_fpn retinanet_resnet50_fpn ssd300_vgg16 ssdlite320_mobilenet_v3_large mc3_18 r3d_18 r2plus1d_18 s3d
MViT swin3d_t raft_small
""".split()  # noqa: SIM905
SEGMENTERS = ("deeplabv3_mobilenet_v3_large", "fcn_resnet50", "lraspp_mobilenet_v3_large")
DETECTORS = tuple(name for name in TORCHVISION if any(part in name for part in ("rcnn", "fcos", "retina", "ssd")))
VIDEO_FRAMES = {"mc3_18": 4, "r3d_18": 4, "r2plus1d_18": 4, "s3d": 16, "MViT": 4, "swin3d_t": 4}
SMP = """
Unet UnetPlusPlus FPN PSPNet DeepLabV3 DeepLabV3Plus Linknet MAnet PAN UPerNet Segformer Unet:mit_b0 Segformer:mit_b0
DPT:tu-vit_tiny_patch16_224
""".split()  # noqa: SIM905
ULTRALYTICS = """
yolov3-tiny yolov5n yolov6n yolov8n yolov8n-ghost yolov9t yolov10n yolo11n yolo11n-seg yolo11n-pose yolo11n-obb
yolo11n-cls yolo12n yolo26n yolo26n-seg rtdetr-resnet50
""".split()  # noqa: SIM905
LIBRARIES = {
    "timm": TIMM_SIZED + TIMM,
    "torchvision": TORCHVISION,
    "segmentation_models_pytorch": SMP,
    "transformers": list(CONFIGS),
    "ultralytics": ULTRALYTICS,
}
NAMES = [f"{library}/{name}" for library, names in LIBRARIES.items() for name in names]
SIZES = {
    "timm/deepseek_vit_412m:depth=2": 112,
    "timm/efficientformer_l1": 224,
    "timm/halonet_h1": 256,
    "timm/inception_resnet_v2": 96,
    "timm/inception_v3": 96,
    "timm/inception_v4": 96,
    "torchvision/inception_v3": 96,
    "torchvision/maxvit_t": 224,
    "torchvision/raft_small": 128,
    "torchvision/s3d": 224,
    "segmentation_models_pytorch/PAN": 128,
    "transformers/Swin2SRForImageSuperResolution": 32,
}
DEFAULT_SIZE = 64


@dataclass
class Example:
    """A network with its example inputs."""

    model: nn.Module
    inputs: Any
    compared_modules: list[str] = field(default_factory=list)  # compared instead of the outputs, which are filtered
    dtype: torch.dtype = torch.float64  # in which outputs are compared


def missing_library(name: str) -> str:
    """Return the library that a network needs if it is not installed, or an empty string."""
    library = name.partition("/")[0]
    return "" if importlib.util.find_spec(library) else library


def build_example(name: str) -> Example:
    """Return an untrained network in eval mode, its constants randomized and its weights scaled, and its inputs."""
    library, _, model_name = name.partition("/")
    builders: dict[str, Callable[[str, int], Example]] = {
        "timm": _timm,
        "torchvision": _torchvision,
        "segmentation_models_pytorch": _smp,
        "transformers": _transformers,
        "ultralytics": _ultralytics,
    }
    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        example = builders[library](model_name, SIZES.get(name, DEFAULT_SIZE))
    amplify_(zoo.randomize_(example.model.eval()))
    calibrate_(example)
    return example


@torch.no_grad()
def amplify_(model: nn.Module) -> nn.Module:
    """Scale up small weights, so that no signal vanishes on the way to the outputs and an error there is visible.

    With the initial weights of some networks, a change of attention changes the outputs by 1e-11 of their range.
    """
    for name, weight in model.named_parameters():
        if "weight" in name.rpartition(".")[2] and weight.ndim > 1:
            deviation = (2 * weight.shape[0] / weight.numel()) ** 0.5  # He et al. 2015
            weight *= max(1.0, deviation / float(weight.std().clamp_min(1e-12)))
    return model


@torch.no_grad()
def calibrate_(example: Example) -> None:
    """Multiply running variances by the mean square of each norm's input, so that no signal grows without limit.

    Large logits make softmax choose one position, whatever the scale of attention is, which would hide an error in it.
    """

    def scale_variance_(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        norm.running_var *= inputs[0].square().mean().clamp_min(1e-3)

    norms = [module for module in example.model.modules() if isinstance(getattr(module, "running_var", None), Tensor)]
    handles = [norm.register_forward_pre_hook(scale_variance_) for norm in norms]
    args, kwargs = as_call_inputs(example.inputs)
    example.model(*args, **kwargs)
    for handle in handles:
        handle.remove()


def _image(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(2))


def _timm(name: str, size: int) -> Example:
    import timm

    options: dict[str, int] = {"img_size": size} if name in TIMM_SIZED else {}
    name, _, depth = name.partition(":depth=")
    if depth:
        options["depth"] = int(depth)
    return Example(timm.create_model(name, pretrained=False, **options), _image(1, 3, size, size))


def _torchvision(name: str, size: int) -> Example:
    import torchvision

    options: dict[str, Any] = {"weights": None}
    inputs: Any = _image(1, 3, size, size)
    if name in DETECTORS + SEGMENTERS:
        options["weights_backbone"] = None
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = False
    if name == "vit_b_32":
        options["image_size"] = size
    if name == "raft_small":
        images = {"image1": inputs, "image2": inputs.flip(-1)}
        model = torchvision.models.get_model(name, **options)
        return Example(model, images | {"num_flow_updates": 2}, dtype=torch.float32)  # its code converts to float32
    if name in VIDEO_FRAMES:
        inputs = _image(1, 3, VIDEO_FRAMES[name], size, size)
    if name == "MViT":
        return Example(_small_mvit(size), inputs)
    if name not in DETECTORS:
        return Example(torchvision.models.get_model(name, **options), inputs)
    if not name.startswith("ssd"):
        options |= {"min_size": 128, "max_size": 160}
    if "rcnn" in name:  # few boxes, because heads compute for each box, but of any score, so that there are some
        options |= {"rpn_post_nms_top_n_test": 20, "box_detections_per_img": 5, "box_score_thresh": -1.0}
    model = torchvision.models.get_model(name, **options)
    pattern = r"backbone|head|rpn\.head|roi_heads\.\w+_predictor"
    modules = [path for path, _ in model.named_modules() if re.fullmatch(pattern, path)]
    return Example(model, [_image(3, 128, 128)], modules)


def _small_mvit(size: int) -> nn.Module:
    """Return an MViT v2 with four blocks, because the registered ones take no other input size than their own."""
    from torchvision.models.video import mvit

    options = {"kernel_q": [3, 3, 3], "kernel_kv": [3, 3, 3], "stride_kv": [1, 2, 2]}
    blocks = [
        mvit.MSBlockConfig(1, 48, 96, stride_q=[1, 1, 1], **options),
        mvit.MSBlockConfig(2, 96, 96, stride_q=[1, 2, 2], **options),
        mvit.MSBlockConfig(2, 96, 192, stride_q=[1, 1, 1], **options),
        mvit.MSBlockConfig(4, 192, 192, stride_q=[1, 2, 2], **options),
    ]
    return mvit.MViT(
        (size, size),
        VIDEO_FRAMES["MViT"],
        blocks,
        residual_pool=True,
        residual_with_cls_embed=False,
        rel_pos_embed=True,
        proj_after_attn=True,
    )


def _smp(name: str, size: int) -> Example:
    import segmentation_models_pytorch as smp

    decoder, _, encoder = name.partition(":")
    options = {"dynamic_img_size": True} if decoder == "DPT" else {}
    model = getattr(smp, decoder)(encoder or "resnet18", encoder_weights=None, classes=5, **options)
    return Example(model, _image(1, 3, size, size))


def _transformers(name: str, size: int) -> Example:
    import transformers

    model_class = getattr(transformers, name)
    model = model_class(model_class.config_class(**CONFIGS[name]))
    if frames := CONFIGS[name].get("num_frames"):
        return Example(model, {"pixel_values": _image(1, frames, 3, size, size)})
    if name == "Siglip2VisionModel":  # takes patches
        patches = {"pixel_values": _image(1, 16, 192), "pixel_attention_mask": torch.ones(1, 16, dtype=torch.long)}
        return Example(model, patches | {"spatial_shapes": torch.tensor([[4, 4]])})
    return Example(model, {"pixel_values": _image(1, 3, size, size)})


def _ultralytics(name: str, size: int) -> Example:
    from ultralytics.nn import tasks

    kinds = {"seg": "Segmentation", "pose": "Pose", "obb": "OBB", "cls": "Classification"}
    kind = "RTDETRDetection" if name.startswith("rtdetr") else kinds.get(name.rpartition("-")[2], "Detection")
    return Example(getattr(tasks, f"{kind}Model")(f"{name}.yaml", verbose=False), _image(1, 3, size, size))
