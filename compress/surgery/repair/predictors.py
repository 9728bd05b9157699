"""Choice of the dimensions from which the dropped ones can best be predicted.

In a repaired network the kept dimensions of a group stand in for the dropped ones. So the best to keep are not the
largest ones: of two large dimensions that are nearly the same, one is enough. Importance decides how many dimensions
each group keeps, and elimination.py which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.distributed import all_gather_object, all_reduce_sum, broadcast_object, rank, world_size
from compress.graph import Group, Groups, Index
from compress.modules import is_plain_layer, modules_of, tensors_in

from .elimination import LinearSystem, elimination_order
from .layer_problem import MOST_INPUTS
from .layer_samples import channel_rows, draw_rows

MOST_POSITIONS = 4096  # of a group in a reader: the matrices have so many rows
ROWS_PER_POSITION, FEWEST_ROWS = 64, 32768  # sampled from all batches


@torch.no_grad()
def prefer_predictors(
    model: nn.Module,
    groups: Groups,
    importance: Mapping[str, Tensor],
    batches: Sequence[Any],
    forward: Callable[[nn.Module, Any], Any],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[dict[str, Tensor], list[str]]:
    """Give the largest importance of each group to the dimensions that best predict its others.

    Each group has the same values as before, so the widths for a budget do not change. Groups keep their order if
    something else than plain linear layers and convolutions reads them, such as the logits of an attention. Several
    processes give their own batches each, and get the same result.

    Args:
        model: the network before the cut, in eval mode.
        groups: its groups.
        importance: of their dimensions.
        batches: inputs without labels; each is passed to `forward`.
        forward: runs a model on a batch.
        on_progress: is told how many batches and groups are done, of how many.

    Returns:
        The importance, and the names of the groups whose order is new.
    """
    readers = {group.name: found for group in groups if (found := readers_of(model, group))}
    layers = sorted({name for found in readers.values() for name in found})
    total = len(batches) + len(readers)
    moments = _measure_inputs(model, layers, batches, forward, lambda done: on_progress(done, total))
    result, changed = dict(importance), []
    num_heads = {group.name: group.num_heads for group in groups}
    for done, (name, found) in enumerate(readers.items(), len(batches) + 1):
        systems = [_system(modules_of(model)[layer], moments[layer], index) for layer, index in found.items()]
        solvable = [system for system in systems if system is not None]
        if len(solvable) == len(systems):
            result[name] = deal_out(importance[name], elimination_order(solvable), num_heads[name])
            changed.append(name)
        on_progress(done, total)
    return broadcast_object((result, changed))


def readers_of(model: nn.Module, group: Group) -> dict[str, Index]:
    """Return the layers that read a group, with the input positions of each dimension; empty if others read it, too."""
    if group.gated_on_output:  # products of activations or norms read it
        return {}
    modules, readers = modules_of(model), {}
    for slot in group.slots:
        if slot.is_input:
            name, _, leaf = slot.tensor.rpartition(".")
            layer = modules.get(name)
            if leaf != "weight" or slot.dim != 1 or layer is None or not is_plain_layer(layer) or name in readers:
                return {}
            weight = layer.weight
            assert isinstance(weight, Tensor)
            if weight.shape[1] > MOST_INPUTS:  # it will not be solved
                return {}
            readers[name] = slot.index
    return readers if all(index.size <= MOST_POSITIONS for index in readers.values()) else {}


@dataclass
class Moments:
    """Number of samples of a layer's input channels, their sum, and the sum of their products."""

    count: Tensor  # one number
    total: Tensor  # (channels,)
    products: Tensor  # (channels, channels)

    @classmethod
    def zeros(cls, layer: nn.Module) -> Moments:
        """Return the moments of no samples of a layer's input."""
        weight = layer.weight
        assert isinstance(weight, Tensor)
        width = weight.shape[1]
        return cls(*(torch.zeros(s, dtype=torch.float64, device=weight.device) for s in ((1,), (width,), (width,) * 2)))

    def add_(self, samples: Tensor) -> None:
        """Add samples of shape (samples, channels); deviations from their mean are multiplied in their precision."""
        mean = samples.mean(0, dtype=torch.float64)
        deviations = samples - mean.to(samples.dtype)
        self.count += len(samples)
        self.total += len(samples) * mean
        self.products += deviations.T @ deviations
        self.products.addr_(mean, mean, alpha=len(samples))

    def all_reduced(self) -> Moments:
        """Return the moments of the samples of all processes."""
        parts = [self.count, self.total, self.products]
        flat = all_reduce_sum(torch.cat([part.flatten() for part in parts]), sum(part.numel() for part in parts))
        split = torch.split(flat.to(self.total.device), [part.numel() for part in parts])
        return Moments(*(new.view(old.shape) for new, old in zip(split, parts, strict=True)))

    def covariance(self) -> Tensor:
        """Return the covariance of the samples."""
        count = self.count.clamp_min(1)
        mean = self.total / count
        return self.products / count - mean[:, None] * mean


