"""Structural Bayesian compression: group lasso on the weights, re-weighted by evidence.

Zhou, Yang, Wang, Pan, BayesNAS, ICML 2019, appendix B, algorithm 3, with the structures of table S3 (structures.py).
With W_g the weights of a group and `gamma` the paper's lambda, the weights are trained (B.0.1) by proximal steps,

    min over W of  L(W) + gamma * sum omega_g ||W_g||_2

and at the end of each outer iteration, one per epoch, with the curvature H of the loss in each weight over lambda,

    gamma_g = ||W_g||_2 / omega_g(t-1)                                       (B.0.2)
    C = (1 / gamma_g + H)^-1,  alpha = 1 / gamma_g - C / gamma_g^2           (B.0.3), (B.0.4)
    omega_g = sqrt(sum over g of alpha)                                      (B.0.5), table S3

The algorithm says that unimportant groups are pruned, but not which; the entropy of a weight's prior is nearly always
below zero. Here a group is pruned if zero minimizes (B.0.1) with the loss as a quadratic around the weights,
||H W_g||_2 <= omega_g, and at most half of a layer's groups in an iteration. The importance of a dimension is the next
gamma_g, ||W_g||_2 / omega_g with W_g at that minimum, of the filters that write it (`filter`) or of the columns that
read it (`channel`). Kernels whose outer rows or columns are zero are cropped; other pruned weights stay as zeros.

H is the squared gradient of random losses (curvature.py), of all weights at once: in a sum over a group the noise of
single weights averages out. If the task has no `draw`, it is the empirical Fisher.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from compress.data import derive_seed
from compress.distributed import all_reduce_mean_, rank, world_size
from compress.modules import module_mode
from compress.recipe import LogitDistillation, Positive, Ranking, SearchConfig, TrainingConfig
from compress.surgery import nonzero_spans
from compress.training import lr_factor, make_optimizer, set_lr_

from ..base import Job, Search, register_search
from ..score_training.regularizer import proximal_rates
from ..task_gradients import clip_and_step, set_task_gradients_
from .curvature import (
    SAMPLES_PER_PASS,
    clamp_curvature,
    count_samples,
    curvature_loss,
    describe_clamped,
    describe_kind,
    first_samples,
    seeded_draws,
)
from .layer_groups import LayerGroups
from .outer_iterations import MIN_SAMPLES, SAMPLE_FRACTION, OuterIterations
from .structures import STRUCTURES, group_families, prunable_weights


def _check_structures(value: Any) -> Any:
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else ()
    unknown = [name for name in names if not isinstance(name, str) or name not in STRUCTURES]
    if not names or unknown:
        invalid = unknown[0] if unknown else value
        raise ValueError(f"expected one of {', '.join(STRUCTURES)}, or a list of them; got {invalid!r}")
    return names


class BayesCompressConfig(SearchConfig, TrainingConfig):
    """Group lasso on weights, re-weighted by evidence (Zhou et al. 2019, algorithm 3)."""

    method: Literal["bayes_compress"] = "bayes_compress"
    ranking: Ranking = Field("cost", description="how importance is compared across groups, with a budget")
    structure: Annotated[
        tuple[str, ...], BeforeValidator(_check_structures, json_schema_input_type=str | list[str])
    ] = Field(("filter",), description=f"weights that are removed together, one or several of {', '.join(STRUCTURES)}")
    gamma: Positive = Field(1e-4, description="sparsity intensity, the paper's lambda: strength of the group lasso")
    samples: int | None = Field(
        None, ge=1, description="samples for the curvature in an outer iteration (default: 5 %, at least 128)"
    )
    iterations: int | None = Field(None, ge=1, description="outer iterations (default: one per epoch)")
    distill: LogitDistillation | None = Field(None, description="distillation from the dense model during the search")

    @property
    def reaches_zero(self) -> bool:
        return True

    @property
    def trains_scores(self) -> bool:
        return True

    @property
    def removes_structures(self) -> bool:
        return True


@register_search("bayes_compress")
class BayesCompress(Search):
    """Training of the weights with a penalty on their groups."""

    Config = BayesCompressConfig

    def __init__(self, config: BayesCompressConfig, job: Job) -> None:
        super().__init__(config, job)
        self.layers = _layer_groups(config, job)
        prunes_dimensions = any(f in ("n", "c") for layer in self.layers.values() for f in layer.families)
        if job.schedule is not None and not prunes_dimensions:
            raise ValueError(
                f"structure: {' and '.join(config.structure)} prunes no dimensions, so it cannot meet a budget. "
                "Set budget: auto, or add filter or channel"
            )
        self.weights = [p for p in job.model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(config, self.weights)
        self.optimizers = [self.optimizer]
        self.count, self.median_gamma = (self.weights[0].detach().new_zeros(()) for _ in range(2))
        self.clamped_counts = self.count.new_zeros(2)  # negative and non-finite curvatures so far
        self.iterations = OuterIterations.of(job, config.iterations)
        self.gauss_newton = job.task.can_draw

    def step(self, batch: Any) -> dict[str, Tensor]:
        set_lr_(self.optimizer, lr_factor(self.config, self.done, self.job.steps))
        self.done += 1
        self._sample_and_update(batch)
        loss = set_task_gradients_(self.job, self.weights, batch, self.config.distill)
        clip_and_step(self.optimizer, self.weights, self.config.clip)
        rates = proximal_rates(self.optimizer, [layer.weight for layer in self.layers.values()])
        for layer, rate in zip(self.layers.values(), rates, strict=True):
            layer.shrink_(self.config.gamma, rate)
        penalty = self.config.gamma * torch.stack([layer.penalty() for layer in self.layers.values()]).sum()
        return {"loss": loss + penalty, "task": loss, "penalty": penalty}

    def importance(self) -> dict[str, Tensor]:
        """Return the importance of each dimension: the least of its filters, at most the sum over its readers."""
        importance = {}
        for group in self.job.groups:
            like = self.weights[0].detach()
            writers = torch.full((group.width,), math.inf, dtype=like.dtype, device=like.device)
            readers, has_readers = torch.zeros_like(writers), False
            for slot in group.slots:
                layer = self.layers.get(slot.tensor)
                family = "nc"[slot.dim] if slot.dim < 2 else ""
                if layer is None or family not in layer.families:
                    continue
                gamma = (layer.gamma[family] * layer.kept[family]).flatten()
                per_dimension = gamma[torch.as_tensor(slot.index, device=gamma.device)].sum(1)
                if family == "n":
                    writers = torch.minimum(writers, per_dimension)
                else:
                    readers, has_readers = readers + per_dimension, True
            least = torch.minimum(writers, readers) if has_readers else writers
            importance[group.name] = torch.where(least == math.inf, torch.ones_like(least), least)
        return importance

    def smaller_kernels(self) -> dict[str, dict[int, tuple[int, int]]]:
        modules = dict(self.job.model.named_modules())
        kernels = {}
        for name, layer in self.layers.items():
            module: Any = modules[name.rpartition(".")[0]]
            numeric_padding = layer.weight.ndim > 2 and not isinstance(module.padding, str)
            zero_padding = numeric_padding and module.padding_mode in ("zeros", "constant")
            if zero_padding and (spans := nonzero_spans(layer.weight)):
                kernels[name] = spans
        return kernels

    def notes(self) -> list[str]:
        sizes = [
            f"{name.removesuffix('.weight')} {'x'.join(map(str, _kernel_size(self.layers[name].weight, spans)))}"
            for name, spans in self.smaller_kernels().items()
        ]
        return [
            f"curvature of the weights: {describe_kind(self.gauss_newton)}",
            *describe_clamped(self.clamped_counts, "weights"),
            *([f"smaller kernels: {', '.join(sizes)}"] if sizes else []),
        ]

    def state(self) -> dict[str, Tensor]:
        tensors = [tensor for layer in self.layers.values() for tensor in layer.tensors()]
        return {f"layer{i}": tensor for i, tensor in enumerate(tensors)} | {
            "count": self.count,
            "median_gamma": self.median_gamma,
            "clamped": self.clamped_counts,
        }

    def _sample_and_update(self, batch: Any) -> None:
        """Sample the curvature and update the groups, in the steps in which either is due."""
        if self.done == 1 and self.job.schedule is None:
            self._sample(batch, MIN_SAMPLES)
            gammas = [layer.critical_gammas(layer.squared_gradients / self.count) for layer in self.layers.values()]
            self.median_gamma.copy_(torch.cat(gammas).median())
            for tensor in (self.count, *(layer.squared_gradients for layer in self.layers.values())):
                tensor.zero_()
        if self.iterations.is_sampling_step(self.done):
            fraction = SAMPLE_FRACTION * count_samples(batch) * world_size() * self.iterations.period
            samples = self.config.samples or max(MIN_SAMPLES, fraction)
            self._sample(batch, math.ceil(samples / self.iterations.sampling_steps))
        if self.iterations.is_last_step(self.done):
            self._update()

    def _sample(self, batch: Any, count: int) -> None:
        """Add the squared gradients of random losses on `count` samples of all processes."""
        layers = list(self.layers.values())
        position, seed = rank() * count_samples(batch), derive_seed(self.job.seed, "curvature", self.done)
        own_count, samples_per_pass = math.ceil(count / world_size()), SAMPLES_PER_PASS if self.gauss_newton else 1
        with module_mode(self.job.model, training=False), self.job.gradient_computer.autocast():
            for samples, size in first_samples(batch, own_count, samples_per_pass):
                with seeded_draws(seed + position, self.count.device):
                    loss = curvature_loss(
                        self.job.model,
                        self.job.task,
                        samples,
                        self.gauss_newton,
                        self.config.distill,
                        self.job.teacher_outputs,
                    )
                position += size
                gradients = torch.autograd.grad(loss, [layer.weight for layer in layers], allow_unused=True)
                for layer, g in zip(layers, gradients, strict=True):
                    if g is not None:
                        layer.squared_gradients.addcmul_(g, g, value=size**2)
                self.count.add_(size)

    def _update(self) -> None:
        """End an outer iteration: update and prune the groups of every layer.

        Raises:
            ValueError: nothing would be left.
        """
        all_reduce_mean_([self.count, *(layer.squared_gradients for layer in self.layers.values())])
        prune = self.job.schedule is None
        for layer in self.layers.values():
            h = clamp_curvature(layer.squared_gradients / self.count, self.clamped_counts) / self.config.gamma
            layer.update_(h, prune)
            layer.squared_gradients.zero_()
        self.count.zero_()
        if prune and all(not bool(layer.weight.any()) for layer in self.layers.values()):
            raise ValueError(
                f"gamma: {self.config.gamma:g} leaves nothing: it prunes every group of weights. With gamma "
                f"{float(self.median_gamma):.1g} about half of them would stay"
            )


def _kernel_size(weight: Tensor, spans: dict[int, tuple[int, int]]) -> list[int]:
    return [spans[d][1] - spans[d][0] if d in spans else weight.shape[d] for d in range(2, weight.ndim)]


def _layer_groups(config: BayesCompressConfig, job: Job) -> dict[str, LayerGroups]:
    """Return the weights that the structures apply to, with their groups.

    Filters are only pruned in layers that write a group; others are outputs of the network, for example.

    Raises:
        ValueError: a structure applies to no layer.
    """
    written = {slot.tensor for group in job.groups for slot in group.output_slots if slot.dim == 0}
    modules, weights = dict(job.model.named_modules()), dict(prunable_weights(job.model))

    def applicable_families(structure: str, name: str) -> list[str]:
        families = group_families(structure, weights[name])
        grouped = getattr(modules[name.rpartition(".")[0]], "groups", 1) > 1
        return [] if ("n" in families and name not in written) or ("c" in families and grouped) else families

    chosen: dict[str, list[str]] = {}
    for structure in config.structure:
        fitting = {name: families for name in weights if (families := applicable_families(structure, name))}
        if not fitting:
            others = [s for s in STRUCTURES if any(applicable_families(s, name) for name in weights)]
            raise ValueError(
                f"structure: {structure} fits no layer of the model; those that fit one are "
                f"{', '.join(others) or 'none'}"
            )
        for name, families in fitting.items():
            chosen[name] = list(dict.fromkeys([*chosen.get(name, []), *families]))
    return {name: LayerGroups(weights[name], families) for name, families in chosen.items()}
