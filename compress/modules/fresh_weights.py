"""Fresh weights: new random values for the parameters of a model, as its layers draw them."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


@torch.no_grad()
def fresh_tensors(model: nn.Module) -> dict[int, Tensor]:
    """Return new values of the model's parameters and buffers, by the id of the tensor; the model is not changed.

    Layers with `reset_parameters` draw theirs. Other parameters, such as class tokens, are drawn from a normal
    distribution with the mean and standard deviation of their entries; other buffers keep their values.
    """
    drawn = copy.deepcopy(model)
    for module in drawn.modules():
        for parameter in module.parameters(recurse=False):
            deviation = parameter.std(unbiased=False) * torch.randn_like(parameter)
            parameter.copy_(parameter.mean().expand_as(parameter) + deviation)
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {**dict(drawn.named_parameters()), **dict(drawn.named_buffers())}
    return {id(tensor): values[name].detach() for name, tensor in tensors.items()}
