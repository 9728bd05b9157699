"""Train the dense network that the benchmarks prune; writes models/NAME.pt next to cifar10/ in the data folder.

    python -m benchmarks.dense --data FOLDER [--network resnet20] [--epochs 60]

Cross entropy, random crops and flips, SGD with cosine decay from 0.1, on a GPU if there is one. 60 epochs take a few
minutes on a GPU and hours on a CPU.
"""

from __future__ import annotations

import argparse

import torch
from rich.progress import track
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from . import data
from .models import CifarResNet

BATCH, LR, IMAGES = 128, 0.1, 50000


def train(network: str, epochs: float, images: data.CropFlipDataset, device: torch.device) -> CifarResNet:
    """Train a CIFAR ResNet from scratch; return it on the CPU in eval mode."""
    torch.manual_seed(0)
    model = CifarResNet(int(network.removeprefix("resnet"))).to(memory_format=torch.channels_last).to(device)
    batches = DataLoader(images, BATCH, shuffle=True, drop_last=True)
    steps = max(1, round(epochs * len(batches)))
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    stream = (batch for _ in range(steps) for batch in batches)
    for _, (x, y) in zip(track(range(steps), network), stream, strict=False):
        optimizer.zero_grad()
        cross_entropy(model(x.to(device)), y.to(device)).backward()
        optimizer.step()
        schedule.step()
    return model.cpu().eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data.add_data_option(parser)
    parser.add_argument("--network", default="resnet20", help="resnet followed by the depth, e.g. resnet56")
    parser.add_argument("--epochs", type=float, default=60)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images = data.CropFlipDataset(*data.load_cifar10(options.data, "train", IMAGES))
    model = train(options.network, options.epochs, images, device)
    path = options.data / "models" / f"{options.network}.pt"
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(".part")
    torch.save(model.state_dict(), temporary)
    temporary.replace(path)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
