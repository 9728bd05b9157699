"""Checks of one network in the sweep: half of the MACs, random plans, forward passes of find_groups."""

from __future__ import annotations

import copy
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils import _pytree as pytree

import compress
from compress.graph import Groups, Index
from compress.graph.model_groups import OUTPUT_REASON
from compress.modules import as_call_inputs, tensors_in
from compress.recipe import Recipe
from compress.surgery import Plan, verify_plan

from . import coverage, zoo
from .sweep_networks import Example, build_example

TARGETS: dict[str, dict[str, Any]] = {
    "default": {"channels": True, "residual": True},
    "all": {"channels": True, "residual": True, "attention": True, "mlp": True},
    "qk, v": {"channels": False, "attention": ["qk", "v"], "mlp": True},
    "heads": {"channels": False, "attention": "heads"},
    "embedding": {"channels": False, "embedding": True, "attention": True, "mlp": True},
}
ATTENTION_KINDS = {"attention", "heads"}
NEEDED_KINDS = dict.fromkeys(TARGETS, ATTENTION_KINDS) | {"embedding": {*ATTENTION_KINDS, "embedding"}}
STATUS_KEYS = {"exact": "exact", "refused_plans": "refused", "does_not_run": "does not run", "differs": "differs"}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
MAX_FAILURES, MAX_REDUCTIONS = 3, 40  # failures described in a row; runs to find out which groups cause one


@dataclass(frozen=True)
class Outcome:
    """Result of a cut: exact, does not run, or differs, with a description of the failure.

    A cut that fails and that `verify_plan` finds, as every run does before it applies a plan, is refused.
    """

    status: str
    detail: str = ""
    difference: float = 0.0
    effect: float = 0.0  # of the cut on the outputs


