"""Small images of rectangles on noise, with masks and boxes, and small detectors, to try tasks on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.models import detection, segmentation
from torchvision.models.detection.rpn import AnchorGenerator
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign

import compress


class Shapes(Dataset[Any]):
    """Images (3, size, size) with a bright square of class 1 and a dark one of class 2."""

    def __init__(self, count: int, size: int = 64, boxes: bool = False) -> None:
        self.count, self.size, self.boxes = count, size, boxes

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[Tensor, Any]:
        generator = torch.Generator().manual_seed(i)
        image = 0.4 + 0.2 * torch.rand(3, self.size, self.size, generator=generator)
        mask = torch.zeros(self.size, self.size, dtype=torch.long)
        corners = []
        side = self.size // 4
        for label in (1, 2):
            x, y = (int(n) for n in torch.randint(self.size // 2 - side, (2,), generator=generator))
            x += (label - 1) * self.size // 2
            image[:, y : y + side, x : x + side] += 0.4 if label == 1 else -0.4
            mask[y : y + side, x : x + side] = label
            corners.append([x, y, x + side, y + side])
        target = {"boxes": torch.tensor(corners, dtype=torch.float), "labels": torch.tensor([1, 2])}
        return image, target if self.boxes else mask


def mask_loaders(count: int = 8, size: int = 64) -> tuple[DataLoader[Any], DataLoader[Any]]:
    data = Shapes(count, size)
    return DataLoader(data, 4, shuffle=True), DataLoader(data, 4)


def mask_task() -> compress.Task:
    """Return a segmentation task on a few images, as a function that a command names."""
    return compress.Segmentation(*mask_loaders(8, 32))


def lists(batch: Sequence[Any]) -> Any:
    """Return samples as lists of images and of targets, as torchvision's references do."""
    return tuple(zip(*batch, strict=True))


def box_loaders(count: int = 8, size: int = 64) -> tuple[DataLoader[Any], DataLoader[Any]]:
    data = Shapes(count, size, boxes=True)
    return DataLoader(data, 2, shuffle=True, collate_fn=lists), DataLoader(data, 2, collate_fn=lists)


def train(model: nn.Module, task: Any, steps: int) -> nn.Module:
    """Train a model on the task's data, and return it in eval mode."""
    optimizer = torch.optim.AdamW(model.train().parameters(), 3e-3)
    batches = [batch for batch, _ in zip(cycle(list(task.train)), range(steps), strict=False)]
    for batch in batches:
        optimizer.zero_grad()
        task.loss(task.forward(model, batch), batch).backward()
        optimizer.step()
    return model.eval()


class Stages(nn.Module):
    """Three stages; returns the last two as torchvision's segmentation networks take them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = self.stem(x)
        return {"aux": first, "out": self.deep(first)}


def small_deeplab() -> nn.Module:
    """Return torchvision's DeepLab v3 with a small backbone and an auxiliary head, with fresh weights."""
    torch.manual_seed(0)
    heads = segmentation.deeplabv3.DeepLabHead(32, 3, (1, 2, 3)), segmentation.fcn.FCNHead(16, 3)
    return segmentation.DeepLabV3(Stages(), *heads).eval()


def small_unet() -> nn.Module:
    """Return a small U-Net of segmentation_models_pytorch, with fresh weights."""
    from segmentation_models_pytorch import Unet

    torch.manual_seed(0)
    return Unet("resnet18", encoder_weights=None, encoder_depth=3, decoder_channels=(32, 16, 16), classes=3).eval()


class Pyramid(nn.Module):
    """Three stages, and a pyramid of two maps."""

    out_channels = 32

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.down = nn.Sequential(nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(32, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU())
        self.fpn = FeaturePyramidNetwork([32, 32], 32)

    def forward(self, x: Tensor) -> Any:
        first = self.down(self.stem(x))
        return self.fpn(OrderedDict([("0", first), ("1", self.deep(first))]))


def small_detector(name: str) -> nn.Module:
    """Return a FasterRCNN, MaskRCNN, KeypointRCNN, RetinaNet or FCOS with fresh weights."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"min_size": 64, "max_size": 64, "image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    if name.endswith("RCNN"):
        sizes["rpn_anchor_generator"] = AnchorGenerator(((16,), (32,)), ((1.0,),) * 2)
        sizes |= {f"rpn_{when}_nms_top_n_{mode}": 50 for when in ("pre", "post") for mode in ("train", "test")}
        heads: dict[str, Any] = {"box_roi_pool": MultiScaleRoIAlign(["0", "1"], 3, 2)}
        heads["box_head"] = detection.faster_rcnn.TwoMLPHead(32 * 9, 64)
        heads["box_predictor"] = detection.faster_rcnn.FastRCNNPredictor(64, 3)
        pool = MultiScaleRoIAlign(["0", "1"], 6, 2)
        if name == "FasterRCNN":
            return detection.FasterRCNN(Pyramid(), **heads, **sizes).eval()
        if name == "MaskRCNN":
            heads |= {"mask_roi_pool": pool, "mask_head": detection.mask_rcnn.MaskRCNNHeads(32, (32,), 1)}
            heads["mask_predictor"] = detection.mask_rcnn.MaskRCNNPredictor(32, 32, 3)
            return detection.MaskRCNN(Pyramid(), **heads, **sizes).eval()
        heads |= {"keypoint_roi_pool": pool, "keypoint_head": detection.keypoint_rcnn.KeypointRCNNHeads(32, (32,))}
        heads["keypoint_predictor"] = detection.keypoint_rcnn.KeypointRCNNPredictor(32, 2)
        return detection.KeypointRCNN(Pyramid(), **heads, **sizes).eval()
    if name == "RetinaNet":
        anchors = AnchorGenerator(((16,), (32,)), ((1.0,),) * 2)
        return detection.RetinaNet(Pyramid(), 3, anchor_generator=anchors, **sizes).eval()
    anchors = AnchorGenerator(((8,), (16,)), ((1.0,),) * 2)
    return detection.FCOS(Pyramid(), 3, anchor_generator=anchors, **sizes).eval()
