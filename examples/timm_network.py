"""Prune a timm network with timm's loader and an inline recipe.

python examples/timm_network.py [STEPS]
"""

import sys

import timm
import torch
from sklearn.datasets import load_digits
from timm.data import create_loader

import compress

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60


class Digits(torch.utils.data.Dataset):
    """Digits as larger images with three channels, as timm expects them; timm sets the transform."""

    transform = None

    def __init__(self, part: slice) -> None:
        images, labels = load_digits(return_X_y=True)
        self.images, self.labels = images[part].reshape(-1, 8, 8), labels[part]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int):
        from PIL import Image

        image = Image.fromarray((self.images[i] * 15.9).astype("uint8")).resize((32, 32)).convert("RGB")
        return self.transform(image), int(self.labels[i])


common = {"batch_size": 32, "use_prefetcher": False, "num_workers": 0, "persistent_workers": False, "no_aug": True}
train = create_loader(Digits(slice(0, 1400)), (3, 32, 32), is_training=True, **common)
val = create_loader(Digits(slice(1400, None)), (3, 32, 32), is_training=False, **common)
torch.manual_seed(0)
model = timm.create_model("resnet10t", num_classes=10)  # your trained network: pretrained=True, or load its state dict
recipe = {
    "target": {"channels": True, "residual": True, "round_to": 8},
    "budget": {"macs": "50%"},
    "search": {"method": "netslim", "epochs": f"{steps} steps", "lr": 0.05},
    "finetune": {"epochs": f"{steps} steps", "lr": 0.05, "distill": {"temperature": 4, "weight": 8}},
}
pruned = compress.prune(model, recipe, train=train, val=val)
pruned.report.show()
