"""Verify that groups can be cut exactly: on the example inputs, the masked reference and the sliced model agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from compress.graph import BranchRemoval, Group, Groups
from compress.modules import CallInputs

from .branches import branch_removal, parameters_removed_with_branch, unread_groups
from .compare_outputs import (
    NoFiniteOutput,
    OutputDifference,
    Problem,
    RunFailure,
    compare_masked_and_sliced,
    model_runs,
    run_sliced,
)
from .plan import Plan


def verify_groups(model: nn.Module, groups: Groups, inputs: CallInputs | None = None) -> None:
    """Refuse every group that cannot be cut exactly.

    If all groups can be cut, this takes one pair of runs; otherwise bisection finds those that cannot. If the model's
    code stores a width in an attribute, the attribute is changed with the cut.

    Args:
        model: the dense model.
        groups: its groups, changed in place.
        inputs: inputs to verify on instead of those the model was traced on, if it runs on them.
    """
    candidates, traced_parts = [g for g in groups.offered if g.width > 1], groups.parts
    if inputs is not None:
        groups.parts = [p if p.name else replace(p, args=inputs[0], kwargs=inputs[1]) for p in traced_parts]
    if not candidates:
        return
    problem = _find_problem(model, groups, candidates, try_running_first=bool(groups.candidate_attributes))
    if problem is None:
        return
    if isinstance(problem, NoFiniteOutput):
        groups.refuse(candidates, problem.reason)
        return
    if inputs is not None and not model_runs(model, groups.parts):
        groups.parts = traced_parts
        if _find_problem(model, groups, candidates) is None:
            return
    known, extended = groups.attributes, groups.attributes + groups.candidate_attributes
    groups.attributes = extended
    failures = _find_failing_groups(model, groups, candidates)
    if failures and groups.candidate_attributes:  # a group may be exact only if the attributes stay as they are
        groups.attributes = known
        failures_without = _find_failing_groups(model, groups, candidates)
        if len(failures_without) < len(failures):
            failures = failures_without
        else:
            groups.attributes = extended
    for name, reason in failures.items():
        groups.refuse([g for g in groups.offered if g.name == name], reason)


def verify_branches(model: nn.Module, groups: Groups) -> None:
    """Find the groups that can be dropped entirely together with their residual branch."""
    for group in groups:
        removals = branch_removal(model, group, groups.pair_modules)
        if removals is None:
            continue
        unread = unread_groups(model, groups, removals)
        unread.pop(group.name, None)
        for removals_of_unread in unread.values():
            removals |= removals_of_unread
        groups.branches[group.name] = BranchRemoval(removals, tuple(unread))
    candidates = [groups[name] for name in groups.branches]
    failures = _find_failing_groups(model, groups, candidates, drop_all=True)
    groups.branches = {name: branch for name, branch in groups.branches.items() if name not in failures}
    branch_params = [parameters_removed_with_branch(model, groups, name) for name in groups.cost.names]
    groups.cost = replace(groups.cost, branch_params=np.array(branch_params, dtype=np.int64))


def _find_failing_groups(
    model: nn.Module, groups: Groups, candidates: Sequence[Group], drop_all: bool = False
) -> dict[str, str]:
    """Return the candidates that cannot be cut (with `drop_all`: not be dropped entirely), with the reason."""
    problem = _find_problem(model, groups, candidates, drop_all=drop_all) if candidates else None
    if problem is None:
        return {}
    if len(candidates) == 1:
        return {candidates[0].name: f"{problem.reason}{_compact_form_advice(model, candidates[0], problem)}"}
    half = len(candidates) // 2
    first, second = list(candidates[:half]), list(candidates[half:])
    if isinstance(problem, RunFailure) and problem.module:  # suspect the groups inside the failing module first
        inside = [g for g in candidates if any(s.tensor.startswith(f"{problem.module}.") for s in g.slots)]
        if inside and len(inside) < len(candidates):
            first, second = inside, [g for g in candidates if g not in inside]
    failures = _find_failing_groups(model, groups, first, drop_all)
    failures |= _find_failing_groups(model, groups, second, drop_all)
    return failures or {g.name: f"only together with others: {problem.reason}" for g in candidates}


def _compact_form_advice(model: nn.Module, group: Group, problem: Problem) -> str:
    """Return advice for attention whose code runs at one width only; empty for other problems."""
    if not group.gated_on_output or not isinstance(problem, RunFailure) or not problem.module:
        return ""
    kind = type(model.get_submodule(problem.module)).__name__
    return f". Write a compact form of {kind} to cut it: see compress/modules/compact_forms.py"


def _find_problem(
    model: nn.Module,
    groups: Groups,
    candidates: Sequence[Group],
    drop_all: bool = False,
    try_running_first: bool = False,
) -> Problem | None:
    """Cut most of each candidate and compare the masked reference with the sliced model; return None if they agree.

    Args:
        model: the dense model.
        groups: all groups.
        candidates: the groups to cut.
        drop_all: drop the candidates entirely, with their branches.
        try_running_first: run the sliced model before anything else, because it is likely to fail.
    """
    random = np.random.default_rng(0)
    keep = {g.name: g.indices_per_head(_verified_width(g.width // g.num_heads), random) for g in candidates}
    names = {g.name for g in candidates}
    if drop_all:
        keep = {name: np.zeros(0, dtype=np.int64) for name in names}
        names |= {other for name in names for other in groups.branches[name].unread_groups}
    removed_branches = {name: branch for name, branch in groups.branches.items() if name in keep}
    chosen = replace(groups, offered=[g for g in groups.offered if g.name in names], branches=removed_branches)
    chosen.cost = groups.cost.without({g.name for g in groups.offered} - names)
    plan = Plan.build(model, chosen, keep)
    # In single precision rounding can look like a difference, so a difference is confirmed in double precision. An
    # error in the scale of attention may be invisible in single precision, where queries and keys are small as in an
    # untrained model, so attention is compared in double precision first.
    has_attention = any(g.gated_on_output for g in candidates)
    if try_running_first and has_attention:
        outputs = run_sliced(model, groups, plan, None)
        if isinstance(outputs, RunFailure):
            return outputs
    retry_on = RunFailure if has_attention else OutputDifference  # some models do not run in double precision
    problem: Problem | None = None
    for dtype in (torch.float64, None) if has_attention else (None, torch.float64):
        problem = compare_masked_and_sliced(model, groups, plan, dtype)
        if not isinstance(problem, retry_on):
            break
    return problem


def _verified_width(width: int) -> int:
    """Return how many of `width` dimensions to keep: with one, broadcasting may hide errors; many cost time."""
    return max(width // 8, min(width // 4, 4), 1)
