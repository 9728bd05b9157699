"""Curvature: the diagonal of the loss's second derivative in the scores, never negative, estimated on a few samples.

With J the derivative of a sample's outputs in the scores and L the second derivative of its loss in the outputs, the
Gauss-Newton diagonal is the mean over samples of diag(J^T L J). Where v is drawn with mean 0 and covariance L,

    E (J^T v)_i^2 = (J^T L J)_ii

and the same holds for the sum over several samples, as their draws are independent: one backward pass for each small
batch. That is `gauss_newton`. It needs a task whose `draw` returns a loss with such a v as its gradient (random signs
times a root of L; for a likelihood, targets sampled from the model's own prediction would do as well, but are noisier).
`empirical` squares the gradient of the loss of single samples, which every task has. This is the empirical Fisher,
close to the former where the model fits and scaled by its errors where it does not.

`paper` is BayesNAS's own estimate (Zhou et al., ICML 2019, C.3.2, with C.2.5). It assumes that inputs and
pre-activation curvature are independent of each other and between positions, and that the latter is diagonal:

    H_i = sum over readers of (E |x_i|)^2 sum over outputs o and positions of W[o, i]^2 h_o,  h = diag d2L / dy2

h is not computed by the paper's recursion, which only covers chains of layers, but from the same draws: the mean of
(dL/dy)^2 is what the recursion approximates. A group that is not read by plain layers only gets one of the former two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from compress.data import batch_size_of, batches_of_step, slice_batch
from compress.distributed import rank
from compress.graph import Groups
from compress.modules import ForwardCheck, is_plain_layer, module_mode
from compress.recipe import LogitDistillation
from compress.training import Task

from ..score_training.score_gradients import score_only_backward

SAMPLES_PER_PASS = 16  # where random draws keep samples independent; else one
CurvatureKind = Literal["auto", "gauss_newton", "empirical", "paper"]
TeacherOutputs = Callable[[Any], Any]  # of a batch


class _LayerRecord(NamedTuple):
    """A forward pass of one layer."""

    mean_input: Tensor  # E |x_i| of each input channel
    output: Tensor


class Curvature:
    """Sums of the curvature over samples, for every score and for the switch of every group.

    The switch is a factor that all scores of a group have in common.
    """

    def __init__(
        self, model: nn.Module, groups: Groups, scores: Mapping[str, nn.Parameter], kind: CurvatureKind
    ) -> None:
        self.model, self.scores = model, scores
        self.paper_layers = _linear_readers(model, groups, scores) if kind == "paper" else {}
        self.prefers_gauss_newton = kind != "empirical"
        self.sums = {name: torch.zeros_like(a) for name, a in scores.items()}
        first = next(iter(scores.values()))
        self.switches = first.new_zeros(len(scores))
        self.count = first.new_zeros(())
        self._records: dict[int, _LayerRecord] = {}  # by id of the layer

    def state(self) -> dict[str, Tensor]:
        sums = {f"curvature/sum{i}": total for i, total in enumerate(self.sums.values())}
        return sums | {"curvature/switches": self.switches, "curvature/count": self.count}

    def tensors(self) -> list[Tensor]:
        return [*self.sums.values(), self.switches, self.count]

    def clear_(self) -> None:
        for tensor in self.tensors():
            tensor.zero_()

    def mean(self) -> tuple[dict[str, Tensor], Tensor]:
        """Return the mean curvature of every score by group, and that of every switch."""
        return {name: total / self.count for name, total in self.sums.items()}, self.switches / self.count

    def is_gauss_newton(self, task: Task) -> bool:
        """Return whether the curvature is the Gauss-Newton diagonal; else it is the empirical Fisher."""
        return self.prefers_gauss_newton and task.can_draw

    def add_(
        self,
        task: Task,
        batch: Any,
        count: int,
        distill: LogitDistillation | None = None,
        teacher_outputs: TeacherOutputs | None = None,
        seed: int | None = None,
    ) -> None:
        """Add the curvature on the first `count` samples of a batch.

        Args:
            distill: distillation that is part of the loss.
            teacher_outputs: returns the outputs of the dense model on a batch, for `distill`.
            seed: the draws of a sample then only depend on its position among the samples of all processes.
        """
        position = rank() * count_samples(batch)
        alpha = list(self.scores.values())
        gauss_newton = self.is_gauss_newton(task)
        with (
            module_mode(self.model, training=False),
            _only_scores_trained(self.model, alpha),
            score_only_backward(self.model),
            self._layers_recorded(),
        ):
            for samples, size in first_samples(batch, count, SAMPLES_PER_PASS if gauss_newton else 1):
                with seeded_draws(None if seed is None else seed + position, self.count.device):
                    loss = curvature_loss(self.model, task, samples, gauss_newton, distill, teacher_outputs)
                position += size
                outputs = [record.output for record in self._records.values()]
                gradients = torch.autograd.grad(loss, [*alpha, *outputs], allow_unused=True)
                score_gradients = [
                    torch.zeros_like(a) if g is None else g for a, g in zip(alpha, gradients, strict=False)
                ]
                paper = self._paper_estimate(gradients[len(alpha) :])
                for i, (name, a, g) in enumerate(zip(self.scores, alpha, score_gradients, strict=True)):
                    self.sums[name].add_(paper[name] if name in paper else g.square(), alpha=size**2)
                    self.switches[i].add_((a.detach() * g).sum().square(), alpha=size**2)
                self.count.add_(size)

    @contextmanager
    def _layers_recorded(self) -> Iterator[None]:
        """Record the mean input magnitude and the output of the layers of the paper's estimate."""

        def record(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            mean_input = _by_channel(inputs[0].detach(), layer).abs().mean(1)
            self._records[id(layer)] = _LayerRecord(mean_input, output)

        modules = {id(m): m for layers in self.paper_layers.values() for m, _ in layers}
        hooks = [m.register_forward_hook(record) for m in modules.values()]
        try:
            yield
        finally:
            self._records.clear()
            for hook in hooks:
                hook.remove()

    def _paper_estimate(self, output_gradients: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """Return the paper's estimate for the recorded samples, by group."""
        gradient_of = dict(zip(self._records, output_gradients, strict=True))
        estimates: dict[str, Tensor] = {}
        for name, layers in self.paper_layers.items():
            total = torch.zeros_like(self.scores[name])
            for layer, index in layers:
                gradient = gradient_of[id(layer)]
                if gradient is None:
                    continue
                weight = layer.parametrizations.weight.original.detach()
                h = _by_channel(gradient, layer).square().sum(1)
                weighted = h @ weight.square().unsqueeze(-1).flatten(2).sum(2)
                total += (self._records[id(layer)].mean_input.square() * weighted)[index].sum(1)
            estimates[name] = total
        return estimates


def clamp_curvature(h: Tensor, clamped_counts: Tensor) -> Tensor:
    """Return usable curvatures: negative ones become zero, non-finite ones the largest finite one.

    Adds the number of negative and of non-finite values to the two elements of `clamped_counts`.
    """
    invalid = ~torch.isfinite(h)
    clamped_counts += torch.stack([(h < 0).sum(), invalid.sum()])
    finite = torch.where(invalid, torch.zeros_like(h), h).clamp_min(0)
    return torch.where(invalid, finite.max().clamp_min(1), finite)


def describe_clamped(clamped_counts: Tensor, parameters: str) -> list[str]:
    """Return a note for the report if any curvature was clamped."""
    negative, invalid = (int(n) for n in clamped_counts)
    if not negative and not invalid:
        return []
    return [
        f"curvature of the {parameters}: {negative} values were negative and taken as zero, {invalid} were not finite "
        "and taken as the largest of their group: look for NaN in the data, or lower the learning rate"
    ]


def describe_kind(gauss_newton: bool) -> str:
    """Return the name of the curvature estimate, for the report."""
    return "Gauss-Newton, by random signs" if gauss_newton else "empirical Fisher"


def curvature_loss(
    model: nn.Module,
    task: Task,
    batch: Any,
    gauss_newton: bool,
    distill: LogitDistillation | None = None,
    teacher_outputs: TeacherOutputs | None = None,
) -> Tensor:
    """Return a loss whose squared gradient is, on average over draws, the curvature.

    With `gauss_newton` the loss is random; else it is the loss of the batch.
    """
    outputs = task.forward(model, batch)
    if gauss_newton:
        loss: Tensor = task.draw(outputs, batch)
        if distill is not None:
            loss = loss + math.sqrt(distill.weight) * task.draw(outputs, batch, distill.temperature)
        return loss
    loss = task.loss(outputs, batch)
    if distill is not None:
        assert teacher_outputs is not None
        loss = loss + distill.weight * task.distil(outputs, teacher_outputs(batch), distill.temperature)
    return loss


@contextmanager
def seeded_draws(seed: int | None, device: torch.device) -> Iterator[None]:
    """Draw random numbers from a seed inside this context, and restore the generators; do nothing without a seed."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def count_samples(batch: Any) -> int:
    """Return the number of samples in the batch of a step; a batch of unknown layout counts as one."""
    return sum(batch_size_of(one) or 1 for one in batches_of_step(batch))


def first_samples(batch: Any, count: int | None = None, size: int = 1) -> Iterator[tuple[Any, int]]:
    """Yield the first `count` samples of a batch, `size` at a time, each with the number of samples in it."""
    remaining = count_samples(batch) if count is None else count
    for one in batches_of_step(batch):
        length = batch_size_of(one)
        if length is None:
            yield one, 1
            continue
        used = min(length, remaining)
        remaining -= used
        for start in range(0, used, size):
            yield slice_batch(one, start, min(start + size, used)), min(size, used - start)


def _linear_readers(
    model: nn.Module, groups: Groups, scores: Mapping[str, nn.Parameter]
) -> dict[str, list[tuple[Any, Tensor]]]:
    """Return the (layer, input positions) that read each group; without groups that are also read by anything else."""
    modules = dict(model.named_modules())
    readers = {}
    for name, score in scores.items():
        layers = []
        for slot in groups[name].gated_slots:
            path = slot.tensor.rpartition(".")[0]
            layer = modules[path]
            plain = is_plain_layer(layer, forward=ForwardCheck.NONE)
            if plain and slot.dim == 1 and groups.reader_modules.get(slot.tensor) == {path}:
                layers.append((layer, torch.as_tensor(slot.index, device=score.device)))
        if len(layers) == len(groups[name].gated_slots):
            readers[name] = layers
    return readers


def _by_channel(value: Tensor, layer: nn.Module) -> Tensor:
    """Return the inputs or outputs of a layer as (channels, samples and positions)."""
    return (value.movedim(-1, 0) if isinstance(layer, nn.Linear) else value.transpose(0, 1)).flatten(1)


@contextmanager
def _only_scores_trained(model: nn.Module, scores: Sequence[Tensor]) -> Iterator[None]:
    score_ids = {id(s) for s in scores}
    frozen = [p for p in model.parameters() if p.requires_grad and id(p) not in score_ids]
    for p in frozen:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in frozen:
            p.requires_grad_(True)
