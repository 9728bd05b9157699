"""APS-T: a controller chooses the widths of all groups, over weights that the candidates share.

Wang, Bai, Wu et al., Revisiting parameter sharing for automatic neural channel number search,
NeurIPS 2020, algorithm 1, with the data in halves D_tr and D_val. In the first stage widths a are drawn uniformly,

    W <- W - eta grad_W L(W, a)                                       on D_tr

In the second stage a ~ pi(theta), and after the same step of the weights

    theta <- theta + eta_theta ((R - b) grad log p(a) + entropy_weight grad H)    on D_val

with the reward R of accuracy and cost (width_cost.py). Dimensions are sorted by magnitude, so nested widths keep the
first ones: they are masks on the gates, and every group can have them. Groups between plain layers can have projections
of larger meta weights instead (projections.py), which part in the second stage (sharing.py).

The importance of the dimension of rank r is the probability of a width above r. So that the network that is cut is the
one that was trained, the search ends at the widths that the budget chooses by this importance: masks are set to
them, the meta weights are projected to the next larger candidate, and the weights train on both halves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, optim

from compress.budget import PruningSchedule, WidthBounds
from compress.data import derive_seed
from compress.distributed import broadcast_object
from compress.recipe import Target
from compress.surgery import attach_
from compress.training import lr_factor, make_optimizer, set_lr_

from ..base import Job, Search, register_search
from .aps_config import ApsConfig
from .candidates import WidthTable, candidate_widths, magnitude_ranks
from .controller import Controller, policy_loss, update_baseline_
from .gradient_coupling import GroupWeight, measure_coupling, to_candidate
from .projections import attach_projections_, layer_slots, sharing_level
from .sharing import TURN, UPDATES, anneal_by_position_, disjoint_columns, nested_columns, separated
from .weight_training import WeightTraining, frozen_statistics, mean_over_processes
from .width_cost import BudgetRatio, reward

MARGINAL_DRAWS = 256  # over which the probabilities of a group's candidates are averaged
MAX_DIAGNOSTICS, PASSES_PER_DIAGNOSTIC = 20, 50


@register_search("aps")
class Aps(Search):
    """Weights train at drawn widths on one half of the data, the controller on the other."""

    Config = ApsConfig
    batches_per_step = 2

    def __init__(self, config: ApsConfig, job: Job) -> None:
        super().__init__(config, job)
        schedule = job.schedule if isinstance(job.schedule, PruningSchedule) else None
        target, dense_widths = (schedule.recipe.target, schedule.dense_widths) if schedule else (Target(), None)
        bounds = WidthBounds.of(job.groups, target, dense_widths)
        self.candidates = candidate_widths(job.groups, config.candidates, bounds)
        ranks = magnitude_ranks(job.model, job.groups)
        self.table = WidthTable.of(self.candidates, ranks)
        self.device = self.table.widths.device
        self.choices = torch.zeros(len(self.candidates), dtype=torch.long, device=self.device)
        slots = {g: layer_slots(job.model, group) for g, group in enumerate(job.groups)}
        self.projected = {g: s for g, s in slots.items() if s and config.sharing != "ordinal"}
        self.gates = attach_(job.model, job.groups)
        for gate in self.gates.values():
            gate.requires_grad_(False)
        self.layers = attach_projections_(job.model, self.projected, self.candidates, self.choices)
        if config.sharing == "independent":
            self._expand_weights_()
        self.weights = [p for p in job.model.parameters() if p.requires_grad]
        self.training = WeightTraining(job, self.weights, config.distill)
        self.optimizer = make_optimizer(config, self.weights)
        self.ratio = BudgetRatio(job, self.device)
        generator = torch.Generator().manual_seed(derive_seed(job.seed, "controller"))
        counts = [len(widths) for widths in self.candidates]
        self.controller = Controller(counts, lambda c: self.ratio(self.table.widths_of(c)), generator).to(self.device)
        parameters = list(self.controller.parameters())
        self.controller_optimizer = optim.Adam(parameters, lr=config.controller.lr, betas=(0.5, 0.999))
        self.optimizers = [self.optimizer, self.controller_optimizer]
        self.baseline, self.reward_count = (torch.zeros((), dtype=torch.float64, device=self.device) for _ in range(2))
        self.cosine, self.coupling = (torch.full((), torch.nan, device=self.device) for _ in range(2))
        self.first_end = round(config.first_stage * job.steps)
        self.settle_start = job.steps - int(config.settle * job.steps)
        self.diagnostic_steps = _diagnostic_steps(config.diagnostics, self.settle_start, max(counts))
        self.finished = False

    def step(self, batch: Any) -> dict[str, Tensor]:
        validation, train = batch
        set_lr_(self.optimizer, lr_factor(self.config, self.done, self.job.steps))
        if self.done == self.first_end:
            self._start_second_stage_()
        if self.done == self.settle_start:
            self._settle_()
        self._activate_projections_()
        if self.done >= self.settle_start:
            terms = self.training.step(train, self.optimizer, self.config.clip)
            self.training.step(validation, self.optimizer, self.config.clip)
        elif self.done < self.first_end:
            terms = self._train_at_uniform_widths(train)
        else:
            terms = self._train_with_controller(train, validation)
        self.done += 1
        return terms

    def importance(self) -> dict[str, Tensor]:
        """Return the probability that a dimension is kept; zero if a measured budget has dropped it.

        A measured budget is met once, when the weights settle: measured again, it might choose other widths.
        """
        values = self.table.importance(self.controller.marginals(self._numbers(MARGINAL_DRAWS, "marginals"))[0])
        schedule = self.job.schedule
        if isinstance(schedule, PruningSchedule) and schedule.recipe.budget.is_measured and self._is_settled:
            values = [value * gate for value, gate in zip(values, self.gates.values(), strict=True)]
        return dict(zip(self.gates, values, strict=True))

    def finish(self) -> None:
        if not self._is_settled:
            self._settle_()
        self.finished = True
        self._activate_projections_()

    def policy(self) -> dict[str, Any]:
        """Return candidates and their probabilities by group, entropy, moving average of the reward, and sharing."""
        probabilities, entropy = self.controller.marginals(self._numbers(MARGINAL_DRAWS, "marginals"))
        rows = zip(self.gates, self.candidates, probabilities.tolist(), strict=True)
        groups = {
            name: {"widths": widths, "probabilities": [round(p, 4) for p in row[: len(widths)]]}
            for name, widths, row in rows
        }
        phi, least, most = self.sharing_level()
        numbers = {
            "entropy": float(entropy),
            "reward": float(self.baseline) if bool(self.reward_count) else None,
            "phi": phi,
            "phi_range": [least, most],
        }
        coupling = {"cosine": float(self.cosine), "coupled_gradient": float(self.coupling)}
        return {"groups": groups, **numbers, **{k: v for k, v in coupling.items() if np.isfinite(v)}}

    def sharing_level(self) -> tuple[float, int, int]:
        """Return Phi (10), summed over layers, with its smallest and largest value."""
        parted = self.config.sharing == "independent" or self.done > self.first_end
        return sharing_level(self.job.groups, self.candidates, self.layers if parted else [])

    def notes(self) -> list[str]:
        projected = [group.name for g, group in enumerate(self.job.groups) if g in self.projected]
        masked = [group.name for g, group in enumerate(self.job.groups) if g not in self.projected]
        ways = {f"projections of meta weights ({self.config.sharing})": projected, "nested masks": masked}
        notes = [f"aps: {way}: {', '.join(names)}" for way, names in ways.items() if names]
        if all(len(widths) == 1 for widths in self.candidates):
            notes.append(
                "aps: every group has one candidate width only, so there was nothing to choose, and magnitude decided; "
                "name smaller widths in search.candidates, or lower target.round_to"
            )
        return notes

    def state(self) -> dict[str, Tensor]:
        schedule = self.job.schedule
        times = schedule.measured_times if isinstance(schedule, PruningSchedule) else None
        sides = [side for layer in self.layers for _, side in layer.projection.sides()]
        return {
            **{f"controller/{name}": p for name, p in self.controller.named_parameters()},
            **{f"side{i}/{key}": t for i, side in enumerate(sides) for key, t in (("a", side.a), ("rank", side.ranks))},
            **({"times": times} if times is not None else {}),
            **self.ratio.state(),
            "ranks": self.table.ranks,
            "baseline": self.baseline,
            "rewards": self.reward_count,
            "cosine": self.cosine,
            "coupling": self.coupling,
        }

    def _train_at_uniform_widths(self, train: Any) -> dict[str, Tensor]:
        self._set_widths_(self.table.uniform_choices(self._numbers(1)[0]))
        self._measure_coupling(train)
        return self.training.step(train, self.optimizer, self.config.clip)

    def _train_with_controller(self, train: Any, validation: Any) -> dict[str, Tensor]:
        config = self.config
        self._anneal_()
        draw = self.controller(self._numbers(config.controller.draws))
        self._set_widths_(draw.choices[0])
        self._measure_coupling(train)
        terms = self.training.step(train, self.optimizer, config.clip)
        sums, counts = [], []
        for choices in draw.choices:
            self._set_widths_(choices)
            total, count = self.training.task_reward(validation)
            sums.append(total)
            counts.append(count)
        accuracy = mean_over_processes(sums, counts)
        rewards = reward(accuracy, self.ratio(self.table.widths_of(draw.choices)), config.alpha, config.beta)
        baseline = torch.where(self.reward_count == 0, rewards.mean(), self.baseline)
        loss = policy_loss(draw, rewards, baseline, config.controller.entropy)
        self.controller_optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.controller_optimizer.step()
        update_baseline_(self.baseline, self.reward_count, rewards.mean(), config.controller.baseline)
        return terms

    @torch.no_grad()
    def _set_widths_(self, choices: Tensor) -> None:
        """Let every group have the width of its chosen candidate."""
        self.choices.copy_(choices)
        masks = self.table.masks(choices)
        for gate, mask in zip(self.gates.values(), masks, strict=True):
            gate.copy_(mask)

    def _start_second_stage_(self) -> None:
        """Sort the dimensions again, by the weights of the first stage, and give each candidate its copy of them."""
        ranks = magnitude_ranks(self.job.model, self.job.groups)
        if self.config.sharing == "independent":  # the weights of the first stage are meta weights
            before = self.table.ranks_by_group()
            ranks = [before[g] if g in self.projected else rank for g, rank in enumerate(ranks)]
        self.table.ranks.copy_(torch.cat(ranks))
        if self.config.sharing == "transitionary":
            self._expand_weights_()

    def _expand_weights_(self) -> None:
        """Fill the meta weights with copies of the weights."""
        ranks = self.table.ranks_by_group()
        for layer in self.layers:
            for _, side in layer.projection.sides():
                widths = self.candidates[side.group_index]
                own = self.config.sharing == "independent"
                a = disjoint_columns(widths) if own else separated(nested_columns(widths))
                side.set_(a.to(self.device), ranks[side.group_index])
            layer.projection.expand_(layer.weight)

    def _anneal_(self) -> None:
        """Make the annealing updates that are due: in turn ten of all Q and ten of all P."""
        if self.config.sharing != "transitionary":
            return
        stage = max(1, self.settle_start - self.first_end)
        position = self.done - self.first_end
        for update in range(2 * UPDATES * position // stage, 2 * UPDATES * (position + 1) // stage):
            dim = 1 - update // TURN % 2
            for layer in self.layers:
                for side_dim, side in layer.projection.sides():
                    if side_dim == dim:
                        anneal_by_position_(side.a, self.candidates[side.group_index])

    @property
    def _is_settled(self) -> bool:
        return self.finished or self.done > self.settle_start

    @property
    def _projections_active(self) -> bool:
        if self.finished or self.done >= self.settle_start:
            return False
        return self.config.sharing == "independent" or self.done >= self.first_end

    def _activate_projections_(self) -> None:
        for layer in self.layers:
            layer.projection.active = self._projections_active

    @torch.no_grad()
    def _settle_(self) -> None:
        """Fix the widths that the budget chooses, and the weights that go with them."""
        schedule, groups = self.job.schedule, self.job.groups
        if schedule is None:
            keep: Any = {group.name: np.arange(group.width) for group in groups}
        elif isinstance(schedule, PruningSchedule):
            ranking = self.config.ranking_for(groups, schedule.recipe.budget.unit)
            keep = broadcast_object(schedule(self.importance(), 1.0, ranking))
        else:
            keep = schedule(self.importance(), 1.0)
        for name, gate in self.gates.items():
            gate.zero_()
            gate[torch.as_tensor(keep[name], device=gate.device)] = 1
        used_metas = self.config.sharing == "independent" or self.done >= self.first_end
        if self.layers and used_metas:
            chosen = [next((k for k, c in enumerate(w) if c >= len(keep[n])), len(w) - 1) for n, w in self._by_name()]
            self._project_weights_(torch.tensor(chosen, device=self.device))

    def _by_name(self) -> list[tuple[str, list[int]]]:
        return list(zip(self.gates, self.candidates, strict=True))

    def _project_weights_(self, choices: Tensor) -> None:
        """Set the weights of projected layers to those of chosen candidates; others keep theirs."""
        masks = self.table.masks(choices)
        for layer in self.layers:
            inside = torch.ones_like(layer.weight, dtype=torch.bool)
            for dim, side in layer.projection.sides():
                shape = [-1 if d == dim else 1 for d in range(layer.weight.ndim)]
                inside &= masks[side.group_index].view(shape)
            layer.weight.copy_(torch.where(inside, layer.projection.project(choices), layer.weight))
            for value in self.optimizer.state[layer.weight].values():
                if isinstance(value, Tensor):
                    value.zero_()

    def _numbers(self, draws: int, name: object = "widths") -> Tensor:
        """Return random numbers (draws, groups), the same in all processes and in a resumed search."""
        step = self.done if name == "widths" else 0
        generator = torch.Generator().manual_seed(derive_seed(self.job.seed, "aps", name, step))
        return torch.rand(draws, len(self.candidates), generator=generator).to(self.device, non_blocking=True)

    def _measure_coupling(self, batch: Any) -> None:
        """Compare the gradients of the candidates of one group, if this is a step for it; the groups take turns."""
        if self.done not in self.diagnostic_steps:
            return
        several = [g for g, widths in enumerate(self.candidates) if len(widths) > 1 and self._group_weights(g)]
        if not several:
            return
        g = several[self.diagnostic_steps.index(self.done) % len(several)]
        drawn, gradients = self.choices.clone(), []
        parts = self._group_weights(g)
        with frozen_statistics(self.job.model):
            for k in range(len(self.candidates[g])):
                self._set_widths_(_with_choice(drawn, g, k))
                gradients.append(self.training.gradients(batch, [part.weight for part in parts]).gradients)
        kept = [self.table.masks(_with_choice(drawn, g, k))[g] for k in range(len(gradients))]
        self._set_widths_(drawn)
        coupling = measure_coupling(gradients, lambda k, tensors: to_candidate(k, kept[k], tensors, parts))
        self.cosine.copy_(coupling.cosine)
        self.coupling.copy_(coupling.norm)

    def _group_weights(self, g: int) -> list[GroupWeight]:
        """Return the weights in which a group is projected, or those that it is gated on."""
        if self._projections_active and g in self.projected:
            sides = [(layer.projection, *pair) for layer in self.layers for pair in layer.projection.sides()]
            return [GroupWeight(p.meta, dim, side=side) for p, dim, side in sides if side.group_index == g]
        tensors = dict(self.job.model.named_parameters())
        weights = []
        for slot in [*self.job.groups][g].gated_slots:
            owner, _, leaf = slot.tensor.rpartition(".")
            weight = tensors.get(f"{owner}.parametrizations.{leaf}.original".removeprefix("."))
            if weight is not None and weight.requires_grad:
                positions = torch.as_tensor(slot.index, device=weight.device)
                weights.append(GroupWeight(weight, slot.dim, positions=positions))
        return weights


def _with_choice(choices: Tensor, g: int, k: int) -> Tensor:
    changed = choices.clone()
    changed[g] = k
    return changed


def _diagnostic_steps(count: int | None, steps: int, candidates: int) -> list[int]:
    """Return the steps in which gradients are compared, evenly over the search."""
    if count is None:
        count = min(MAX_DIAGNOSTICS, steps // (PASSES_PER_DIAGNOSTIC * candidates))
    return sorted({int((n + 0.5) * steps / count) for n in range(count)})
