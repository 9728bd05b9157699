"""Gates: parametrizations that multiply weights by trained scores, one score per dimension of a group.

The score scales the input columns of every layer that reads the dimension. Exceptions are queries, keys, values that
share their scores, and residual streams with layer norms: products of activations and norms read them, so the score
scales the rows that write them (`Group.gated_on_output`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from compress.graph import Group
from compress.modules import modules_of


class WeightTransform(nn.Module):
    """Base of the parametrizations that a search attaches to weights; `fold_` applies and removes them."""


class Gate(WeightTransform):
    """Multiply one dimension of a parameter by scores; positions that belong to no group keep their value."""

    index: Tensor
    one: Tensor

    def __init__(self, dim: int, ndim: int, groups: list[str], scores: list[nn.Parameter], index: Tensor) -> None:
        super().__init__()
        self.groups = groups
        self.scores = nn.ParameterList(scores)
        self.dim, self.view = dim, [-1 if d == dim else 1 for d in range(ndim)]
        self.register_buffer("index", index, persistent=False)  # position -> index into [1, *scores]
        self.register_buffer("one", torch.ones(1, dtype=scores[0].dtype, device=index.device), persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        scaled = self.scale(weight)
        # Matrix products choose their kernel by requires_grad, and kernels round differently.
        if not torch.is_grad_enabled():
            scaled.requires_grad_(weight.requires_grad)
        return scaled

    def scale(self, weight: Tensor) -> Tensor:
        """Return the weight times the score of each position."""
        return weight * self.factors(weight.dtype).view(self.view)

    def factors(self, dtype: torch.dtype) -> Tensor:
        """Return the factor of each position: its score, or 1."""
        return torch.cat([self.one, *self.scores])[self.index].to(dtype)


def attach_(model: nn.Module, groups: Iterable[Group]) -> dict[str, nn.Parameter]:
    """Attach a gate with a score of 1 to every dimension of every group; return the scores by group.

    The outputs of the model stay bit-identical. Scores are at least in single precision, also on half-precision
    weights; they train even if the weights are frozen. Tied weights share one gate.

    Raises:
        ValueError: the model already has gates.
    """
    if scores_of(model):
        raise ValueError("the model already has gates: call compress.surgery.fold_(model) first")
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    scores: dict[str, nn.Parameter] = {}
    gated_positions: dict[tuple[str, int], list[tuple[str, Tensor]]] = {}  # (tensor, dim) -> (group, positions)
    for group in groups:
        first = tensors[group.gated_slots[0].tensor]
        dtype = torch.promote_types(first.dtype, torch.float32)
        scores[group.name] = nn.Parameter(torch.ones(group.width, dtype=dtype, device=first.device))
        for slot in group.gated_slots:
            gated_positions.setdefault((slot.tensor, slot.dim), []).append((group.name, torch.as_tensor(slot.index)))
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                owners.setdefault(id(tensor), []).append((module, name))
    for (path, dim), parts in gated_positions.items():
        tensor = tensors[path]
        index = torch.zeros(tensor.shape[dim], dtype=torch.long)
        start = 1
        for _, positions in parts:
            width, positions_per_dim = positions.shape
            index[positions.reshape(-1)] = torch.arange(start, start + width).repeat_interleave(positions_per_dim)
            start += width
        names = [name for name, _ in parts]
        gate = Gate(dim, tensor.ndim, names, [scores[n] for n in names], index.to(tensor.device))
        for module, name in owners[id(tensor)]:
            register_transform_(module, name, gate)
    return scores


def register_transform_(module: nn.Module, name: str, transform: WeightTransform, *, first: bool = False) -> None:
    """Attach a transform to a parameter, after those that it has, or before them if `first`."""
    order = getattr(getattr(module, "parametrizations", None), "order", list(module._parameters))
    if first and parametrize.is_parametrized(module, name):
        cast(Any, module.parametrizations)[name].insert(0, transform)
    else:
        parametrize.register_parametrization(module, name, transform)
    vars(module.parametrizations)["order"] = order  # of the parameters: parametrize does not keep it


def scores_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the scores of a model with gates, by group; empty if it has none. Works on deep copies, too."""
    return {
        name: score
        for gate in modules_of(model).values()
        if isinstance(gate, Gate)
        for name, score in zip(gate.groups, gate.scores, strict=True)
    }


@torch.no_grad()
def fold_(model: nn.Module) -> nn.Module:
    """Multiply the scores into the weights and remove the gates and all other transforms; the outputs stay identical.

    The parameters are the same objects as before `attach_`.
    """
    folded: set[int] = set()
    for module in list(model.modules()):
        if not parametrize.is_parametrized(module):
            continue
        chains = cast(nn.ModuleDict, module.parametrizations)
        order = getattr(chains, "order", [])
        for name, chain in [(n, cast(parametrize.ParametrizationList, c)) for n, c in chains.items()]:
            if not any(isinstance(p, WeightTransform) for p in chain):
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
