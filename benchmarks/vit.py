"""A small ViT on CIFAR-10, trained once and kept: what benchmarks/transformer.py prunes."""

from __future__ import annotations

import hashlib
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import compress

from . import data
from .models import cifar_resnet, cifar_vit

BATCH, EPOCHS, IMAGES = 64, 6, 45000
TEACHER = {"temperature": 4, "weight": 8}


def trained(folder: Path, out: Path) -> nn.Module:
    """The network in eval mode, from `out`; if it is not there it is trained, and that goes on where it was stopped."""
    path = out / "cifar_vit.safetensors"
    torch.manual_seed(0)
    model = cifar_vit()
    if not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        _train_(model, folder, out / "cifar_vit_training.pt")
        save_file(model.state_dict(), path)
    model.load_state_dict(load_file(path))
    return model.eval()


def digest(model: nn.Module) -> str:
    """A name for a set of weights."""
    numbers = hashlib.sha256()
    for tensor in model.state_dict().values():
        numbers.update(tensor.numpy().tobytes())
    return numbers.hexdigest()[:16]


def accuracy(model: nn.Module, images: TensorDataset) -> float:
    with torch.inference_mode():
        right = [(model(x).argmax(1) == y).sum() for x, y in DataLoader(images, 500)]
    return float(torch.stack(right).sum()) / len(images)


def _train_(model: nn.Module, folder: Path, checkpoint: Path) -> None:
    """AdamW and a cosine, with crops and flips, and a trained ResNet-20 as the teacher."""
    images = DataLoader(data.Flipped(*data.cifar10(folder, "train", IMAGES)), BATCH, shuffle=True, drop_last=True)
    teacher = cifar_resnet("resnet20", folder).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    total = EPOCHS * len(images)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, total))
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    first = 0
    if checkpoint.exists():
        kept = torch.load(checkpoint, weights_only=True)
        first = kept.pop("epoch")
        for name, content in kept.items():
            state[name].load_state_dict(content)
    start = time.perf_counter()
    for epoch in range(first, EPOCHS):
        torch.manual_seed(epoch)
        model.train()
        seen = 0.0
        for x, y in images:
            with torch.inference_mode():
                said = teacher(x)
            outputs = model(x)
            loss = F.cross_entropy(outputs, y)
            loss = loss + TEACHER["weight"] * compress.distillation(outputs, said.clone(), TEACHER["temperature"])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            seen += float(loss.detach())
        torch.save({name: part.state_dict() for name, part in state.items()} | {"epoch": epoch + 1}, checkpoint)
        spent = time.perf_counter() - start
        print(f"epoch {epoch + 1} of {EPOCHS}: loss {seen / len(images):.3f}, {spent:.0f} s", flush=True)
    checkpoint.unlink(missing_ok=True)


def _rate(step: int, total: int) -> float:
    """Warm up over a twentieth, then half a cosine."""
    warm = total // 20
    return (step + 1) / warm if step < warm else (1 + math.cos(math.pi * (step - warm) / (total - warm))) / 2
