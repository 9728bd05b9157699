"""RunContext: the networks, data and results that the stages of a run share."""

from __future__ import annotations

from torch import nn

from compress.distributed import broadcast_module_, broadcast_object
from compress.modules import has_written_parameters, make_teacher, shared_copy, trainable_copy
from compress.recipe import Recipe
from compress.report import Report, run_origin
from compress.storage import TrainingState
from compress.surgery import Plan
from compress.training import Engine, LoopPosition, ResumePoint, set_memory_format_

from .preflight import UserInputs, check_inputs
from .rounds import Round
from .training_data import TrainingData


class RunContext:
    """State of a run: the dense model as teacher, the network that is being cut, and the results so far."""

    def __init__(self, model: nn.Module, recipe: Recipe, engine: Engine, inputs: UserInputs) -> None:
        """Check the inputs and copy the model.

        Raises:
            NotReady: something is missing or does not fit; the message lists all problems.
        """
        self.model, self.engine = model, engine
        self.teacher = make_teacher(model, engine.device, engine.config.channels_last)
        checked = check_inputs(self.teacher, recipe, engine, inputs)
        if has_written_parameters(self.teacher):
            self.teacher = shared_copy(self.teacher)  # has them for itself
        self.task, self.example_inputs = checked.task, checked.example_inputs
        self.recipe = recipe
        if not recipe.target.include and self.task.include:
            target = recipe.target.model_copy(update={"include": self.task.include})
            self.recipe = recipe.model_copy(update={"target": target})
        self.compact = trainable_copy(model).to(engine.device)
        set_memory_format_(self.compact, engine)
        broadcast_module_(self.compact)
        engine.run_state.origin = broadcast_object(run_origin(model, recipe.seed))
        self.data = TrainingData(checked.train, self.recipe, engine, self.task)
        self.plan, self.round_index = Plan({}, {}), 0
        self.report: Report | None = None
        self.resume_point: ResumePoint | None = None  # until the stage that was stopped takes it

    @property
    def current_round(self) -> Round:
        """The current round of search and cut."""
        return Round(self.recipe, self.round_index, self.plan, self.engine.run_state.dense_cost)

    def restore_search_(self, state: TrainingState) -> LoopPosition | None:
        """Restore the search from the checkpoint, if the run was stopped in it; return its position."""
        if self.resume_point is None or self.resume_point.metadata.run_state.stage != "search":
            return None
        (tensors, metadata), self.resume_point = self.resume_point, None
        state.restore_(tensors, metadata.training)
        return metadata.position
