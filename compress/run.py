"""Run: a pruning under way. Each stage is a method; between any two of them, and inside the long ones, it can stop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .budget import choose
from .checkpoint import State, Store, below, own_randomness, put_, seed_all
from .compensate import compensate_
from .deploy import deploy
from .discover import find_groups
from .display import Display
from .engine import Engine, pick_device
from .files import EXPORTED
from .finetune import Work, finetune
from .gates import fold_
from .groups import Groups
from .line import Line
from .loading import derived, length_of, steps_of
from .lock import locked
from .plan import Plan
from .preflight import NotReady, Ready, check_groups, make_ready
from .processes import agree_, agreed, first, rank, world
from .recipe import Budget, Recipe
from .remarks import gone_to_zero, zeros
from .report import Report, machine, origin
from .search import Job, Search, search_class
from .share import accumulated, shared
from .shell import shell, still_, teacher_of
from .slicing import slice_
from .split import halves
from .states import compiled, lay_out_, synchronised
from .timing import check_reach, choose_by_latency, compare_batches
from .tracking import tracking
from .watch import watched
from .workdir import IDENTITY, check_workdir, own_workdir


class Run:
    """The dense model as teacher, the network that is being cut, and what was found out on the way."""

    def __init__(self, model: nn.Module, recipe: Recipe, engine: Engine, **given: Any) -> None:
        self.model, self.recipe, self.engine = model, recipe, engine
        self.teacher = teacher_of(model, engine.device, engine.config.channels_last)
        self.ready: Ready = make_ready(self.teacher, recipe, engine, **given)
        self.task, self.train = self.ready.task, self.ready.train
        if not recipe.target.include and (include := getattr(self.task, "include", ())):
            self.recipe = recipe.model_copy(update={"target": recipe.target.model_copy(update={"include": include})})
        self.compact = copy.deepcopy(model).to(engine.device)
        lay_out_(self.compact, engine)
        agree_(self.compact)
        engine.facts["origin"] = agreed(origin(model, recipe.seed))
        self.plan, self.round = Plan({}, {}), 0
        self.report: Report | None = None
        self._resumed: tuple[dict[str, Tensor], dict[str, Any]] | None = None
        self._lengths = self._count()
        self._told: list[str] = []  # by the search
        self._kernels: dict[str, dict[int, tuple[int, int]]] = {}  # that can be smaller

    @classmethod
    @contextmanager
    def start(
        cls,
        model: nn.Module,
        recipe: Recipe,
        device: Any,
        workdir: Path | None,
        resume: bool,
        quiet: bool,
        **given: Any,
    ) -> Iterator[Run]:
        """A run that may begin: every check is made before anything is spent.

        Raises:
            NotReady: all that is missing or does not fit.
            FileExistsError: the working directory is in use, or belongs to another run.
        """
        place = pick_device(device, model)  # where several processes meet
        store = Store(workdir) if workdir is not None else None
        with ExitStack() as alone, Display(quiet or rank() > 0) as display, own_randomness(recipe.seed):
            known: dict[str, Any] | None = None
            if workdir is not None:
                first(lambda: (alone.enter_context(locked(workdir)), None)[1])
                known = first(lambda: check_workdir(workdir, model, recipe, resume))
            engine = Engine(place, recipe.seed, display, store, recipe.engine)
            run = cls(model, recipe, engine, **given)
            if workdir is not None and known is not None:
                known["data"] = {"train": length_of(run.train), "val": length_of(run.task.val), "processes": world()}
                engine.facts["run"] = first(lambda: own_workdir(workdir, model, recipe, resume, known))
            if resume and store is not None and (found := first(store.load)) is not None:
                if found[1].get("run") != engine.facts["run"]:
                    raise ValueError(f"{store.path}: of another run than {IDENTITY} beside it; start anew elsewhere")
                if isinstance(run.train, Iterator):
                    raise NotReady("train: a run on an iterator, which is read only once, cannot be resumed; restart")
                run._go_on(*found)
            elif resume:
                display.say(f"nothing to resume in {workdir}: starting anew")
            with tracking(engine, recipe, workdir), engine.writing():
                yield run

    def evaluate_dense(self) -> None:
        """Measure the dense model, once."""
        if "dense" not in self.engine.facts:
            with self.engine.stage("evaluate"):
                self.engine.facts["dense"] = self.engine.evaluate(self.task, self.teacher, "evaluate dense")

    def find(self) -> Groups:
        """The groups of the network as it is now."""
        with self.engine.stage("groups"), self.engine.display.bar("finding the groups"):
            groups = find_groups(self.compact, self.ready.example_inputs, self.recipe.target)
        check_groups(groups, self.recipe.target)
        if self.round == 0 and self.recipe.budget.unit not in ("latency", "auto"):
            equal = {g.name: np.ones(g.width) for g in groups}  # out of reach now is out of reach after an hour
            choose(groups, equal, self.recipe.budget, self.recipe.target)
        if self.round == 0 and self.recipe.budget.unit == "latency" and self.recipe.search.length is not None:
            with self.engine.display.bar("timing the narrowest network"):
                here = (self.recipe.budget, self.recipe.target, self.recipe.timing, self.ready.example_inputs)
                check_reach(self.compact, groups, *here)
        return groups

    def begin_search(self, groups: Groups, steps: int | None = None) -> Search:
        """The recipe's search, attached to the network."""
        if self.recipe.search.length is not None and not len(groups):
            reasons = "; ".join([*sorted({r.reason for r in groups.refused})[:4], *groups.notes[-3:]])
            raise NotReady(f"target: there is nothing to cut; {len(groups.refused)} groups were refused: {reasons}")
        seed_all(derived(self.recipe.seed, "search", self.round))
        method = search_class(self.recipe.search.method)
        total = steps if steps is not None else self._share(self._lengths.get("search", 0))
        job = Job(
            self.compact, groups, self.task, total, self.recipe.seed, teacher=self.teacher, compute=self.engine.compute
        )
        job.epoch = length_of(self._data("search")) if self.train is not None else None
        if len(groups):
            here = (shell(self.compact), self.teacher, self.ready.example_inputs)
            line = Line(self.recipe, groups, *here, self.plan.widths or None, self.round, self.engine.display)
            if self.recipe.budget.unit not in ("latency", "auto"):
                line.limit = self._limit(groups, self._left)
            job.line, job.times = None if self.recipe.budget.auto else line, line.times
        return method(self.recipe.search, job)

    def search(self, groups: Groups) -> dict[str, Tensor]:
        """The importance of every dimension; the network has its searched weights afterwards, and no gates."""
        with self.engine.stage("search"):
            search = self.begin_search(groups)
            if self.recipe.search.length is not None:
                if search.trains:
                    self.compact.train()
                state = State({"model": self.compact}, search.optimizers, search.state)
                at = self._restore(state, "search")
                search.done = at["done"] if at else 0
                name = "search" if self.recipe.steps == 1 else f"search {self.round + 1}"
                self.engine.facts |= {"stage": "search"}
                with synchronised(self.compact, self.engine):
                    step = watched(search, name, self.engine.facts.setdefault("scores", []))
                    self.engine.train(name, self._data("search"), search.job.steps, step, state, at=at)
            return self.end_search(search)

    def end_search(self, search: Search) -> dict[str, Tensor]:
        importance = agreed({name: value.detach().double().cpu() for name, value in search.importance().items()})
        self._told, self._kernels = agreed((search.notes(), search.kernels()))
        fold_(self.compact)
        agree_(self.compact)
        self.compact.eval()
        for p in self.compact.parameters():
            p.grad = None
        return importance

    def choose(self, groups: Groups, importance: dict[str, Tensor]) -> dict[str, Any]:
        """What is kept after this round."""
        recipe = self.recipe
        notes, left = self._told, self._left
        last = self.round + 1 == recipe.steps
        target = recipe.target if last else recipe.target.model_copy(update={"round_to": 1})  # rounded once, at the end
        ranking = recipe.search.ranks_by(groups, recipe.budget.unit)
        common: dict[str, Any] = {"ranking": ranking, "dense": self.plan.widths or None}
        with self.engine.stage("choose"):
            if recipe.budget.unit == "latency" and recipe.search.settles:
                keep = choose(groups, importance, Budget(auto=True), target, **common)
            elif recipe.budget.unit == "latency":
                with self.engine.display.bar("timing candidates") as bar:
                    keep, timed = choose_by_latency(
                        self.compact,
                        groups,
                        importance,
                        recipe.budget,
                        target,
                        recipe.timing,
                        self.ready.example_inputs,
                        reference=self.teacher,
                        left=left,
                        tell=lambda text, done, total: bar.to(done, text, total),
                        **common,
                    )
                    notes = [*notes, *timed]
            else:
                limit = self._limit(groups, left)
                keep = choose(groups, importance, recipe.budget, target, limit=limit, **common)
        keep, notes = agreed((keep, notes))
        if hasattr(recipe.search, "gamma"):
            notes = [*notes, *gone_to_zero(recipe, importance, keep)]
        self._write_down(groups, importance, keep, notes)
        return keep

    def cut(self, groups: Groups, keep: dict[str, Any]) -> None:
        """Slice the network and compose the plans."""
        with self.engine.stage("slice"):
            plan = Plan.build(self.compact, groups, keep, self._kernels)
            if self.recipe.compensate:
                done = compensate_(self.compact, groups, plan, [self.ready.example_inputs])
                self._note(f"the means of dropped dimensions went into the biases of {len(done)} layers")
            slice_(self.compact, plan)
            lay_out_(self.compact, self.engine)
            self.plan = self.plan.then(plan)
            self.round += 1
            if hasattr(self.recipe.search, "structure"):
                self._note(zeros(self.compact))
            if self._kernels and self.report is not None:  # which the costs of widths know nothing about
                cost = find_groups(self.compact, self.ready.example_inputs, self.recipe.target).cost
                self.report.pruned.macs = int(cost.macs(cost.widths))
        self._resumed = None
        self.checkpoint()

    def checkpoint(self) -> None:
        """Remember the network as it was cut."""
        assert self.report is not None
        facts = {"stage": "cut", "round": self.round, "plan": self.plan.to_dict(), "report": asdict(self.report)}
        self.engine.facts |= facts
        self.engine.save(State({"student": self.compact}), {})

    def finetune(self) -> None:
        """Train the compact network with the dense one as its teacher, if the recipe says so."""
        with self.engine.stage("evaluate"):
            if "sliced" not in self.engine.facts:
                self.engine.facts["sliced"] = self.engine.evaluate(self.task, self.compact, "evaluate sliced")
        if self.recipe.finetune is None:
            return
        with self.engine.stage("finetune"):
            seed_all(derived(self.recipe.seed, "finetune"))
            at = self._resumed if self.engine.facts.get("stage") == "finetune" else None
            self._resumed = None
            self.engine.facts |= {"stage": "finetune"}
            assert self.train is not None
            config, total = self.recipe.finetune, self.length("finetune")
            own: Callable[[Work], None] | None = getattr(self.task, "finetune", None)
            if own is not None:
                folder = self.engine.store.path.parent / "finetune" if self.engine.store is not None else None
                own(Work(self.compact, self.teacher, self.plan, config, self.engine, total, folder))
            else:
                work = (self.compact, self.teacher, self.plan, self.task, self._data("finetune"))
                with synchronised(self.compact, self.engine), compiled(self.engine, self.compact, self.teacher):
                    finetune(*work, config, self.engine, total, at)
            agree_(self.compact)

    def measure(self) -> Report:
        """Accuracy and latency, dense against compact; the report is complete."""
        report, engine, timing = self.report, self.engine, self.recipe.timing
        assert report is not None
        with engine.stage("evaluate"):
            report.dense.metrics, report.sliced = (engine.facts.get(name, {}) for name in ("dense", "sliced"))
            tuned = self.recipe.finetune is not None
            report.pruned.metrics = engine.evaluate(self.task, self.compact) if tuned else dict(report.sliced)
        with engine.stage("timing"), engine.display.bar("timing dense and compact"):
            times, size = compare_batches([self.teacher, self.compact], self.ready.example_inputs, timing)
        for side, time in zip((report.dense, report.pruned), times, strict=True):
            side.latency_ms, side.latency_spread_ms = time.median, time.spread
        report.pruned.params = sum(p.numel() for p in self.compact.parameters())  # with biases that compensation made
        report.history, report.seconds = engine.history, engine.seconds
        report.scores = engine.facts.get("scores", [])
        report.origin, report.kept = (engine.facts.get(name, {}) for name in ("origin", "kept"))
        report.recipe = self.recipe.model_dump(mode="json", exclude_none=True)
        report.machine = machine(engine.device, size)
        if engine.config.channels_last:
            self.compact.to(memory_format=torch.contiguous_format)
        still_(self.compact)
        return report

    def export(self, folder: Path) -> None:
        """Write the checked files that the recipe asks for; the report has what was measured."""
        recipe, report = self.recipe, self.report
        assert report is not None and recipe.export is not None
        with self.engine.stage("export"), self.engine.display.bar("exporting, comparing and timing"):
            made = deploy(
                (self.teacher, self.compact),
                recipe.export,
                self.task,
                self.ready.example_inputs,
                folder / EXPORTED[0],
                folder / EXPORTED[1] if recipe.export.int8 else None,
                plan=self.plan,
                recipe=report.recipe,
                timing=recipe.timing,
            )
        report.export, report.seconds = made.to_dict(), self.engine.seconds

    def length(self, name: str) -> int:
        """The steps of a training."""
        length = self.recipe.search.length if name == "search" else getattr(self.recipe.finetune, "epochs", None)
        assert length is not None
        return self._lengths.get(name) or length.steps(None)

    def _count(self) -> dict[str, int]:
        """The lengths of the trainings, in steps."""
        search, tune, display = self.recipe.search.length, self.recipe.finetune, self.engine.display
        found = {}
        if search is not None and self.train is not None:
            found["search"] = steps_of(self._data("search"), search, "search.epochs", display)
        if tune is not None and self.train is not None:
            found["finetune"] = steps_of(self._data("finetune"), tune.epochs, "finetune.epochs", display)
        return found

    def _data(self, stage: str) -> Iterable[Any]:
        """The training data as a stage reads them: this process's batches, or pairs of them from two halves."""
        assert self.train is not None
        pairs = stage == "search" and search_class(self.recipe.search.method).reads == 2
        part = shared(halves(self.train, self.recipe.seed) if pairs else self.train)
        own_loop = stage == "finetune" and hasattr(self.task, "finetune")
        return part if own_loop else accumulated(part, self.engine.config.batches, pairs)

    def _share(self, total: int) -> int:
        """This round's part of all search steps."""
        share, rest = divmod(total, self.recipe.steps)
        return max(1, share + (self.round < rest)) if total else 0

    @property
    def _left(self) -> float:
        """The part of the dense network that this round may leave."""
        left: float = self.recipe.budget.left ** ((self.round + 1) / self.recipe.steps)
        return left

    def _limit(self, groups: Groups, left: float) -> float | None:
        """What this round may leave, in the budget's unit, of the dense network."""
        if self.round == 0:
            return None if self.recipe.steps == 1 else left * self._cost(groups, groups.cost.widths)
        return left * float(self.engine.facts["whole"]) - self._gone(groups)

    def _cost(self, groups: Groups, widths: Any) -> int:
        return int(getattr(groups.cost, self.recipe.budget.unit)(widths))

    def _gone(self, groups: Groups) -> int:
        """Dimensions of groups that are no longer offered, and count all the same."""
        if self.recipe.budget.unit != "dims":
            return 0
        return sum(map(len, self.plan.keep.values())) - int(groups.cost.widths.sum())

    def _write_down(
        self, groups: Groups, importance: dict[str, Tensor], keep: dict[str, Any], notes: list[str]
    ) -> None:
        """The report as far as it is known after a choice."""
        now = Report.of(groups, keep)
        if self.report is None:
            self.report = now
            if self.recipe.budget.unit not in ("latency", "auto"):
                self.engine.facts["whole"] = self._cost(groups, groups.cost.widths)
        rows = {row.name: row for row in self.report.groups}
        for name, kept in keep.items():
            if name in rows:
                rows[name].kept = len(kept)
        self.report.pruned.params, self.report.pruned.macs = now.pruned.params, now.pruned.macs
        self.report.importance |= {name: np.asarray(v, dtype=float).tolist() for name, v in importance.items()}
        self.report.notes = [n for n in self.report.notes if not n.startswith("latency ")]  # of earlier rounds
        for note in notes:
            self._note(note)

    def _note(self, text: str) -> None:
        if self.report is not None and text not in self.report.notes:
            self.report.notes.append(text)

    def _go_on(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Take up a checkpoint."""
        self.engine.history, self.engine.seconds = facts.pop("history"), facts.pop("seconds")
        self._resumed = (tensors, facts)
        own = {"done", "epoch", "inside", "part", "random", "state", "sums", "count", "compute"}
        self.engine.compute.restore_(facts["compute"])
        self.engine.facts = {key: value for key, value in facts.items() if key not in own}
        if "plan" in facts:
            self.plan, self.round = Plan.from_dict(facts["plan"]), facts["round"]
            self.report = Report.from_dict(facts["report"])
            slice_(self.compact, self.plan)
        if student := below(tensors, "student/"):
            put_(self.compact, student)
        self.engine.display.say(f"going on in stage {facts['stage']}, at step {facts.get('done', 0)}")

    def _restore(self, state: State, stage: str) -> dict[str, Any] | None:
        if self._resumed is None or self._resumed[1].get("stage") != stage:
            return None
        (tensors, facts), self._resumed = self._resumed, None
        state.restore_(tensors, facts["state"])
        return facts
