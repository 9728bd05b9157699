"""Compensate for dropped inputs: add their mean contribution to the biases of the layers that read them.

For a reader y = W x + b and dropped inputs d with mean m_d:  b <- b + sum_d W[:, d] m_d  (summed over the kernel).
Exact for a constant input of a linear layer or an unpadded convolution; at padded borders it is an approximation.

After a batch norm with shift beta and scale gamma the mean has a closed form: beta itself, or after a ReLU (Gaussian
input) beta * Phi(beta / |gamma|) + |gamma| * phi(beta / |gamma|). Elsewhere it is measured on batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from compress.graph import BatchNormOutput, Groups
from compress.modules import ForwardCheck, as_call_inputs, is_plain_layer, module_mode

from .plan import Plan


@torch.no_grad()
def compensate_(model: nn.Module, groups: Groups, plan: Plan, batches: Iterable[Any] = ()) -> list[str]:
    """Add the mean contribution of dropped inputs to the readers' biases; call it before the model is sliced.

    A reader without a bias gets one, which is recorded in the plan.

    Args:
        model: the dense model, changed in place.
        groups: its groups.
        plan: what is dropped, changed in place.
        batches: inputs to measure means on, needed only by readers that do not follow a batch norm.

    Returns:
        The names of the compensated readers.
    """
    modules = dict(model.named_modules())
    weight_names = {}  # reader -> its weight
    for name, dims in plan.gated_dims.items():
        path, _, leaf = name.rpartition(".")
        if leaf == "weight" and dims == [1] and is_plain_layer(modules[path], forward=ForwardCheck.NONE):
            weight_names[path] = name
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    means = {}
    for path, name in weight_names.items():
        if (mean := _batch_norm_output_mean(groups.input_norms.get(name), tensors)) is not None:
            means[path] = mean
    means |= _measure_input_means(model, [path for path in weight_names if path not in means], batches)
    for path, mean in means.items():
        module, name = modules[path], weight_names[path]
        weight = tensors[name]
        dropped = torch.as_tensor(plan.dropped_positions(name, 1), device=weight.device)
        columns = weight.index_select(1, dropped)
        columns = columns.flatten(2).sum(2) if weight.ndim > 2 else columns
        shift = columns.double() @ mean.double()[dropped]
        if module.bias is None:
            module.bias = nn.Parameter(weight.new_zeros(weight.shape[0]), requires_grad=weight.requires_grad)
            kept_rows = plan.slices[name].get(0)
            plan.biases[path] = len(kept_rows) if kept_rows is not None else weight.shape[0]
        bias = module.bias
        assert isinstance(bias, Tensor)
        bias += shift.to(bias.dtype)
    return sorted(means)


def _batch_norm_output_mean(norm: BatchNormOutput | None, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """Return the mean of a batch norm's output after its activation, or None if there is no norm with a shift."""
    if norm is None:
        return None
    scale, shift = tensors[norm.weight].double().abs(), tensors.get(norm.weight.removesuffix("weight") + "bias")
    if shift is None:
        return None
    shift = shift.double()
    if not norm.activation:
        return shift
    mean = _relu_mean(shift, scale)
    return mean if norm.activation == "relu" else mean - _relu_mean(shift - 6, scale)  # relu6


def _relu_mean(shift: Tensor, scale: Tensor) -> Tensor:
    """Return E[max(0, shift + scale * z)] for a standard normal z."""
    z = shift / scale.clamp_min(1e-30)
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    mean: Tensor = shift * torch.special.ndtr(z) + scale * density
    return mean


def _measure_input_means(model: nn.Module, paths: list[str], batches: Iterable[Any]) -> dict[str, Tensor]:
    """Return the mean input of each module over the batches, by channel."""
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    modules = dict(model.named_modules())

    def accumulate(path: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].detach().double()
            rows = x.reshape(-1, x.shape[-1]) if isinstance(module, nn.Linear) else x.transpose(0, 1).flatten(1).T
            sums[path] = sums.get(path, torch.zeros(rows.shape[1], dtype=rows.dtype, device=rows.device)) + rows.sum(0)
            counts[path] = counts.get(path, 0) + rows.shape[0]

        return hook

    hooks = [modules[path].register_forward_pre_hook(accumulate(path)) for path in paths]
    try:
        with module_mode(model, training=False):
            for batch in batches if paths else ():
                args, kwargs = as_call_inputs(batch)
                model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return {path: total / counts[path] for path, total in sums.items()}
