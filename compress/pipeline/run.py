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
    check_asks_for_less,
    check_latency_reachable,
    choose_by_latency,
    choose_widths,
    dense_costs,
    remaining_fractions,
)
from compress.data import derive_seed, num_batches, resume_limits
from compress.distributed import broadcast_module_, broadcast_object, on_rank_zero, rank, world_size
from compress.errors import NotReady
from compress.graph import Groups, Index
from compress.modules import choices_of, choose_, set_eval_flags_, shared_copy
from compress.progress import ProgressDisplay
from compress.recipe import Budget, Quantity, Recipe
from compress.report import Report, describe_machine
from compress.search import CostHistory, describe_zero_weights, warn_about_zero_scores
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

from .calibration import repair_by_least_squares_
from .context import RunContext
from .elastic import ProcessCount, total_batches
from .exact_plan import choose_exact_plan
from .export import export_result, try_export
from .preflight import UserInputs, check_groups
from .report_updates import add_note, note_tight_limit, record_choice, record_costs
from .search_stage import SearchResult, finish_search, start_search, train_search
from .teacher import describe_teacher
from .workdir import IDENTITY_FILE, DataSizes, claim_workdir, identify_run, processes_of_run


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
        announces: bool = True,
    ) -> Iterator[Run]:
        """Check everything, claim the working directory and yield the run, resumed from its checkpoint if asked.

        Args:
            announces: whether to print what the run will do with its data.

        Raises:
            NotReady: something is missing or does not fit; the message lists all problems.
            FileExistsError: the working directory is in use, or belongs to another run.
            ValueError: a file in the working directory is damaged.
        """
        run_device = pick_device(device, model)  # joins the process group
        store = CheckpointStore(workdir) if workdir is not None else None
        is_quiet = quiet or rank() > 0
        with ExitStack() as lock, ProgressDisplay(is_quiet) as display, isolated_random_state(recipe.seed):
            identity = started_with = None
            if workdir is not None:
                on_rank_zero(lambda: _enter(lock, lock_directory(workdir)))
                identity = on_rank_zero(lambda: identify_run(workdir, model, recipe, inputs.teacher, resume))
                on_rank_zero(lambda: remove_temporary_files(workdir))
                started_with = on_rank_zero(lambda: processes_of_run(workdir))
            engine = Engine(run_device, recipe.seed, display, store, recipe.engine)
            processes = ProcessCount(started_with or world_size(), world_size(), engine.batches_per_step)
            engine.batches_per_step = processes.batches_per_step
            run = cls(model, recipe, engine, inputs, processes)
            if announces:
                run.announce()
            if workdir is not None and identity is not None:
                sizes = DataSizes(total_batches(run.data.train), num_batches(run.task.val), world_size())
                full_identity = identity.with_data(sizes, run.task)
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
        model = self.dense
        if self.recipe.target.operations:  # the mixture is never exported: try the first candidates
            model = choose_(shared_copy(model), {path: c.names[0] for path, c in choices_of(model).items() if path})
        on_rank_zero(lambda: try_export(model, self.recipe, self.task, self.example_inputs, self.engine.display))

    def find_groups(self, check_budget: bool = True) -> Groups:
        """Return the groups of the current network; in the first round, check that the budget can be met.

        Raises:
            NotReady: there is nothing to cut.
            BudgetError: the budget cannot be met.
        """
        recipe, engine = self.recipe, self.engine
        with engine.stage("groups"), engine.display.bar("finding the groups"):
            groups = find_groups(self.compact, self.example_inputs, recipe.target)
        check_groups(groups, recipe.target)
        if self.round_index == 0 and check_budget:
            self.check_budget(groups)
        return groups

    def check_budget(self, groups: Groups) -> None:
        """Check that the budget can be met, and measure the dense network as far as the budget refers to it.

        Raises:
            BudgetError: the budget cannot be met.
        """
        recipe, state, display = self.recipe, self.engine.run_state, self.engine.display
        measurement = LatencyMeasurement(self.example_inputs, recipe.timing)
        if state.dense_costs is None:
            costs = dense_costs(groups, recipe.budget)
            if isinstance(recipe.budget.latency, Quantity):
                with display.bar("timing the dense network"):
                    costs["latency"] = on_rank_zero(lambda: measurement.milliseconds(self.dense))
            state.dense_costs = costs
        check_asks_for_less(recipe.budget, state.dense_costs)
        if recipe.budget.computed_units:
            equal_importance = {group.name: np.ones(group.width) for group in groups}
            computed = recipe.budget.model_copy(update={"latency": None})
            choose_widths(groups, equal_importance, computed, recipe.target)
        if recipe.budget.is_measured and recipe.search.length is not None:
            limit = remaining_fractions(recipe.budget, state.dense_costs)["latency"]
            with display.bar("timing the narrowest network"):
                check_latency_reachable(self.compact, groups, recipe.target, measurement, limit)

    def evaluate_dense(self) -> None:
        """Evaluate the dense model, once per run."""
        if self.engine.run_state.dense_metrics is None:
            with self.engine.stage("evaluate"):
                metrics = self.engine.evaluate(self.task, self.dense, "evaluate dense")
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
        self.report = record_choice(self.report, groups, result.importance, keep, [*self.data_notes, *notes])
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
                        reference=self.reference,
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
                        limits=this_round.limits(groups),
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
                    limits=None if budget.auto else this_round.limits(groups),
                )
        return broadcast_object((keep, notes))

    def cut_(self, groups: Groups, plan: Plan, result: SearchResult) -> None:
        """Slice the network by the plan of this round, append it to the plan of the run, and save a checkpoint."""
        recipe, report = self.recipe, self.report
        assert report is not None
        with self.engine.stage("slice"):
            if recipe.compensate == "mean":
                changed = compensate_(self.compact, groups, plan, [self.example_inputs])
                add_note(report, f"the means of dropped dimensions were added to the biases of {len(changed)} layers")
            before_cut = shared_copy(self.compact) if recipe.compensate == "least_squares" else None
            slice_(self.compact, plan)
            set_memory_format_(self.compact, self.engine)
        if before_cut is not None:
            with self.engine.stage("repair"):
                repair_by_least_squares_(self, before_cut, plan, report)
        with self.engine.stage("slice"):
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
        """Train the compact network with the teacher, if the recipe has a `finetune` section."""
        config, engine = self.recipe.finetune, self.engine
        if config is None:
            return
        with engine.stage("finetune"):
            seed_all(derive_seed(self.recipe.seed, "finetune"))
            resume_point = self.resume_point if engine.run_state.stage == "finetune" else None
            self.resume_point = None
            if resume_point is not None and (position := resume_point.metadata.position) is not None:
                resume_point.metadata.position = self.processes.rescaled(position, self.data.finetune_steps)
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
            if self.test is not None:  # read here only, so that it chooses nothing
                report.dense.test = engine.evaluate(self.task, self.dense, "test dense", self.test)
                report.pruned.test = engine.evaluate(self.task, self.compact, "test", self.test)
        with engine.stage("timing"), engine.display.bar("timing dense and compact"):
            batch_size = record_costs(report, self.dense, self.compact, self.example_inputs, self.recipe.timing)
        note_tight_limit(report, self.recipe.budget, state.dense_costs or {})
        report.history, report.seconds = engine.history, engine.seconds
        report.scores = state.scores or []
        report.costs = [CostHistory.from_dict(costs) for costs in state.costs or []]
        report.origin, report.kept = state.origin or {}, state.kept_step or {}
        if self.teacher is not self.dense:
            add_note(report, describe_teacher(self.teacher))
        report.recipe = self.recipe.to_dict()
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
                self.dense, self.compact, self.recipe, self.task, self.example_inputs, self.plan, folder
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
        self.processes.check_task(self.task.has_own_fine_tuning and self.recipe.finetune is not None)
        if change := self.processes.message():
            display.message(change)


def _enter(stack: ExitStack, context: Any) -> None:
    stack.enter_context(context)