class Comparison:
    """Dense network and inputs in the precision of the comparison, on which plans are checked."""

    def __init__(self, example: Example, groups: Groups) -> None:
        def cast(value: Any) -> Any:
            return value.to(example.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        self.example, self.groups = example, groups
        self.model = copy.deepcopy(example.model).to(example.dtype)
        self.args, self.kwargs = pytree.tree_map(cast, as_call_inputs(example.inputs))
        self.dense_outputs = self.outputs(copy.deepcopy(self.model))

    @torch.no_grad()
    def outputs(self, model: nn.Module) -> list[Tensor]:
        """Return the tensors to compare: outputs of the network, or of its compared modules."""
        recorded: list[Tensor] = []
        for path in self.example.compared_modules:
            model.get_submodule(path).register_forward_hook(lambda _, __, output: recorded.extend(tensors_in(output)))
        torch.manual_seed(0)
        result = tensors_in(model(*self.args, **self.kwargs))
        return [t.clone() for t in (recorded if self.example.compared_modules else result) if t.is_floating_point()]

    def check(self, keep: Mapping[str, Index]) -> Outcome:
        """Cut a copy of the network and compare it with the zeroed one."""
        try:
            plan = Plan.build(self.model, self.groups, keep)
            sliced = self.outputs(plan.apply_(copy.deepcopy(self.model)))
        except Exception as error:  # a wrong cut can raise any exception
            return Outcome("does not run", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
        zeroed = self.outputs(plan.zero_(copy.deepcopy(self.model)))
        difference, effect = relative_difference(zeroed, sliced), relative_difference(self.dense_outputs, zeroed)
        exact = difference <= TOLERANCE[self.example.dtype]
        detail = "" if exact else f"differs by {difference:.1e} of the range"
        return Outcome("exact" if exact else "differs", detail, difference, effect)

    def check_as_a_run(self, keep: Mapping[str, Index]) -> Outcome:
        """Cut a copy of the network; if that fails, verify the plan as a run would."""
        outcome = self.check(keep)
        if outcome.status == "exact":
            return outcome
        plan = Plan.build(self.example.model, self.groups, keep)
        failures = verify_plan(self.example.model, self.groups, plan)
        return Outcome("refused", next(iter(failures.values()))) if failures else outcome

    def reduce_failure(self, keep: Mapping[str, Index]) -> dict[str, str]:
        """Return a small part of a failing cut that still fails, as kept width of width by group."""
        status, cut = self.check(keep).status, [g for g in self.groups if len(keep[g.name]) < g.width]
        size, runs = max(len(cut) // 2, 1), 0
        while runs < MAX_REDUCTIONS and len(cut) > 1:
            for start in range(0, len(cut), size):
                rest = cut[:start] + cut[start + size :]
                runs += 1
                if rest and self.check({g.name: keep[g.name] for g in rest}).status == status:
                    cut = rest
                    break
            else:
                if size == 1:
                    break
                size //= 2
            size = min(size, max(len(cut) // 2, 1))
        return {g.name: f"{len(keep[g.name])} of {g.width}" for g in cut[:6]}


def relative_difference(a: list[Tensor], b: list[Tensor]) -> float:
    """Return the largest difference relative to the range of the tensor; infinite if shapes or NaNs differ."""
    if [t.shape for t in a] != [t.shape for t in b] or any(
        not x.isfinite().equal(y.isfinite()) for x, y in zip(a, b, strict=True)
    ):
        return float("inf")
    pairs = [(x[x.isfinite()], y[y.isfinite()]) for x, y in zip(a, b, strict=True)]
    pairs = [(x, y) for x, y in pairs if x.numel()]
    return zoo.relative_difference([x for x, _ in pairs], [y for _, y in pairs]) if pairs else float("nan")


@contextmanager
def count_passes(model: nn.Module) -> Iterator[Counter[str]]:
    """Count the outermost calls of modules: of the model's class as `model`, of others as `parts`."""
    counts: Counter[str] = Counter()
    depth = 0

    def enter(module: nn.Module, _: Any) -> None:
        nonlocal depth
        if depth == 0:
            counts["model" if type(module) is type(model) else "parts"] += 1
        depth += 1

    def leave(*_: Any) -> None:
        nonlocal depth
        depth -= 1

    handles = [
        hooks.register_module_forward_pre_hook(enter),
        hooks.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def random_keep(groups: Groups, seed: int) -> dict[str, Index]:
    """Return random dimensions of every group, each of an independent random width."""
    generator = np.random.default_rng(seed)
    widths = {g.name: int(generator.integers(1, g.width // g.num_heads + 1)) for g in groups}
    return {g.name: g.indices_per_head(widths[g.name], generator) for g in groups}


def check_network(name: str, plans: int, finished: set[str], kinds: set[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield a row for each target that is not finished; a target whose dimensions the network lacks is absent.

    Args:
        name: the network.
        plans: the number of random plans for each target.
        finished: targets to skip.
        kinds: kinds of dimensions that the network has, if the default target is finished; None if they are unknown.
    """
    example = build_example(name)
    for target in (t for t in TARGETS if t not in finished):
        if kinds is not None and target != "default" and not kinds & NEEDED_KINDS[target]:
            yield {"target": target, "status": "absent"}
            continue
        start = time.perf_counter()
        try:
            row = check_target(example, target, plans)
            kinds = set(row["kinds"]) if target == "default" else kinds
        except Exception as error:  # failures are results of the sweep
            row = {"status": "crash", "reason": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        yield {"target": target} | row | {"seconds": round(time.perf_counter() - start, 2)}
        if target == "default" and row["status"] == "crash":
            return


def check_target(example: Example, target: str, plans: int) -> dict[str, Any]:
    """Find the groups of a target, then cut to half of the MACs and by random plans; return the row."""
    recipe = Recipe.load({"target": TARGETS[target], "budget": {"macs": "50%"}, "search": {}})
    start = time.perf_counter()
    with count_passes(example.model) as passes:
        groups = compress.find_groups(example.model, example.inputs, recipe.target)
    row: dict[str, Any] = {"seconds_find": round(time.perf_counter() - start, 2)}
    row |= {"forward_passes": passes["model"], "part_passes": passes["parts"]}
    row |= {"groups": len(groups), "refused": len(groups.refused), "reason": common_refusal(groups)}
    row["kinds"] = sorted({g.kind for g in [*groups.offered, *groups.refused]})
    row |= {"notes": groups.notes} if groups.notes else {}
    if not len(groups):
        return row | {"status": "nothing to cut", "macs_left": 1.0}
    comparison = Comparison(example, groups)
    keep, cost = coverage.choose_kept(example.model, groups, recipe), groups.cost
    row["macs_left"] = round(int(cost.macs([len(keep[n]) for n in cost.names])) / int(cost.macs(cost.widths)), 4)
    outcome = comparison.check_as_a_run(keep)
    row |= {"status": outcome.status, "difference": outcome.difference, "effect": outcome.effect, "plans": plans}
    checks = [("half", keep, outcome)]
    for seed in range(plans):
        keep = random_keep(groups, seed)
        checks.append((str(seed), keep, comparison.check_as_a_run(keep)))
    counts = Counter(outcome.status for _, _, outcome in checks[1:])
    row |= {key: counts[status] for key, status in STATUS_KEYS.items()}
    row["least_effect"] = min((o.effect for _, _, o in checks if o.status == "exact"), default=0.0)
    failing = [check for check in checks if check[2].status not in ("exact", "refused")][:MAX_FAILURES]
    failures: list[dict[str, Any]] = [{"plan": label, "detail": o.detail} for label, _, o in failing]
    if failing:
        failures[-1]["groups"] = comparison.reduce_failure(failing[-1][1])
    return row | ({"failures": failures} if failures else {})


def common_refusal(groups: Groups) -> str:
    """Return the most common reason of a refusal, without the module; the target's own choices come last."""
    reasons = Counter(re.sub(coverage.LOCATION_SUFFIX, "", r.reason) for r in groups.refused)
    own = [r for r, _ in reasons.most_common() if r != OUTPUT_REASON and "target." not in r]
    ranked = own or [r for r, _ in reasons.most_common() if r != OUTPUT_REASON] or list(reasons)
    return f"{reasons[ranked[0]]}x {ranked[0]}" if ranked else ""
