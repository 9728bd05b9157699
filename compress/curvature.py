"""Curvature: the diagonal of the loss's second derivative in the scores, never negative, from a few samples.

With J the derivative of a sample's outputs in the scores and L the second derivative of its loss in the outputs, the
Gauss-Newton diagonal is the mean over samples of diag(J^T L J). Where v is drawn with mean 0 and covariance L,

    E (J^T v)_i^2 = (J^T L J)_ii

and the same holds for the sum over several samples, as their draws have nothing in common: one backward pass for each
small batch. That is `gauss_newton`, and needs a task whose `draw` gives a loss with such a v as its gradient (random
signs times a root of L; for a likelihood, targets drawn from the model's own prediction would do as well, and are
noisier). `empirical` squares the gradient of the loss of single samples, which every task has: the empirical Fisher,
near the former where the model fits and scaled by its errors where it does not.

`paper` is BayesNAS's own estimate (Zhou et al., ICML 2019, C.3.2, with C.2.5): inputs and pre-activation curvature are
taken to be independent, of each other and from place to place, and the latter to have no entries off the diagonal:

    H_i = sum over readers of (E |x_i|)^2 sum over outputs o and places of W[o, i]^2 h_o,  h = diag d2L / dy2

h is not found by the paper's recursion, which knows chains of layers, but from the same draws: (dL/dy)^2 is on
average what the recursion approximates. A group with other readers than plain layers gets one of the former two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .compute import samples, taken, together
from .fields import Teaching
from .groups import Groups
from .lean import lean
from .processes import rank
from .task import Task
from .tracing import mode

CHUNK = 16  # samples in a pass, where draws keep them apart
Kind = Literal["auto", "gauss_newton", "empirical", "paper"]


class Curvature:
    """Sums over samples, for every score and for a factor common to all scores of a group (its switch)."""

    def __init__(self, model: nn.Module, groups: Groups, scores: Mapping[str, nn.Parameter], kind: Kind) -> None:
        self.model, self.scores = model, scores
        self.layers = _readers(model, groups, scores) if kind == "paper" else {}
        self.drawn = kind != "empirical"
        self.sums = {name: torch.zeros_like(a) for name, a in scores.items()}
        first = next(iter(scores.values()))
        self.switches = first.new_zeros(len(scores))
        self.count = first.new_zeros(())
        self._seen: dict[int, list[Tensor]] = {}

    def state(self) -> dict[str, Tensor]:
        mine = {f"curvature{i}": total for i, total in enumerate(self.sums.values())}
        return mine | {"curvature": self.switches, "curvatures": self.count}

    def tensors(self) -> list[Tensor]:
        return [*self.sums.values(), self.switches, self.count]

    def clear_(self) -> None:
        for tensor in self.tensors():
            tensor.zero_()

    def mean(self) -> tuple[dict[str, Tensor], Tensor]:
        """Of every score, and of every switch."""
        return {name: total / self.count for name, total in self.sums.items()}, self.switches / self.count

    def draws(self, task: Task) -> bool:
        """Whether it is the Gauss-Newton diagonal; else it is the empirical Fisher."""
        return self.drawn and hasattr(task, "draw")

    def add_(
        self,
        task: Task,
        batch: Any,
        number: int,
        distill: Teaching | None = None,
        taught: Any = None,
        seed: int | None = None,
    ) -> None:
        """Add so many samples of a batch; `taught` gives what the dense model says of one.

        With a `seed` the draws of a sample depend on its place among those of all processes, and on nothing else.
        """
        first = rank() * count_of(batch)
        alpha = list(self.scores.values())
        with mode(self.model, training=False), _frozen(self.model, alpha), lean(self.model), self._watched():
            for one, count in pieces(batch, number, CHUNK if self.draws(task) else 1):
                with drawing(None if seed is None else seed + first, self.count.device):
                    loss = bent_loss(self.model, task, one, self.draws(task), distill, taught)
                first += count
                outputs = [y for layers in self._seen.values() for y in layers[1:2]]
                found = torch.autograd.grad(loss, [*alpha, *outputs], allow_unused=True)
                gradients = [torch.zeros_like(a) if g is None else g for a, g in zip(alpha, found, strict=False)]
                rough = self._rough(found[len(alpha) :])
                for i, (name, a, g) in enumerate(zip(self.scores, alpha, gradients, strict=True)):
                    self.sums[name].add_(rough[name] if name in rough else g.square(), alpha=count**2)
                    self.switches[i].add_((a.detach() * g).sum().square(), alpha=count**2)
                self.count.add_(count)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Keep, of each layer that is looked at, the mean size of what it reads, and what it writes."""

        def keep(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self._seen[id(layer)] = [_channels(inputs[0].detach(), layer).abs().mean(1), output]

        modules = {id(m): m for layers in self.layers.values() for m, _ in layers}
        hooks = [m.register_forward_hook(keep) for m in modules.values()]
        try:
            yield
        finally:
            self._seen.clear()
            for hook in hooks:
                hook.remove()

    def _rough(self, of_outputs: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """The paper's estimate for this sample."""
        bent = dict(zip(self._seen, of_outputs, strict=True))
        found: dict[str, Tensor] = {}
        for name, layers in self.layers.items():
            total = torch.zeros_like(self.scores[name])
            for layer, index in layers:
                h = bent[id(layer)]
                if h is None:
                    continue
                weight = layer.parametrizations.weight.original.detach()
                squares = _channels(h, layer).square().sum(1) @ weight.square().unsqueeze(-1).flatten(2).sum(2)
                total += (self._seen[id(layer)][0].square() * squares)[index].sum(1)
            found[name] = total
        return found


def sound(h: Tensor, clamped: Tensor) -> Tensor:
    """A curvature that can be used: negative is none, and what is no number is as large as the largest there is.

    How many of either there were is added to the two numbers of `clamped`.
    """
    wrong = ~torch.isfinite(h)
    clamped += torch.stack([(h < 0).sum(), wrong.sum()])
    known = torch.where(wrong, torch.zeros_like(h), h).clamp_min(0)
    return torch.where(wrong, known.max().clamp_min(1), known)


def told(clamped: Tensor, what: str) -> list[str]:
    """What a report says of it."""
    negative, wrong = (int(n) for n in clamped)
    if not negative and not wrong:
        return []
    return [
        f"curvature of the {what}: {negative} values were negative and taken as zero, {wrong} were no finite numbers "
        "and taken as the largest of their group: look for NaN in the data, or lower the learning rate"
    ]


def bent_loss(
    model: nn.Module, task: Any, batch: Any, draws: bool, distill: Teaching | None = None, taught: Any = None
) -> Tensor:
    """A loss whose squared gradient is, on average over draws, the curvature; that of the sample itself, without."""
    outputs = task.forward(model, batch)
    if draws:
        loss: Tensor = task.draw(outputs, batch)
        if distill is not None:
            loss = loss + math.sqrt(distill.weight) * task.draw(outputs, batch, distill.temperature)
        return loss
    loss = task.loss(outputs, batch)
    if distill is not None:
        loss = loss + distill.weight * task.distil(outputs, taught(batch), distill.temperature)
    return loss


@contextmanager
def drawing(seed: int | None, device: torch.device) -> Iterator[None]:
    """Random numbers of their own inside, if there is a seed for them."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def count_of(batch: Any) -> int:
    """The samples of a batch; where nobody can tell where they lie in it, it is one."""
    return sum(samples(one) or 1 for one in together(batch))


def pieces(batch: Any, count: int | None = None, size: int = 1) -> Iterator[tuple[Any, int]]:
    """The first samples of a batch, so many at a time, and how many they are."""
    left = count_of(batch) if count is None else count
    for one in together(batch):
        length = samples(one)
        if length is None:
            yield one, 1
            continue
        few = min(length, left)
        left -= few
        for start in range(0, few, size):
            yield taken(one, start, min(start + size, few)), min(size, few - start)


def _readers(
    model: nn.Module, groups: Groups, scores: Mapping[str, nn.Parameter]
) -> dict[str, list[tuple[Any, Tensor]]]:
    """The layers that read each group, and where; groups that anything else reads are left out."""
    modules = dict(model.named_modules())
    found = {}
    for name, score in scores.items():
        layers = []
        for slot in groups[name].readers:
            path = slot.tensor.rpartition(".")[0]
            layer = modules[path]
            plain = isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)) and getattr(layer, "groups", 1) == 1
            if plain and slot.dim == 1 and groups.readers.get(slot.tensor) == {path}:
                layers.append((layer, torch.as_tensor(slot.index, device=score.device)))
        if len(layers) == len(groups[name].readers):
            found[name] = layers
    return found


def _channels(value: Tensor, layer: nn.Module) -> Tensor:
    """What a layer reads or writes, by channel: (channels, places)."""
    return (value.movedim(-1, 0) if isinstance(layer, nn.Linear) else value.transpose(0, 1)).flatten(1)


@contextmanager
def _frozen(model: nn.Module, scores: Sequence[Tensor]) -> Iterator[None]:
    """No gradient but that of the scores."""
    mine = {id(s) for s in scores}
    trained = [p for p in model.parameters() if p.requires_grad and id(p) not in mine]
    for p in trained:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in trained:
            p.requires_grad_(True)
