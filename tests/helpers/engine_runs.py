"""Short prunings of a small network under different settings of the engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import compress

TRAIN: dict[str, Any] = {"epochs": 2, "lr": 0.01, "clip": 1.0}


SEARCHES: dict[str, dict[str, Any]] = {
    "netslim": {"method": "netslim", **TRAIN, "distill": {}},
    "rarts": {"method": "rarts", **TRAIN},
    "darts2": {"method": "darts2", **TRAIN},
    "bayesnas": {"method": "bayesnas", "hessian": "empirical", **TRAIN, "samples": 100000},
    "taylor": {"method": "taylor", "epochs": 1},
}


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.GELU(), nn.Conv2d(8, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(128, 4)
    return nn.Sequential(*layers).to(dtype)


def loader(batch: int, dtype: torch.dtype = torch.float64) -> DataLoader[Any]:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(64, 3, 8, 8, generator=random, dtype=torch.float64).to(dtype)
    return DataLoader(TensorDataset(x, torch.randint(0, 4, (64,), generator=random)), batch, shuffle=True)


def pruned(search: str, batch: int, task: Any = None, **engine: Any) -> compress.Pruned:
    recipe = {
        "budget": {"dims": "50%"},
        "search": SEARCHES[search],
        "finetune": {**TRAIN, "distill": {}},
        "timing": {"repeats": 3},
        "engine": engine,
    }
    given = {"task": task} if task is not None else {"train": loader(batch), "val": loader(32)}
    return compress.prune(network(), recipe, quiet=True, **given)  # type: ignore[arg-type]


def close(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.allclose(x, y, rtol=1e-8, atol=1e-11) for x, y in pairs)
