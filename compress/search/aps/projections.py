"""Meta weights of the layers whose widths are projections, and which groups can have them.

A group can be projected if it lies between plain layers: one convolution or linear layer writes it, others read it, and
each has one row or column per dimension. All other groups (attention, residual streams, depthwise convolutions) have
nested widths, which are masks.

The meta weight starts with copies of the trained weight, block by block: every candidate has a copy of the dimensions
that it keeps. While A is nested, all candidates use the first block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from compress.graph import Group, Slot
from compress.modules import modules_of
from compress.surgery import WeightTransform, register_transform_

from .sharing import nested_sum, positions_in_block, shared_sum

PLAIN_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def layer_slots(model: nn.Module, group: Group) -> list[Slot]:
    """Return the slots of a group in weights of plain layers, the writer first; empty if others have its dimensions."""
    if group.kind not in ("channels", "mlp") or group.num_heads > 1 or group.gated_on_output:
        return []
    modules, writers, readers = modules_of(model), list[Slot](), list[Slot]()
    uses = Counter(id(p) for module in modules.values() for p in module._parameters.values())
    for slot in group.slots:
        owner, _, leaf = slot.tensor.rpartition(".")
        module = modules[owner]
        tensor = getattr(module, leaf)
        if tensor.ndim == 1 and isinstance(module, (*PLAIN_LAYERS, nn.modules.batchnorm._BatchNorm)):
            continue  # biases and norms stay at their positions
        one_each = np.array_equal(slot.index[:, 0], np.arange(tensor.shape[slot.dim])) and slot.index.shape[1] == 1
        is_plain = type(module) in PLAIN_LAYERS and getattr(module, "groups", 1) == 1 and uses[id(tensor)] == 1
        if leaf != "weight" or not one_each or not is_plain or slot.dim > 1:
            return []
        (readers if slot.dim == 1 else writers).append(slot)
    return [*writers, *readers] if len(writers) == 1 and readers else []


class Side:
    """P or Q of one dimension of a layer's weight: A, and the columns of A that each candidate has.

    Args:
        group_index: of the group in the search's choices.
        widths: candidates of the group.
        size: dense width of the group.
    """

    def __init__(self, group_index: int, widths: Sequence[int], size: int, device: torch.device) -> None:
        self.group_index = group_index
        self.within = positions_in_block(widths).to(device)
        self.starts = torch.tensor([sum(widths[k + 1 :]) for k in range(len(widths))]).to(device)  # largest block first
        self.widths = torch.tensor(widths).to(device)
        self.a = torch.zeros(len(self.within), len(self.within), dtype=torch.float64, device=device)
        self.ranks = torch.arange(size, device=device)  # of the dimensions

    @torch.no_grad()
    def set_(self, a: Tensor, ranks: Tensor) -> None:
        """Start from A, with dimensions in the order of their ranks."""
        self.a.copy_(a)
        self.ranks.copy_(ranks)

    @property
    def sources(self) -> Tensor:
        """Dimension of the trained weight that each row of the meta weight is a copy of."""
        return self.ranks.argsort()[self.within]

    def matrix(self, choice: Tensor) -> Tensor:
        """Return P of a candidate (a tensor with one index) as (rows of the meta weight, dense width).

        Column d belongs to dimension d of the dense network; it is zero if the candidate does not keep it.
        """
        kept = self.ranks < self.widths.index_select(0, choice)
        columns = torch.where(kept, self.starts.index_select(0, choice) + self.ranks, 0)
        return self.a.index_select(1, columns) * kept


class Projection(WeightTransform):
    """Replace a weight by its projected meta weight (6) while `active`; else return it as it is."""

    def __init__(self, weight: nn.Parameter, rows: Side | None, columns: Side | None, choices: Tensor) -> None:
        super().__init__()
        self.rows, self.columns, self.choices, self.active = rows, columns, choices, False
        shape = list(weight.shape)
        for dim, side in ((0, rows), (1, columns)):
            shape[dim] = len(side.within) if side is not None else shape[dim]
        self.meta = nn.Parameter(weight.new_zeros(shape), requires_grad=weight.requires_grad)

    @torch.no_grad()
    def expand_(self, weight: Tensor) -> None:
        """Fill the meta weight with copies of a weight."""
        for dim, side in self.sides():
            weight = weight.index_select(dim, side.sources)
        self.meta.copy_(weight)

    def sides(self) -> Iterator[tuple[int, Side]]:
        """Yield the projected dimensions of the weight with their sides."""
        yield from ((dim, side) for dim, side in ((0, self.rows), (1, self.columns)) if side is not None)

    def forward(self, weight: Tensor) -> Tensor:
        return self.project(self.choices) if self.active else weight

    def project(self, choices: Tensor) -> Tensor:
        """Return the weight of chosen widths, zero at the dimensions that they do not keep."""
        weight: Tensor = self.meta
        for dim, side in self.sides():
            choice = choices[side.group_index : side.group_index + 1]
            matrix = side.matrix(choice).to(weight.dtype)
            weight = torch.einsum("ix,i...->x..." if dim == 0 else "jy,ij...->iy...", matrix, weight)
        return weight


@dataclass(frozen=True)
class ProjectedLayer:
    """A layer with a meta weight."""

    name: str
    weight: nn.Parameter
    projection: Projection


def attach_projections_(
    model: nn.Module, slots: dict[int, list[Slot]], candidates: Sequence[Sequence[int]], choices: Tensor
) -> list[ProjectedLayer]:
    """Give the layers that write or read projected groups a meta weight.

    Args:
        slots: index of a group -> its slots in the weights of plain layers.
        candidates: candidate widths of each group.
        choices: the chosen candidates, a tensor that the search writes to.
    """
    by_weight: dict[str, dict[int, Side]] = {}
    for g, slots_of_group in slots.items():
        for slot in slots_of_group:
            side = Side(g, candidates[g], len(slot.index), choices.device)
            by_weight.setdefault(slot.tensor, {})[slot.dim] = side
    layers = []
    for name, sides in by_weight.items():
        owner = model.get_submodule(name.rpartition(".")[0])
        parameters = dict(owner.named_parameters())
        weight = parameters["parametrizations.weight.original" if "weight" not in parameters else "weight"]
        projection = Projection(weight, sides.get(0), sides.get(1), choices)
        register_transform_(owner, "weight", projection, first=True)
        layers.append(ProjectedLayer(name, weight, projection))
    return layers


def sharing_level(
    groups: Iterable[Group], candidates: Sequence[Sequence[int]], layers: Sequence[ProjectedLayer]
) -> tuple[float, int, int]:
    """Return Phi (10), summed over the layers that read or write the groups, with its smallest and largest value.

    Args:
        layers: those whose widths are projections; all others are nested.
    """
    sides = {(layer.name, dim): side for layer in layers for dim, side in layer.projection.sides()}
    sums: dict[str, dict[int, NDArray[np.float64]]] = {}  # weight -> dimension -> current, smallest, largest
    for group, widths in zip(groups, candidates, strict=True):
        for slot in group.slots:
            if slot.dim > 1 or not slot.tensor.endswith("weight"):
                continue
            side = sides.get((slot.tensor, slot.dim))
            current = nested_sum(widths) if side is None else float(shared_sum(side.a))
            by_dim = sums.setdefault(slot.tensor, {})
            by_dim[slot.dim] = by_dim.get(slot.dim, 0) + np.array([current, sum(widths), nested_sum(widths)])
    phi, least, most = sum((np.prod([*by_dim.values()], axis=0) for by_dim in sums.values()), np.zeros(3))
    return round(float(phi), 2), int(least), int(most)
