"""Choose widths and verify the very plan that is applied; groups at fault are refused and the widths chosen again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from torch import nn

from compress.budget import CandidateDoesNotRun
from compress.distributed import on_rank_zero
from compress.graph import Groups, Index
from compress.surgery import Plan, verify_plan


class ExactPlan(NamedTuple):
    """A plan that was verified, the kept dimensions that it was built from, and notes about refused groups."""

    plan: Plan
    keep: Mapping[str, Index]
    notes: list[str]


def choose_exact_plan(
    model: nn.Module,
    groups: Groups,
    choose: Callable[[], Mapping[str, Index]],
    kernels: Mapping[str, dict[int, tuple[int, int]]] | None = None,
) -> ExactPlan:
    """Return the plan of the widths that `choose` returns, verified on the example inputs at these widths.

    If the sliced network does not run at these widths or computes something else, the groups at fault are refused with
    a note, and `choose` is called again, to meet the budget without them.

    Args:
        model: the network to cut.
        groups: its groups, changed in place.
        choose: return the dimensions to keep of the groups that are offered.
        kernels: convolution kernels that become smaller.

    Raises:
        BudgetError: the budget cannot be met without the refused groups.
        DoesNotRun: a network cannot be timed, though its cut is exact on the example inputs.
        PlanError: the plan is not exact, and no group is at fault.
    """
    notes: list[str] = []
    while True:
        try:
            keep = choose()
            plan = Plan.build(model, groups, keep, kernels)
            failures = on_rank_zero(partial(verify_plan, model, groups, plan))
            if not failures:
                return ExactPlan(plan, keep, notes)
        except CandidateDoesNotRun as error:  # a network that was timed on the way
            failures = on_rank_zero(partial(verify_plan, model, groups, error.plan))
            if not failures:
                raise
        for name, reason in failures.items():
            groups.withdraw(name, reason)
            notes.append(f"{name} stays whole: at the chosen widths {reason}")
