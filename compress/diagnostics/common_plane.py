"""The dense and the compact network in one plane: the directions of the compact one are the dense ones, cut."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from compress.api import Pruned
from compress.errors import NotReady
from compress.formatting import describe_value
from compress.modules import tensors_of, unwrap_model
from compress.surgery import Plan

from .directions import Direction, draw_direction, slice_direction
from .perturbed_network import PerturbedNetwork

OtherNetwork = Pruned | tuple[nn.Module, Plan]


def other_problems(other: Any) -> list[str]:
    """Return why an argument cannot be the other network; nothing if it can, or there is none."""
    if other is None or isinstance(other, Pruned):
        pair = None if other is None else (other.model, other.plan)
    else:
        pair = other
        is_pair = isinstance(pair, tuple) and len(pair) == 2
        if not (is_pair and isinstance(pair[0], nn.Module) and isinstance(pair[1], Plan)):
            return [f"other: expected a Pruned, or (compact model, plan); got {describe_value(other)}"]
    if pair is not None and pair[1].network:
        return ["other: its network was built anew from a genotype; it has no directions in common with the model"]
    return []


def perturbed_networks(
    model: nn.Module, other: OtherNetwork | None, seed: int, device: torch.device
) -> list[PerturbedNetwork]:
    """Return the networks in their common plane.

    Raises:
        NotReady: the model has no weights to move, or the compact network is not what the plan leaves.
        PlanError: the plan was made for another model.
    """
    generator = torch.Generator().manual_seed(seed)
    directions: list[Direction] = [draw_direction(model, generator) for _ in range(2)]
    if not any(tensor.ndim > 1 for tensor in directions[0].values()):
        raise NotReady("model: expected weights of linear layers or convolutions, which move; it has none")
    networks = [PerturbedNetwork("dense" if other is not None else "model", model, directions, device)]
    if other is not None:
        compact, plan = (other.model, other.plan) if isinstance(other, Pruned) else other
        compact = unwrap_model(compact)
        sliced = [slice_direction(model, plan, direction) for direction in directions]
        _check_shapes(compact, sliced[0])
        networks.append(PerturbedNetwork("compact", compact, sliced, device))
    return networks


def _check_shapes(compact: nn.Module, direction: Direction) -> None:
    """Check that a sliced direction has the shapes of the compact network.

    Raises:
        NotReady: it has not.
    """
    shapes = {name: tensor.shape for name, tensor in tensors_of(compact).items() if isinstance(tensor, nn.Parameter)}
    problems = [
        f"{name} is {list(shapes[name]) if name in shapes else 'missing'}; the plan leaves {list(tensor.shape)}"
        for name, tensor in direction.items()
        if shapes.get(name) != tensor.shape
    ]
    if problems:
        more = f"\n  ... and {len(problems) - 6} more" if len(problems) > 6 else ""
        raise NotReady("other: its model is not what its plan leaves:\n  " + "\n  ".join(problems[:6]) + more)
