"""Structural Bayesian compression: group lasso on the weights, re-weighted by evidence.

Zhou, Yang, Wang, Pan, BayesNAS, ICML 2019, appendix B, algorithm 3, with the structures of table S3 (structures.py).
With W_g the weights of a group and `gamma` the paper's lambda, the weights are trained (B.0.1) by proximal steps,

    min over W of  L(W) + gamma * sum omega_g ||W_g||_2

and at the end of each outer iteration, one an epoch, with the curvature H of the loss in each weight over lambda,

    gamma_g = ||W_g||_2 / omega_g(t-1)                                       (B.0.2)
    C = (1 / gamma_g + H)^-1,  alpha = 1 / gamma_g - C / gamma_g^2           (B.0.3), (B.0.4)
    omega_g = sqrt(sum over g of alpha)                                      (B.0.5), table S3

The algorithm says that unimportant groups are pruned, and not which; the entropy of a weight's prior is below zero
almost whatever it does. Here a group goes where zero minimises (B.0.1) with the loss as a quadratic around the weights,
||H W_g||_2 <= omega_g, and at most half of a layer's in an iteration. The importance of a dimension is the next
gamma_g, ||W_g||_2 / omega_g with W_g at that minimum, of the filters that write it (`filter`) or of the columns that
read it (`channel`). Kernels whose outer rows or columns are zero are cut; all else is left as zeros.

H is the square of gradients of random losses (curvature.py), of all weights at once: in a sum over a group the noise of
single weights is small. Where the task cannot draw, it is the empirical Fisher.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor, nn

from ..curvature import CHUNK, bent_loss, count_of, drawing, pieces, sound, told
from ..fields import Positive, Teaching, Training
from ..kernels import spans
from ..loading import derived
from ..optimise import optimiser, rate, set_rate
from ..processes import mean_, rank, world
from ..tracing import mode
from . import Job, Ranking, Search, SearchConfig, register_search
from .bayesnas import CLOSING, LEAST_SAMPLES, SHARE
from .structures import STRUCTURES, as_four, families, layers, over


def _structures(value: Any) -> Any:
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else ()
    unknown = [name for name in names if not isinstance(name, str) or name not in STRUCTURES]
    if not names or unknown:
        came = unknown[0] if unknown else value
        raise ValueError(f"expected one of {', '.join(STRUCTURES)}, or a list of them; got {came!r}")
    return names


class BayesCompressConfig(SearchConfig, Training):
    """Re-weighted group lasso on weights, by evidence (Zhou et al. 2019, algorithm 3)."""

    method: Literal["bayes_compress"] = "bayes_compress"
    ranking: Ranking = Field("cost", description="across groups, with a budget: importance per cost")
    structure: Annotated[tuple[str, ...], BeforeValidator(_structures, json_schema_input_type=str | list[str])] = Field(
        ("filter",), description=f"which weights go together, one or several of {', '.join(STRUCTURES)}"
    )
    gamma: Positive = Field(1e-4, description="sparsity intensity, the paper's lambda: strength of the group lasso")
    samples: int | None = Field(
        None, ge=1, description="that the curvature is taken on in an outer iteration; 5 % and at least 128 if left out"
    )
    iterations: int | None = Field(None, ge=1, description="outer iterations; one for each epoch if left out")
    distill: Teaching | None = Field(None, description="learn from the dense model in the search, too")

    @property
    def reaches_zero(self) -> bool:
        return True


class Layer:
    """The groups of one layer: omega, gamma and what is left of each family."""

    def __init__(self, weight: nn.Parameter, families: list[str]) -> None:
        self.weight, self.families = weight, families
        four = as_four(weight.detach())
        self.omega = {f: torch.ones_like(over(four, f)) for f in families}
        self.gamma = {f: torch.ones_like(o) for f, o in self.omega.items()}
        self.alive = {f: torch.ones_like(o) for f, o in self.omega.items()}
        self.bent = torch.zeros_like(weight.detach())  # sum of squared gradients

    def tensors(self) -> list[Tensor]:
        return [self.bent, *(t[f] for t in (self.omega, self.gamma, self.alive) for f in self.families)]

    @torch.no_grad()
    def shrink_(self, step: float) -> None:
        """The proximal step of each family, and what went stays away."""
        four = as_four(self.weight.data)
        for f in self.families:
            norm = over(four.square(), f).sqrt()
            four.mul_((1 - step * self.omega[f] / norm.clamp_min(1e-30)).clamp_min(0) * self.alive[f])

    def _going(self, family: str, rest: Tensor, force: Tensor) -> Tensor:
        """1 where a group goes: where zero is best, but the better half of a family stays for another iteration.

        The quadratic takes groups one by one, and of several that do the same thing each looks useless.
        """
        living = self.alive[family] > 0
        worth = torch.where(living, force / self.omega[family].clamp_min(1e-30), torch.inf)
        most = max(1, int(living.sum()) // 2)
        line = worth.flatten().kthvalue(most).values
        return ((rest == 0) & ((worth <= line) | (force == 0))).to(rest.dtype)

    def norm(self) -> Tensor:
        """sum omega ||W||."""
        four = as_four(self.weight.detach())
        return torch.stack([(self.omega[f] * over(four.square(), f).sqrt()).sum() for f in self.families]).sum()

    def intensities(self, h: Tensor) -> Tensor:
        """About the lambda of each group from which on it goes: sum (h w)^2 / sum h."""
        w, h = as_four(self.weight.detach()), as_four(h)
        each = [over((h * w).square(), f) / over(h, f).clamp_min(1e-30) for f in self.families]
        return torch.cat([value.flatten() for value in each])

    @torch.no_grad()
    def update_(self, h: Tensor, prune: bool) -> None:
        """(B.0.2)-(B.0.5), for curvatures over lambda; then what zero is best for goes."""
        w, h = as_four(self.weight.data), as_four(h)
        for f in self.families:
            gamma = over(w.square(), f).sqrt() / self.omega[f].clamp_min(1e-30)
            alpha = h / (1 + gamma * h)  # 1 / gamma - C / gamma^2
            self.omega[f].copy_(over(alpha, f).sqrt())
            force = over((h * w).square(), f).sqrt()
            rest = (1 - self.omega[f] / force.clamp_min(1e-30)).clamp_min(0) * (force > 0)
            self.gamma[f].copy_(rest * over(w.square(), f).sqrt() / self.omega[f].clamp_min(1e-30))
            if prune:
                self.alive[f].mul_(1 - self._going(f, rest, force))
        if prune:
            self.shrink_(0.0)


@register_search("bayes_compress")
class BayesCompress(Search):
    """Weights on all batches, with a penalty on their groups."""

    Config = BayesCompressConfig

    def __init__(self, config: BayesCompressConfig, job: Job) -> None:
        super().__init__(config, job)
        self.layers = _layers(config, job)
        dims = any(f in ("n", "c") for layer in self.layers.values() for f in layer.families)
        if job.line is not None and not dims:
            raise ValueError(
                f"structure: {' and '.join(config.structure)} cuts no dimensions, so a budget cannot be met by it. "
                "Say budget: auto, or add filter or channel"
            )
        self.weights = [p for p in job.model.parameters() if p.requires_grad]
        self.optimizer = optimiser(config, self.weights)
        self.optimizers = [self.optimizer]
        self.count, self.start = (self.weights[0].detach().new_zeros(()) for _ in range(2))
        self.clamped = self.count.new_zeros(2)  # curvatures so far that were negative, or no numbers
        self.rounds = config.iterations or (max(1, round(job.steps / job.epoch)) if job.epoch else 1)
        self.period = math.ceil(job.steps / self.rounds)
        self.closing = max(1, round(CLOSING * self.period))
        self.draws = hasattr(job.task, "draw")

    def step(self, batch: Any) -> dict[str, Tensor]:
        task, distill = self.job.task, self.config.distill
        set_rate(self.optimizer, rate(self.config, self.done, self.job.steps))
        self.done += 1
        self._look(batch)

        def terms(piece: Any) -> dict[str, Tensor]:
            outputs = task.forward(self.job.model, piece)
            found = {"task": task.loss(outputs, piece)}
            if distill is not None:
                found["distil"] = distill.weight * task.distil(outputs, self._taught(piece), distill.temperature)
            return found

        found = self.job.compute.gradients(terms, batch, self.weights)
        loss = found.loss
        for p, g, idle in zip(self.weights, found.gradients, found.idle, strict=True):
            p.grad = None if idle else g
        if self.config.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.weights, self.config.clip)
        self.optimizer.step()
        scores = self.optimizer.param_groups[0]
        eta = scores["lr"] / (1 - scores.get("momentum", 0.0))
        for layer in self.layers.values():
            layer.shrink_(eta * self.config.gamma)
        penalty = self.config.gamma * torch.stack([layer.norm() for layer in self.layers.values()]).sum()
        return {"loss": loss + penalty, "task": loss, "penalty": penalty}

    def importance(self) -> dict[str, Tensor]:
        """Of each dimension: the least that its filters, and the most that its readers, are worth."""
        found = {}
        for group in self.job.groups:
            first = self.weights[0].detach()
            worth = torch.full((group.width,), math.inf, dtype=first.dtype, device=first.device)
            read, reading = torch.zeros_like(worth), False
            for slot in group.slots:
                layer = self.layers.get(slot.tensor)
                family = "nc"[slot.dim] if slot.dim < 2 else ""
                if layer is None or family not in layer.families:
                    continue
                value = (layer.gamma[family] * layer.alive[family]).flatten()
                each = value[torch.as_tensor(slot.index, device=value.device)].sum(1)
                if family == "n":
                    worth = torch.minimum(worth, each)
                else:
                    read, reading = read + each, True
            worth = torch.minimum(worth, read) if reading else worth
            found[group.name] = torch.where(worth == math.inf, torch.ones_like(worth), worth)
        return found

    def kernels(self) -> dict[str, dict[int, tuple[int, int]]]:
        modules = dict(self.job.model.named_modules())
        found = {}
        for name, layer in self.layers.items():
            module: Any = modules[name.rpartition(".")[0]]
            plain = layer.weight.ndim > 2 and not isinstance(module.padding, str)
            if plain and module.padding_mode in ("zeros", "constant") and (left := spans(layer.weight)):
                found[name] = left
        return found

    def notes(self) -> list[str]:
        cut = self.kernels()
        small = [f"{n.removesuffix('.weight')} {'x'.join(map(str, _size(self.layers[n].weight, cut[n])))}" for n in cut]
        kind = "Gauss-Newton, by random signs" if self.draws else "empirical Fisher"
        said = [f"curvature of the weights: {kind}", *told(self.clamped, "weights")]
        return said + [f"smaller kernels: {', '.join(small)}"] * bool(small)

    def state(self) -> dict[str, Tensor]:
        tensors = [t for layer in self.layers.values() for t in layer.tensors()]
        return {f"layer{i}": t for i, t in enumerate(tensors)} | {
            "count": self.count,
            "start": self.start,
            "clamped": self.clamped,
        }

    def _look(self, batch: Any) -> None:
        """Take samples where it is time, and end the outer iteration where it ends."""
        if self.done == 1 and self.job.line is None:
            self._sample(batch, LEAST_SAMPLES)
            each = [layer.intensities(layer.bent / self.count) for layer in self.layers.values()]
            self.start.copy_(torch.cat(each).median())
            for tensor in (self.count, *(layer.bent for layer in self.layers.values())):
                tensor.zero_()
        inside, last = (self.done - 1) % self.period + 1, self.done == self.job.steps
        if inside > self.period - self.closing or last:
            wanted = self.config.samples or max(LEAST_SAMPLES, SHARE * count_of(batch) * world() * self.period)
            self._sample(batch, math.ceil(wanted / self.closing))
        if inside == self.period or last:
            self._update()

    def _sample(self, batch: Any, samples: int) -> None:
        """Squared gradients of random losses, on so many samples."""
        here = list(self.layers.values())
        first, seed = rank() * count_of(batch), derived(self.job.seed, "curvature", self.done)
        with mode(self.job.model, training=False), self.job.compute.autocast():
            for one, count in pieces(batch, math.ceil(samples / world()), CHUNK if self.draws else 1):
                with drawing(seed + first, self.count.device):
                    loss = bent_loss(self.job.model, self.job.task, one, self.draws, self.config.distill, self._taught)
                first += count
                found = torch.autograd.grad(loss, [layer.weight for layer in here], allow_unused=True)
                for layer, g in zip(here, found, strict=True):
                    if g is not None:
                        layer.bent.addcmul_(g, g, value=count**2)
                self.count.add_(count)

    def _update(self) -> None:
        """
        Raises:
            ValueError: nothing would be left.
        """
        mean_([self.count, *(layer.bent for layer in self.layers.values())])
        for layer in self.layers.values():
            h = sound(layer.bent / self.count, self.clamped) / self.config.gamma
            layer.update_(h, prune=self.job.line is None)
            layer.bent.zero_()
        self.count.zero_()
        if self.job.line is None and all(not bool(layer.weight.any()) for layer in self.layers.values()):
            raise ValueError(
                f"gamma: {self.config.gamma:g} leaves nothing: no group of weights is worth so much. With gamma "
                f"{float(self.start):.1g} about half of them would stay"
            )

    @torch.no_grad()
    def _taught(self, batch: Any) -> Any:
        if self.job.teacher is None:
            raise ValueError("distill: there is no dense model to learn from; use compress.prune")
        return self.job.task.forward(self.job.teacher, batch)


def _size(weight: Tensor, left: dict[int, tuple[int, int]]) -> list[int]:
    return [left[d][1] - left[d][0] if d in left else weight.shape[d] for d in range(2, weight.ndim)]


def _layers(config: BayesCompressConfig, job: Job) -> dict[str, Layer]:
    """The layers that a structure fits. Filters only where they write what may be cut: others are somebody's output.

    Raises:
        ValueError: a structure fits no layer.
    """
    written = {slot.tensor for group in job.groups for slot in group.writers if slot.dim == 0}
    modules, known = dict(job.model.named_modules()), dict(layers(job.model))

    def able(structure: str, name: str) -> list[str]:
        found = families(structure, known[name])
        grouped = getattr(modules[name.rpartition(".")[0]], "groups", 1) > 1
        return [] if ("n" in found and name not in written) or ("c" in found and grouped) else found

    chosen: dict[str, list[str]] = {}
    for structure in config.structure:
        fitting = {name: found for name in known if (found := able(structure, name))}
        if not fitting:
            others = [s for s in STRUCTURES if any(able(s, name) for name in known)]
            raise ValueError(
                f"structure: {structure} fits no layer of the model; those that fit one are "
                f"{', '.join(others) or 'none'}"
            )
        for name, found in fitting.items():
            chosen[name] = list(dict.fromkeys([*chosen.get(name, []), *found]))
    return {name: Layer(known[name], found) for name, found in chosen.items()}
