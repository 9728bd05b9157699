"""RunContext: the networks, data and results that the stages of a run share."""

from __future__ import annotations

from functools import cached_property

from torch import nn

from compress.distributed import broadcast_module_, broadcast_object, world_size
from compress.modules import choices_of, has_written_parameters, make_teacher, shared_copy, trainable_copy
from compress.recipe import Recipe
from compress.report import Report, run_origin
from compress.storage import TrainingState
from compress.surgery import Plan, with_operations
from compress.training import Engine, LoopPosition, ResumePoint, set_memory_format_

from .elastic import ProcessCount
from .preflight import UserInputs, check_inputs
from .rounds import Round
from .training_data import TrainingData, describe_data_use


class RunContext:
    """State of a run: the dense model, the teacher, the network that is being cut, and the results so far.

    The teacher is the dense model unless the user gives another.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        engine: Engine,
        inputs: UserInputs,
        processes: ProcessCount | None = None,
    ) -> None:
        """Check the inputs and copy the model.

        Args:
            processes: default: as many as there are now, from the start.

        Raises:
            NotReady: something is missing or does not fit; the message lists all problems.
        """
        self.model, self.engine = model, engine
        self.processes = processes or ProcessCount(world_size(), world_size(), engine.batches_per_step)
        self.dense = make_teacher(model, engine.device, engine.config.channels_last)
        given_teacher = None
        if inputs.teacher is not None:
            given_teacher = make_teacher(inputs.teacher, engine.device, engine.config.channels_last)
        checked = check_inputs(self.dense, given_teacher, recipe, engine, inputs)
        if has_written_parameters(self.dense):
            self.dense = shared_copy(self.dense)  # has them for itself
        self.teacher = given_teacher if given_teacher is not None else self.dense
        if has_written_parameters(self.teacher):
            self.teacher = shared_copy(self.teacher)
        self.task, self.example_inputs = checked.task, checked.example_inputs
        self.calibration, self.test = checked.calibration, checked.test
        is_automatic, recipe = recipe.is_automatic, checked.recipe
        self.recipe = recipe
        if not recipe.target.include and self.task.include:
            target = recipe.target.model_copy(update={"include": self.task.include})
            self.recipe = recipe.model_copy(update={"target": target})
        self.compact = trainable_copy(model).to(engine.device)
        set_memory_format_(self.compact, engine)
        broadcast_module_(self.compact)
        engine.run_state.origin = broadcast_object(run_origin(model, recipe.seed))
        self.data = TrainingData(checked.train, self.recipe, engine, self.task)
        self.data_notes = [
            *describe_data_use(recipe, checked, self.data, is_automatic),
            *_describe_unsearched_choices(model, recipe),
        ]
        self.plan, self.round_index = Plan({}, {}), 0
        self.report: Report | None = None
        self.resume_point: ResumePoint | None = None  # until the stage that was stopped takes it

    def announce(self) -> None:
        """Print what the run will do with its data."""
        for note in self.data_notes:
            self.engine.display.message(note)

    @property
    def current_round(self) -> Round:
        """The current round of search and cut."""
        return Round(self.recipe, self.round_index, self.plan, self.engine.run_state.dense_costs or {})

    @cached_property
    def reference(self) -> nn.Module:
        """The network that a latency budget of widths refers to: the dense one, with its operations chosen."""
        return with_operations(self.dense, Plan({}, {}, choices=self.plan.choices))

    def restore_search_(self, state: TrainingState, stage: str) -> LoopPosition | None:
        """Restore the search from the checkpoint, if the run was stopped in this stage; return its position."""
        if self.resume_point is None or self.resume_point.metadata.run_state.stage != stage:
            return None
        (tensors, metadata), self.resume_point = self.resume_point, None
        state.restore_(tensors, metadata.training)
        return metadata.position


def _describe_unsearched_choices(model: nn.Module, recipe: Recipe) -> list[str]:
    """Return a note if the model has choices that the recipe does not search."""
    choices = [] if recipe.target.operations else list(choices_of(model))
    if not choices:
        return []
    names = ", ".join(choices[:3]) + f" and {len(choices) - 3} more" * (len(choices) > 3)
    return [
        f"target.operations is off: the choices of the model ({names}) keep all of their candidates. To "
        "choose one for each, give target: {operations: true} and a search such as rarts"
    ]
