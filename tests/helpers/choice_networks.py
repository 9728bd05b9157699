"""Small networks with choices, and data for which one candidate is needed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import compress
from compress.budget import Operations
from compress.graph import Groups
from compress.recipe import Timing
from compress.search import search_class
from compress.search.base import Job


class Noise(nn.Module):
    """A candidate that ignores its input."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.randn_like(x)


class PlantedNetwork(nn.Module):
    """A network in which only the candidate `layer` lets the input through."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.block = compress.Choice(
            noise=Noise(), layer=nn.Sequential(nn.Linear(16, 16), nn.ReLU()), more_noise=Noise()
        )
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.block(self.stem(x)))
        return out


def planted_data(seed: int, count: int = 256) -> list[tuple[Tensor, Tensor]]:
    """The sign of the first feature, in batches of 32."""
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    y = (x[:, 0] > 0).long()
    return list(zip(x.split(32), y.split(32), strict=True))


class ConvChoices(nn.Module):
    """Two blocks that share their choice, and one with its own; batch norms, strides and a skip."""

    def __init__(self, channels: int = 8, classes: int = 4) -> None:
        super().__init__()
        c = channels
        self.stem = nn.Conv2d(3, c, 3, padding=1)
        self.first, self.second = (
            compress.Choice(
                conv3=nn.Sequential(nn.Conv2d(c, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU()),
                conv1=nn.Sequential(nn.Conv2d(c, c, 1), nn.BatchNorm2d(c), nn.ReLU()),
                skip=nn.Identity(),
                shared="blocks",
            )
            for _ in range(2)
        )
        self.down = compress.Choice(
            conv=nn.Conv2d(c, 2 * c, 3, stride=2, padding=1),
            wide=nn.Sequential(nn.Conv2d(c, 4 * c, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(4 * c, 2 * c, 1)),
        )
        self.inner = nn.Conv2d(2 * c, 2 * c, 3, padding=1)
        self.last = nn.Conv2d(2 * c, 2 * c, 3, padding=1)
        self.head = nn.Linear(2 * c, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(self.stem(x)))
        x = self.down(x).relu()
        x = self.last(self.inner(x).relu())
        out: Tensor = self.head(x.mean((2, 3)))
        return out


def images(seed: int = 0, count: int = 64, size: int = 8, batch: int = 16) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, size, size, generator=random)
    y = torch.randint(0, 4, (count,), generator=random)
    return list(zip(x.split(batch), y.split(batch), strict=True))


def conv_choices(seed: int = 0) -> ConvChoices:
    torch.manual_seed(seed)
    return ConvChoices()


def choose(model: nn.Module, **chosen: str) -> Any:
    """Give all weight to some candidates, by path."""
    for path, name in chosen.items():
        choice = model.get_submodule(path)
        assert isinstance(choice, compress.Choice)
        with torch.no_grad():
            choice.scores.fill_(-torch.inf)
            choice.scores[choice.names.index(name)] = 0
    return model


def started(method: str, model: nn.Module | None = None, **settings: Any) -> Any:
    """Return a search over the operations of a network, before its first step."""
    model = model or conv_choices()
    recipe = compress.Recipe.load(
        {"target": {"operations": True}, "search": {"method": method, "epochs": 1, **settings}}
    )
    operations = Operations(model, torch.zeros(1, 3, 8, 8), Timing(repeats=3))
    job = Job(model, Groups.empty(), compress.Classification(), 10, teacher=model, operations=operations)
    return search_class(method, operations=True)(recipe.search, job)
