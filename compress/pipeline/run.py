"""Run: the stages of a pruning run as methods; `compress.prune` calls them in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from compress.budget import (
    LatencyMeasurement,
    check_latency_reachable,
    choose_by_latency,
    choose_widths,
    compare_latency_in_batches,
)
from compress.data import derive_seed, num_batches, resume_limits
from compress.distributed import broadcast_module_, broadcast_object, on_rank_zero, rank, world_size
from compress.errors import NotReady
from compress.graph import Groups, Index
from compress.modules import set_eval_flags_
from compress.progress import ProgressDisplay
from compress.recipe import Budget, Recipe
from compress.report import Report, describe_machine
from compress.search import describe_zero_weights, warn_about_zero_scores
from compress.storage import (
    CheckpointStore,
    TrainingState,
    isolated_random_state,
    load_training_tensors_,
    lock_directory,
    remove_temporary_files,
    seed_all,
    tensors_under,
)
from compress.surgery import Plan, compensate_, find_groups, slice_
from compress.training import (
    CheckpointMetadata,
    Engine,
    FineTuneJob,
    ResumePoint,
    compiled_models,
    fine_tune,
    pick_device,
    set_memory_format_,
    synchronized_batch_norms,
    trackers_running,
)

from .context import RunContext
from .exact_plan import choose_exact_plan
from .export import export_result, try_export
from .preflight import UserInputs, check_groups
from .report_updates import add_note, record_choice
from .rounds import current_cost
from .search_stage import SearchResult, finish_search, start_search, train_search
from .workdir import IDENTITY_FILE, DataSizes, RunIdentity, check_workdir, claim_workdir


class Run(RunContext):
    """A pruning run: `start` it, then call the method of each stage.

    A run can be stopped between two stages and inside search and fine-tuning, and resumed from its last checkpoint.
    """

    @classmethod
    @contextmanager
    def start(
        cls,
        model: nn.Module,
        recipe: Recipe,
        inputs: UserInputs,
        *,
        device: str | torch.device | None,
        workdir: Path | None,
        resume: bool,
        quiet: bool,
    ) -> Iterator[Run]:
        """Check everything, claim the working directory and yield the run, resumed from its checkpoint if asked.

        Raises:
            NotReady: something is missing or does not fit; the message lists all problems.
            FileExistsError: the working directory is in use, or belongs to another run.
            ValueError: a file in the working directory is damaged.
        """
        run_device = pick_device(device, model)  # joins the process group
        store = CheckpointStore(workdir) if workdir is not None else None
        is_quiet = quiet or rank() > 0
        with ExitStack() as lock, ProgressDisplay(is_quiet) as display, isolated_random_state(recipe.seed):
            identity = None
            if workdir is not None:
                on_rank_zero(lambda: _enter(lock, lock_directory(workdir)))
                identity = on_rank_zero(lambda: _checked_identity(workdir, model, recipe, resume))
                on_rank_zero(lambda: remove_temporary_files(workdir))
            engine = Engine(run_device, recipe.seed, display, store, recipe.engine)
            run = cls(model, recipe, engine, inputs)
            if workdir is not None and identity is not None:
                sizes = DataSizes(num_batches(run.data.train), num_batches(run.task.val), world_size())
                full_identity = identity.with_data(sizes)
                engine.run_state.run_digest = on_rank_zero(lambda: claim_workdir(workdir, full_identity, resume))
                for limit in resume_limits(run.data.train, "train"):
                    display.message(limit)
            if resume and store is not None:
                run._resume(store)
            with trackers_running(engine, recipe, workdir), engine.explain_write_errors():
                yield run

    def try_export(self) -> None:
        """Translate the dense model to the recipe's export format, to find problems before the run.

        Raises:
            ExportError: the model cannot be exported as the recipe says.
        """
        on_rank_zero(lambda: try_export(self.teacher, self.recipe, self.task, self.example_inputs, self.engine.display))

    def find_groups(self) -> Groups:
        """Return the groups of the current network; in the first round, check that the budget can be met.

        Raises:
            NotReady: there is nothing to cut.
            BudgetError: the budget cannot be met.
        """
        recipe, engine = self.recipe, self.engine
        with engine.stage("groups"), engine.display.bar("finding the groups"):
            groups = find_groups(self.compact, self.example_inputs, recipe.target)
        check_groups(groups, recipe.target)
        if self.round_index == 0 and recipe.budget.is_computed:
            equal_importance = {group.name: np.ones(group.width) for group in groups}
            choose_widths(groups, equal_importance, recipe.budget, recipe.target)
        if self.round_index == 0 and recipe.budget.is_measured and recipe.search.length is not None:
            with engine.display.bar("timing the narrowest network"):
                measurement = LatencyMeasurement(self.example_inputs, recipe.timing)
                check_latency_reachable(self.compact, groups, recipe.budget, recipe.target, measurement)
        return groups

    def evaluate_dense(self) -> None:
        """Evaluate the dense model, once per run."""
        if self.engine.run_state.dense_metrics is None:
            with self.engine.stage("evaluate"):
                metrics = self.engine.evaluate(self.task, self.teacher, "evaluate dense")
                self.engine.run_state.dense_metrics = metrics

    def search(self, groups: Groups) -> SearchResult:
        """Attach scores, train, fold: the network has the weights of the search afterwards, and no gates.

        Raises:
            NotReady: there is nothing to cut.
            Diverged: the loss is not finite.
        """
        with self.engine.stage("search"):
            search = start_search(self, groups)
            if self.recipe.search.length is not None:
                train_search(self, search)
            return finish_search(self, search)

    def choose_plan(self, groups: Groups, result: SearchResult) -> Plan:
        """Return the plan of this round: the most important dimensions within the budget, verified to be cut exactly.

        Groups that cannot be cut to their chosen widths are refused, and the budget is met without them.

        Raises:
            BudgetError: the budget cannot be met.
        """
        recipe, notes = self.recipe, list(result.notes)

        def choose() -> Mapping[str, Index]:
            keep, latency_notes = self._choose_widths(groups, result)
            notes[len(result.notes) :] = latency_notes
            return keep

        plan, keep, refusals = choose_exact_plan(self.compact, groups, choose, result.kernels)
        notes += refusals
        if recipe.search.trains_scores:
            notes += warn_about_zero_scores(recipe, result.importance, keep)
        if self.report is None and recipe.budget.is_computed:
            self.engine.run_state.dense_cost = current_cost(recipe, groups)
        self.report = record_choice(self.report, groups, result.importance, keep, notes)
        return plan

    def _choose_widths(self, groups: Groups, result: SearchResult) -> tuple[Mapping[str, Index], list[str]]:
        """Return the dimensions of each group that this round keeps, and notes for the report.

        Raises:
            BudgetError: the budget cannot be met.
        """
        recipe, this_round, importance = self.recipe, self.current_round, result.importance
        ranking = recipe.search.ranking_for(groups, recipe.budget.unit)
        dense_widths = self.plan.widths or None
        notes: list[str] = []
        with self.engine.stage("choose"):
            if recipe.budget.is_measured and not recipe.search.meets_budget:
                with self.engine.display.bar("timing candidates") as bar:
                    measurement = LatencyMeasurement(
                        self.example_inputs,
                        recipe.timing,
                        reference=self.teacher,
                        on_progress=lambda text, done, total: bar.update(done, text, total),
                    )
                    keep, notes = choose_by_latency(
                        self.compact,
                        groups,
                        importance,
                        recipe.budget,
                        recipe.target,
                        measurement,
                        ranking=ranking,
                        dense_widths=dense_widths,
                        limit=this_round.remaining_fraction,
                    )
            else:
                # A search that meets a latency budget leaves the dimensions to drop at zero importance.
                budget = Budget(auto=True) if recipe.budget.is_measured else recipe.budget
                keep = choose_widths(
                    groups,
                    importance,
                    budget,
                    recipe.target,
                    ranking=ranking,
                    dense_widths=dense_widths,
                    limit=this_round.cost_limit(groups) if budget.is_computed else None,
                )
        return broadcast_object((keep, notes))

    def cut_(self, groups: Groups, plan: Plan, result: SearchResult) -> None:
        """Slice the network by the plan of this round, append it to the plan of the run, and save a checkpoint."""
        recipe, report = self.recipe, self.report
        assert report is not None
        with self.engine.stage("slice"):
            if recipe.compensate:
                changed = compensate_(self.compact, groups, plan, [self.example_inputs])
                add_note(report, f"the means of dropped dimensions were added to the biases of {len(changed)} layers")
            slice_(self.compact, plan)
            set_memory_format_(self.compact, self.engine)
            self.plan = self.plan.then(plan)
            self.round_index += 1
            if recipe.search.removes_structures:
                add_note(report, describe_zero_weights(self.compact))
            if result.kernels:  # the costs of widths do not include smaller kernels
                cost = find_groups(self.compact, self.example_inputs, recipe.target).cost
                report.pruned.macs = int(cost.macs(cost.widths))
        self.resume_point = None
        state = self.engine.run_state
        state.stage, state.round = "cut", self.round_index
        state.plan, state.report = self.plan.to_dict(), asdict(report)
        self.engine.save(TrainingState({"student": self.compact}))

    def evaluate_sliced(self) -> None:
        """Evaluate the compact network right after the last cut, once per run."""
        with self.engine.stage("evaluate"):
            if self.engine.run_state.sliced_metrics is None:
                metrics = self.engine.evaluate(self.task, self.compact, "evaluate sliced")
                self.engine.run_state.sliced_metrics = metrics

    def finetune(self) -> None:
        """Train the compact network with the dense model as teacher, if the recipe has a `finetune` section."""
        config, engine = self.recipe.finetune, self.engine
        if config is None:
            return
        with engine.stage("finetune"):
            seed_all(derive_seed(self.recipe.seed, "finetune"))
            resume_point = self.resume_point if engine.run_state.stage == "finetune" else None
            self.resume_point = None
            engine.run_state.stage = "finetune"
            networks, steps = (self.compact, self.teacher, self.plan), self.data.finetune_steps
            if self.task.has_own_fine_tuning:
                folder = engine.store.path.parent / "finetune" if engine.store is not None else None
                self.task.finetune(FineTuneJob(*networks, config, engine, steps, folder))
            else:
                batches = self.data.finetune_batches()
                with (
                    synchronized_batch_norms(self.compact, engine),
                    compiled_models(engine, self.compact, self.teacher),
                ):
                    fine_tune(FineTuneJob(*networks, config, engine, steps), self.task, batches, resume_point)
            broadcast_module_(self.compact)

    def measure(self) -> Report:
        """Evaluate and time the compact network against the dense one, and return the complete report."""
        report, engine, state = self.report, self.engine, self.engine.run_state
        assert report is not None
        with engine.stage("evaluate"):
            report.dense.metrics, report.sliced = state.dense_metrics or {}, state.sliced_metrics or {}
            is_tuned = self.recipe.finetune is not None
            report.pruned.metrics = engine.evaluate(self.task, self.compact) if is_tuned else dict(report.sliced)
        with engine.stage("timing"), engine.display.bar("timing dense and compact"):
            times, batch_size = compare_latency_in_batches(
                [self.teacher, self.compact], self.example_inputs, self.recipe.timing
            )
        for network, latency in zip((report.dense, report.pruned), times, strict=True):
            network.latency_ms, network.latency_spread_ms = latency.median, latency.spread
        # Counted again, because compensation adds biases.
        report.pruned.params = sum(p.numel() for p in self.compact.parameters())
        report.history, report.seconds = engine.history, engine.seconds
        report.scores = state.scores or []
        report.origin, report.kept = state.origin or {}, state.kept_step or {}
        report.recipe = self.recipe.model_dump(mode="json", exclude_none=True)
        report.machine = describe_machine(engine.device, batch_size)
        if engine.config.channels_last:
            self.compact.to(memory_format=torch.contiguous_format)
        set_eval_flags_(self.compact)
        return report

    def export(self, folder: Path) -> None:
        """Write the files of the recipe's export, and add their measurements to the report.

        Raises:
            ExportError: the network cannot be exported as the recipe says, or the file computes something else.
            OSError: a file cannot be written.
        """
        assert self.report is not None
        with self.engine.stage("export"), self.engine.display.bar("exporting, comparing and timing"):
            exported = export_result(
                self.teacher, self.compact, self.recipe, self.task, self.example_inputs, self.plan, folder
            )
        self.report.export, self.report.seconds = exported.to_dict(), self.engine.seconds

    def _resume(self, store: CheckpointStore) -> None:
        """Continue from the last checkpoint, if there is one.

        Raises:
            ValueError: the checkpoint is damaged, or of another run.
            NotReady: the training data cannot be read again.
        """
        checkpoint = on_rank_zero(store.load)
        display = self.engine.display
        if checkpoint is None:
            display.message(f"nothing to resume in {store.path.parent}: starting from the beginning")
            return
        tensors, values = checkpoint
        metadata = CheckpointMetadata.from_dict(values)
        state = metadata.run_state
        if state.run_digest != self.engine.run_state.run_digest:
            raise ValueError(
                f"{store.path}: belongs to another run than {IDENTITY_FILE} beside it; start again in another workdir"
            )
        if isinstance(self.data.train, Iterator):
            raise NotReady("train: a run on an iterator, which is read only once, cannot be resumed; restart")
        self.resume_point = ResumePoint(tensors, metadata)
        self.engine.restore_(metadata)
        if state.plan is not None and state.round is not None and state.report is not None:
            self.plan, self.round_index = Plan.from_dict(state.plan), state.round
            self.report = Report.from_dict(state.report)
            slice_(self.compact, self.plan)
        if student := tensors_under(tensors, "student/"):
            load_training_tensors_(self.compact, student)
        steps_done = metadata.position.done if metadata.position else 0
        display.message(f"resuming in stage {state.stage}, at step {steps_done}")


def _enter(stack: ExitStack, context: Any) -> None:
    stack.enter_context(context)


def _checked_identity(workdir: Path, model: nn.Module, recipe: Recipe, resume: bool) -> RunIdentity:
    identity = RunIdentity.of(model, recipe)
    check_workdir(workdir, identity, resume)
    return identity