def _measure_inputs(
    model: nn.Module,
    names: Sequence[str],
    batches: Sequence[Any],
    forward: Callable[[nn.Module, Any], Any],
    on_batch: Callable[[int], None],
) -> dict[str, Moments]:
    """Return the moments of the inputs of layers over the batches of all processes."""
    modules = modules_of(model)
    moments = {name: Moments.zeros(modules[name]) for name in names}
    all_batches = sum(all_gather_object(len(batches)))
    index = 0

    def measure(name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: Any, kwargs: Any) -> None:
            x, moment = tensors_in((args, kwargs))[0], moments[name]
            is_linear = isinstance(layer, nn.Linear)
            x = x if is_linear or x.ndim == layer.weight.ndim else x[None]
            wanted = -(-max(ROWS_PER_POSITION * len(moment.total), FEWEST_ROWS) // all_batches)
            rows = draw_rows(x.shape, is_linear, wanted, f"{name}/{index}").to(x.device)
            samples = x.reshape(-1, x.shape[-1])[rows] if is_linear else channel_rows(x, rows)[:, 0]
            moment.add_(samples.double() if x.dtype == torch.float64 else samples.float())

        return hook

    with ExitStack() as stack:
        for name in names:
            stack.callback(modules[name].register_forward_pre_hook(measure(name), with_kwargs=True).remove)
        for done, batch in enumerate(batches, 1):
            index = (done - 1) * world_size() + rank()
            forward(model, batch)
            on_batch(done)
    return {name: moment.all_reduced() for name, moment in moments.items()}


def _system(layer: nn.Module, moments: Moments, index: Index) -> LinearSystem | None:
    """Return a reader's view of a group; None if its values are not finite, or all constant."""
    positions = torch.as_tensor(index.ravel(), device=moments.total.device)
    covariance = moments.covariance()[positions][:, positions].cpu()
    if not bool(torch.isfinite(covariance).all() & (covariance.diagonal().sum() > 0)):
        return None
    weight = layer.weight
    assert isinstance(weight, Tensor)
    columns = weight.double()[:, positions].movedim(1, 0).flatten(1)  # taps count like outputs
    return LinearSystem.of(covariance, (columns @ columns.T).cpu(), index.shape[1])


def deal_out(values: Tensor, order: Tensor, num_heads: int) -> Tensor:
    """Return the values of each head in another order: the smallest for the first dimension of `order`.

    >>> deal_out(torch.tensor([5.0, 3, 4, 1]), torch.tensor([2, 0, 3, 1]), 1).tolist()
    [3.0, 5.0, 1.0, 4.0]
    """
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    ranks = places.view(num_heads, -1).argsort(1).argsort(1).to(values.device)
    return values.view(num_heads, -1).sort(1).values.gather(1, ranks).flatten()
