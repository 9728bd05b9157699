"""Random directions in the space of a network's weights, normalized filter by filter (Li et al. 2018).

A direction holds a tensor for every parameter. That of a filter w_f is Gaussian noise n_f of its length,

    d_f = ||w_f|| n_f / ||n_f||

so that planes around networks with filters of different scales can be compared. On norms and biases it is zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from compress.modules import modules_of, tensors_of, trainable_copy
from compress.surgery import Plan

Direction: TypeAlias = Mapping[str, Tensor]  # by the name of the parameter
WEIGHTED_LAYERS = (nn.Linear, nn.Bilinear, nn.Embedding, nn.modules.conv._ConvNd)


class _OwnedParameter(NamedTuple):
    name: str
    owner: nn.Module
    value: nn.Parameter


def draw_direction(model: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    """Return a random direction in the space of the parameters, on their device.

    Args:
        generator: of the CPU, so that all devices draw the same numbers.
    """
    return {
        name: torch.zeros_like(value) if _is_norm_or_bias(owner, value) else _filter_noise(owner, value, generator)
        for name, owner, value in _float_parameters(model)
    }


@torch.no_grad()
def slice_direction(model: nn.Module, plan: Plan, direction: Direction) -> dict[str, Tensor]:
    """Return the direction that a plan leaves in the network which it leaves of a dense model.

    Slicing is linear in the weights. So the direction itself is sliced, as the weights of a copy of the model, and what
    the plan rescales it rescales too.

    Raises:
        PlanError: the plan was made for another model.
    """
    carrier = trainable_copy(model)
    for name, _, value in _float_parameters(carrier):
        value.copy_(direction[name])
    plan.apply_(carrier)
    return {name: tensor.detach() for name, tensor in tensors_of(carrier).items() if isinstance(tensor, nn.Parameter)}


def _float_parameters(model: nn.Module) -> Iterator[_OwnedParameter]:
    """Yield the parameters that are floating-point numbers by their first name, as `tensors_of` names them."""
    seen: set[int] = set()
    for path, module in modules_of(model).items():
        for key, value in module._parameters.items():
            if value is not None and value.is_floating_point() and id(value) not in seen:
                seen.add(id(value))
                yield _OwnedParameter(f"{path}.{key}" if path else key, module, value)


def _is_norm_or_bias(owner: nn.Module, parameter: Tensor) -> bool:
    """Return whether a parameter is a bias, the scale of a norm or another scale with one number per channel."""
    if parameter.ndim < 2 or "norm" in type(owner).__name__.lower():
        return True
    is_vector = sum(size > 1 for size in parameter.shape) < 2
    return is_vector and not isinstance(owner, WEIGHTED_LAYERS)


def _filter_noise(layer: nn.Module, weight: Tensor, generator: torch.Generator) -> Tensor:
    """Return Gaussian noise in which each filter has the norm of the weight's."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    noise = torch.randn(weight.shape, generator=generator, dtype=dtype).to(weight.device)
    by_filter, filters = noise, weight.detach().to(dtype)
    dims = [*range(1, weight.ndim)]
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):  # its filters lie along the second dimension
        shape = (layer.groups, weight.shape[0] // layer.groups, *weight.shape[1:])
        by_filter, filters = noise.view(shape), filters.reshape(shape)
        dims = [1, *range(3, weight.ndim + 1)]
    norms, noise_norms = (torch.linalg.vector_norm(t, dim=dims, keepdim=True) for t in (filters, by_filter))
    by_filter.mul_(norms / noise_norms.clamp_min(torch.finfo(dtype).tiny))
    return noise.to(weight.dtype)
