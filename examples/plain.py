"""Plain PyTorch training script, plus one call that prunes its network.

python examples/plain.py [EPOCHS]
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import compress

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 8
torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1, torch.tensor(labels)
train = DataLoader(TensorDataset(x[:1400], y[:1400]), 64, shuffle=True)
val = DataLoader(TensorDataset(x[1400:], y[1400:]), 200)
model = nn.Sequential(
    *(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
    *(nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
    *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for _ in range(epochs):
    for images, labels in train:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

pruned = compress.prune(model, {"extends": "quickstart", "data": {"source": None}}, train=train, val=val)  # the call

pruned.report.show()
print(pruned.model)  # a plain module, like any other
