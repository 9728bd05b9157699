"""Verify that cuts are exact: on the example inputs, the masked reference and the sliced model agree.

Groups are verified together, each at random widths of its own. If the networks differ, one more forward pass finds the
modules whose code is at fault (failing_modules.py), and the groups at fault are refused. Plans are verified likewise.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from compress.errors import PlanError
from compress.graph import BranchRemoval, Group, Groups, Index, TracedPart
from compress.modules import CallInputs, shared_copy

from .branches import branch_removal, parameters_removed_with_branch, unread_groups
from .compare_outputs import (
    ROUNDING_NOTE,
    NoFiniteOutput,
    OutputDifference,
    Problem,
    RunFailure,
    compare_masked_and_sliced,
    depends_on_rounding,
    model_runs,
    parts_to_run,
    run_failure,
    run_part,
)
from .failing_modules import FailingCall, FailureLocation, find_failing_calls, groups_at_fault, layer_pattern
from .perturbation import perturb_
from .plan import Plan
from .slicing import slice_

MAX_CUTS = 3  # cuts that are tried; if the last one fails too, all remaining groups are refused
MAX_PASSES = 10  # forward passes of the whole model in find_groups; groups that would need more are refused


def verify_groups(model: nn.Module, groups: Groups, inputs: CallInputs | None = None, reserved_passes: int = 0) -> None:
    """Refuse every group that cannot be cut exactly.

    All groups are cut at once, twice, at random widths that differ from group to group and from cut to cut. If the
    model's code stores a width in an attribute, the attribute is changed with the cut.

    Args:
        model: the dense model.
        groups: its groups, changed in place.
        inputs: inputs to verify on instead of those the model was traced on, if it runs on them.
        reserved_passes: forward passes to leave for `verify_branches`.
    """
    Verifier(model, groups, inputs).refuse_failing_groups(reserved_passes)


def verify_plan(model: nn.Module, groups: Groups, plan: Plan) -> dict[str, str]:
    """Return the groups that this plan cannot cut exactly, with the reason; none if the plan is exact.

    Raises:
        PlanError: the plan is not exact, and it cuts no group.
    """
    if not plan.slices and not plan.removed_modules:
        return {}
    verifier = Verifier(model, groups)
    problem = verifier.find_problem(plan)
    if problem is None:
        verifier.use_own_weights()
        problem = verifier.find_problem(plan)
    if problem is None or isinstance(problem, NoFiniteOutput):
        problem = verifier.find_problem_of_untraced_model(plan)
    if problem is None:
        return {}
    keep = {name: np.asarray(kept) for name, kept in plan.keep.items() if len(kept) < plan.widths[name]}
    failures = verifier.find_failures(plan, keep, problem) or dict.fromkeys(keep, problem.reason)
    if not failures:
        raise PlanError(f"the plan is not exact: {problem.reason}")
    return failures


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
    verifier = Verifier(model, groups)
    failing = verifier.failing_branches([groups[name] for name in groups.branches])
    groups.branches = {name: branch for name, branch in groups.branches.items() if name not in failing}
    branch_params = [parameters_removed_with_branch(model, groups, name) for name in groups.cost.names]
    groups.cost = replace(groups.cost, branch_params=np.array(branch_params, dtype=np.int64))


class Verifier:
    """Compare cuts of one model with its masked reference, on a perturbed copy, in double precision if it runs so."""

    def __init__(self, model: nn.Module, groups: Groups, inputs: CallInputs | None = None) -> None:
        self.groups, self.dense = groups, model
        self.model = perturb_(shared_copy(model))
        self.dtype: torch.dtype | None = torch.float64
        self.conditions_checked = False  # whether the uncut model runs in this precision, on these inputs
        self.location: FailureLocation | None = None  # of the last problem, if it was looked for
        self.traced_parts: list[TracedPart] | None = None  # to return to, if the model does not run on `inputs`
        if inputs is not None:
            self.traced_parts = groups.parts
            groups.parts = [p if p.name else replace(p, args=inputs[0], kwargs=inputs[1]) for p in groups.parts]

    def use_own_weights(self) -> None:
        """Verify with the weights of the model as they are, because its code may depend on their values."""
        self.model = shared_copy(self.dense)

    def find_problem(self, plan: Plan, modes: Collection[bool] = (False, True)) -> Problem | None:
        """Return how the sliced model differs from the masked reference, or None if they agree.

        Args:
            plan: the cut.
            modes: which traced parts to run: those in eval mode (False), in training mode (True), or both.
        """
        problem = self._compare(plan, modes)
        if isinstance(problem, RunFailure) and problem.part is not None and not self.conditions_checked:
            self.conditions_checked = True
            if not problem.is_of_reference:
                self.location = find_failing_calls(self.model, self.groups, plan, self.dtype, [problem.part])
                if self.location.reference_runs:
                    return problem
            if self._relax_conditions(problem.part.training):
                problem = self._compare(plan, modes)
        return problem

    def _compare(self, plan: Plan, modes: Collection[bool]) -> Problem | None:
        self.location = None
        parts = [part for part in parts_to_run(self.groups, plan) if part.training in modes]
        return compare_masked_and_sliced(self.model, self.groups, plan, self.dtype, parts)

    def find_problem_of_untraced_model(self, plan: Plan) -> Problem | None:
        """Run the whole model if only its children were traced: the code around them may look inside.

        Where the model runs in double precision, outputs are compared. In less, rounding may reorder detections, so it
        only has to run. So it is if even in double precision outputs depend on rounding.
        """
        whole = self.groups.untraced_model
        if whole is None:
            return None
        self.use_own_weights()
        if self._runs([whole], torch.float64):
            problem = compare_masked_and_sliced(self.model, self.groups, plan, torch.float64, [whole])
            if not isinstance(problem, OutputDifference) or not depends_on_rounding(
                self.model, self.groups, plan, whole
            ):
                return problem
            if ROUNDING_NOTE not in self.groups.notes:
                self.groups.notes.append(ROUNDING_NOTE)
        sliced = slice_(shared_copy(self.model), plan)
        try:
            self.groups.num_passes += 1
            run_part(sliced, whole, None)
        except Exception as error:  # from the model's own code
            return run_failure(error, sliced) if self._runs([whole], None) else None
        return None

    def _runs(self, parts: Sequence[TracedPart], dtype: torch.dtype | None) -> bool:
        """Return whether the uncut model runs on the inputs of these parts in this precision."""
        self.groups.num_passes += sum(not part.name for part in parts)
        return model_runs(self.model, parts, dtype)

    def _relax_conditions(self, training: bool) -> bool:
        """Find inputs and a precision in which the uncut model runs in this mode; return whether they changed.

        Some models do not run in double precision, and some only on as many examples as they were traced on.
        """

        def in_this_mode(parts: Sequence[TracedPart]) -> list[TracedPart]:
            return [part for part in parts if part.training == training]

        if self._runs(in_this_mode(self.groups.parts), self.dtype):
            return False
        conditions: list[tuple[list[TracedPart], torch.dtype | None]] = [(self.groups.parts, None)]
        if self.traced_parts is not None:
            conditions += [(self.traced_parts, self.dtype), (self.traced_parts, None)]
        for self.groups.parts, self.dtype in conditions:
            if self._runs(in_this_mode(self.groups.parts), self.dtype):
                break
        return True

    def _can_compare(self, modes: Collection[bool], before: int = 0) -> bool:
        """Return whether MAX_PASSES allow a comparison in these modes, with some more passes before it."""
        num_parts = sum(not part.name and part.training in modes for part in self.groups.parts)
        return self.groups.num_passes + before + 2 * num_parts <= MAX_PASSES

    def refuse_failing_groups(self, reserved_passes: int) -> None:
        """Cut all groups to random widths and refuse those at fault, until the rest agrees.

        If nothing fails, two cuts are verified: the first with weights at the usual scale, the second at their own
        scale and with the other parity of widths. If the first cut fails, the groups at fault are refused. If the
        second fails, the groups of the same layers in other blocks are refused too, because an error may not show in
        every block. If the third fails, or MAX_PASSES do not allow it, all remaining groups are refused. Where training
        mode was traced, too, it is verified once: of each mode, the groups that remain agreed with the reference, alone
        or together with others.
        """
        groups, reason = self.groups, ""
        training_verified, modes = False, [False, True]
        for seed in range(MAX_CUTS):
            candidates = [g for g in groups.offered if g.width > g.num_heads]
            if not candidates:
                return
            keep = random_widths(candidates, seed)
            plan = Plan.build(self.model, groups, keep)
            problem = self.find_problem(plan, modes)
            if problem is None and seed == 0:
                training_verified, modes = True, [False]
                if not self._can_compare(modes, before=reserved_passes):
                    return  # the plan that is applied is verified with the model's own weights, too
                self.use_own_weights()
                continue
            if problem is None or (seed > 0 and isinstance(problem, NoFiniteOutput)):  # the model's own weights fail
                problem = self.find_problem_of_untraced_model(plan)
                if problem is None:
                    return
                groups.refuse(candidates, problem.reason)
                return
            reason = problem.reason
            in_training = problem.part is not None and problem.part.training
            modes = [True] if in_training else [False] if training_verified else [False, True]
            is_located = self.location is not None
            if seed == MAX_CUTS - 1 or not self._can_compare(modes, before=0 if is_located else 1):
                break
            failures = self.find_failures(plan, keep, problem, run_whole_model=False)
            if not failures or not self._can_compare(modes):
                break
            if seed > 0:
                failures |= _same_layer_pattern(candidates, failures)
            for name, failure in failures.items():
                groups.refuse([g for g in groups.offered if g.name == name], failure)
        groups.refuse([g for g in groups.offered if g.width > g.num_heads], reason)

    def find_failures(
        self, plan: Plan, keep: Mapping[str, Index], problem: Problem, run_whole_model: bool = True
    ) -> dict[str, str]:
        """Return the groups at fault for a problem of this plan, with the reason; none if they are not found."""
        failing = self._failing_calls(plan, problem)
        return groups_at_fault(self.model, self.groups, keep, failing, self.dtype, run_whole_model) if failing else {}

    def _failing_calls(self, plan: Plan, problem: Problem) -> list[FailingCall]:
        """Return the calls of modules at fault for a problem of this plan."""
        if isinstance(problem, NoFiniteOutput) or self.groups.activations is None:
            return []
        if self.location is None:
            parts = None if problem.part is None else [problem.part]
            self.location = find_failing_calls(self.model, self.groups, plan, self.dtype, parts)
        return self.location.calls

    def failing_branches(self, candidates: Sequence[Group]) -> set[str]:
        """Return the groups that cannot be dropped entirely, with all other groups cut to random widths.

        All branches are removed at once. If that fails, the branches in the modules at fault are given up, and the rest
        is tried again; if that fails too, all are given up.
        """
        others = [g for g in self.groups.offered if g.width > g.num_heads and g not in candidates]
        failing: set[str] = set()
        for _ in range(2):
            tried = [group for group in candidates if group.name not in failing]
            modes = [False, True] if self._can_compare([False, True]) else [False]
            if not tried or not self._can_compare(modes):
                break
            emptied = {group.name: np.zeros(0, dtype=np.int64) for group in tried}
            plan = Plan.build(self.model, self.groups, random_widths(others, seed=0) | emptied)
            problem = self.find_problem(plan, modes)
            if problem is None:
                return failing
            failing |= self._branches_at_fault(plan, problem, tried)
        return {group.name for group in candidates}

    def _branches_at_fault(self, plan: Plan, problem: Problem, tried: Sequence[Group]) -> set[str]:
        """Return the branches in the modules that fail without them; all branches if these are not found."""
        modules = [call.module for call in self._failing_calls(plan, problem)]
        at_fault = {
            group.name
            for group in tried
            for module in modules
            if any(f"{path}.".startswith(f"{module}.") for path in self.groups.branches[group.name].modules)
        }
        patterns = {layer_pattern(group) for group in tried if group.name in at_fault}
        return {g.name for g in tried if not patterns or layer_pattern(g) in patterns}


def _same_layer_pattern(candidates: Sequence[Group], failures: Mapping[str, str]) -> dict[str, str]:
    """Return the candidates in the same layers of other blocks as a group at fault, with its reason."""
    patterns = {group.name: layer_pattern(group) for group in candidates}
    reasons = {pattern: failures[name] for name, pattern in patterns.items() if name in failures}
    return {name: reasons[p] for name, p in patterns.items() if p in reasons and name not in failures}


def random_widths(groups: Sequence[Group], seed: int) -> dict[str, Index]:
    """Return random dimensions to keep of every group.

    Groups keep different numbers of dimensions, a quarter of the width at most (narrow groups up to four), so that the
    sliced model runs fast. Seeds 2 n and 2 n + 1 give widths that differ by one, so that every group is verified at an
    even and at an odd width: code may depend on the parity.
    """
    random = np.random.default_rng(seed // 2)
    numbers = np.random.default_rng(seed)
    keep = {}
    for group in groups:
        width = group.width // group.num_heads
        least, most = min(max(2, width // 16), width - 1), max(width // 4, min(width - 1, 4))
        count = int(random.integers(least, most + 1))
        count += (seed % 2) * (1 if count < most else -1)
        keep[group.name] = group.indices_per_head(max(1, count), numbers)
    return keep
