"""Small ViT for CIFAR-10, trained once and saved, which benchmarks/transformer.py, repair.py and default.py prune."""

from __future__ import annotations

import argparse
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
from .models import cifar_vit, load_cifar_resnet

BATCH, EPOCHS, IMAGES = 64, 6, 45000
TEACHER = {"temperature": 4, "weight": 8}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add `--vit` and `--vit-epochs`."""
    folder = Path.home() / ".cache" / "compress"
    parser.add_argument("--vit", type=Path, default=folder, help="folder with the trained ViT")
    parser.add_argument("--vit-epochs", type=int, default=EPOCHS, help="training epochs of the ViT if it is not there")


def load_or_train(folder: Path, out: Path, epochs: int = EPOCHS) -> nn.Module:
    """Return the network in eval mode, loaded from `out` or trained; an interrupted training is resumed."""
    path = out / "cifar_vit.safetensors"
    torch.manual_seed(0)
    model = cifar_vit()
    if not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        _train_(model, folder, out / "cifar_vit_training.pt", epochs)
        save_file(model.state_dict(), path)
    model.load_state_dict(load_file(path))
    return model.eval()


def weights_digest(model: nn.Module) -> str:
    """Return a short hash of the weights."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


def accuracy(model: nn.Module, images: TensorDataset) -> float:
    """Return the accuracy on the images."""
    with torch.inference_mode():
        correct = [(model(x).argmax(1) == y).sum() for x, y in DataLoader(images, 500)]
    return float(torch.stack(correct).sum()) / len(images)


def _train_(model: nn.Module, folder: Path, checkpoint: Path, epochs: int) -> None:
    """Train with AdamW, cosine decay, random crops and flips, and a trained ResNet-20 as teacher."""
    images = DataLoader(
        data.CropFlipDataset(*data.load_cifar10(folder, "train", IMAGES)), BATCH, shuffle=True, drop_last=True
    )
    teacher = load_cifar_resnet("resnet20", folder).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    total = epochs * len(images)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _lr_factor(step, total))
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    start_epoch = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        start_epoch = saved.pop("epoch")
        for name, content in saved.items():
            state[name].load_state_dict(content)
    start = time.perf_counter()
    for epoch in range(start_epoch, epochs):
        torch.manual_seed(epoch)
        model.train()
        total_loss = 0.0
        for x, y in images:
            with torch.inference_mode():
                teacher_outputs = teacher(x)
            outputs = model(x)
            loss = F.cross_entropy(outputs, y)
            loss = loss + TEACHER["weight"] * compress.distillation(
                outputs, teacher_outputs.clone(), TEACHER["temperature"]
            )
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total_loss += float(loss.detach())
        torch.save({name: part.state_dict() for name, part in state.items()} | {"epoch": epoch + 1}, checkpoint)
        seconds = time.perf_counter() - start
        print(f"epoch {epoch + 1} of {epochs}: loss {total_loss / len(images):.3f}, {seconds:.0f} s", flush=True)
    checkpoint.unlink(missing_ok=True)


def _lr_factor(step: int, total: int) -> float:
    """Return the learning rate factor: linear warm-up over 5 % of the steps, then cosine decay."""
    warmup = total // 20
    return (step + 1) / warmup if step < warmup else (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2
