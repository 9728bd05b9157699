"""Gates: one score per dimension of a group, as a factor on the columns that read it.

Where a product of activations reads it (queries and keys), the factor is on the rows that write it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .groups import Group
from .walk import modules_of


class Gate(nn.Module):
    """Multiply one dimension of a parameter by scores; positions that no group claims are left alone."""

    index: Tensor
    one: Tensor

    def __init__(self, dim: int, ndim: int, groups: list[str], scores: list[nn.Parameter], index: Tensor) -> None:
        super().__init__()
        self.groups = groups
        self.scores = nn.ParameterList(scores)
        self.dim, self.view = dim, [-1 if d == dim else 1 for d in range(ndim)]
        self.register_buffer("index", index, persistent=False)  # position -> place in [1, scores...]
        self.register_buffer("one", torch.ones(1, dtype=scores[0].dtype, device=index.device), persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        scaled = self.scaled(weight)
        if not torch.is_grad_enabled():  # products choose their kernel by this flag, and kernels round differently
            scaled.requires_grad_(weight.requires_grad)
        return scaled

    def scaled(self, weight: Tensor) -> Tensor:
        return weight * self.factor(weight.dtype).view(self.view)

    def factor(self, dtype: torch.dtype) -> Tensor:
        """The score of each position."""
        return torch.cat([self.one, *self.scores])[self.index].to(dtype)


def attach_(model: nn.Module, groups: Iterable[Group]) -> dict[str, nn.Parameter]:
    """Put a score of 1 on every dimension of every group and return the scores by group.

    The network computes bit for bit what it did. Frozen and half-precision weights get scores that train in at least
    single precision; tied weights share one gate.

    Raises:
        ValueError: the model has gates already.
    """
    if scores(model):
        raise ValueError("the model has gates already: fold_ them first")
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    made: dict[str, nn.Parameter] = {}
    claims: dict[tuple[str, int], list[tuple[str, Tensor]]] = {}
    for group in groups:
        first = tensors[group.readers[0].tensor]
        dtype = torch.promote_types(first.dtype, torch.float32)
        made[group.name] = nn.Parameter(torch.ones(group.width, dtype=dtype, device=first.device))
        for slot in group.readers:
            claims.setdefault((slot.tensor, slot.dim), []).append((group.name, torch.as_tensor(slot.index)))
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                owners.setdefault(id(tensor), []).append((module, name))
    for (path, dim), parts in claims.items():
        tensor = tensors[path]
        index = torch.zeros(tensor.shape[dim], dtype=torch.long)
        start = 1
        for _, positions in parts:
            width, times = positions.shape
            index[positions.reshape(-1)] = torch.arange(start, start + width).repeat_interleave(times)
            start += width
        names = [name for name, _ in parts]
        gate = Gate(dim, tensor.ndim, names, [made[n] for n in names], index.to(tensor.device))
        for module, name in owners[id(tensor)]:
            order = getattr(getattr(module, "parametrizations", None), "order", list(module._parameters))
            parametrize.register_parametrization(module, name, gate)
            vars(module.parametrizations)["order"] = order  # of the parameters, which parametrize forgets
    return made


def scores(model: nn.Module) -> dict[str, nn.Parameter]:
    """The scores of an attached model by group; after `deepcopy`, those of the copy."""
    return {
        name: score
        for gate in modules_of(model).values()
        if isinstance(gate, Gate)
        for name, score in zip(gate.groups, gate.scores, strict=True)
    }


@torch.no_grad()
def fold_(model: nn.Module) -> nn.Module:
    """Multiply the scores into the weights and take the gates off: bit for bit the same function, plain modules.

    The parameters are the objects they were before `attach_`.
    """
    folded: set[int] = set()
    for module in list(model.modules()):
        if not parametrize.is_parametrized(module):
            continue
        chains = cast(nn.ModuleDict, module.parametrizations)
        order = getattr(chains, "order", [])
        for name, chain in [(n, cast(parametrize.ParametrizationList, c)) for n, c in chains.items()]:
            if not any(isinstance(p, Gate) for p in chain):
                continue
            original = chain.original
            value = getattr(module, name) if id(original) not in folded else None
            parametrize.remove_parametrizations(module, name, leave_parametrized=False)
            if value is not None:
                original.copy_(value)
                folded.add(id(original))
        for key in order:
            if key in module._parameters:
                module._parameters[key] = module._parameters.pop(key)
    return model
