"""Interface of searches, which find the importance of each dimension, and their registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn, optim

from compress.budget import Operations, PruningSchedule
from compress.graph import Groups
from compress.recipe import SearchConfig, config_class, register_config
from compress.training import Classification, GradientComputer, Task

from .cost_history import CostSample

Schedule = PruningSchedule | Callable[[dict[str, Tensor], float], Mapping[str, Any]]


@dataclass
class Job:
    """Everything that a search works on.

    Attributes:
        model: the search's own copy of the model, on the device of the run; the search may change it.
        groups: the groups of the model.
        task: data and losses.
        steps: how many steps the search will make.
        seed: seed of the run.
        schedule: `schedule(importance, progress)` returns the dimensions to keep of each group when a fraction
            `progress` (0 to 1) of the pruning is due; None if there is no budget to prune to.
        dimension_times: returns the fraction of the network's time that one dimension of each group takes, as
            measured; None if latency cannot be measured.
        teacher: the dense model, if there is one.
        steps_per_epoch: steps that read all data once, if known.
        gradient_computer: computes the gradients of a step in the precision, micro-batches and processes of the run.
        operations: the choices of the model, if the search chooses operations instead of dimensions; a candidate takes
            the part of a dimension, and a group of choices that of a group.
    """

    model: nn.Module
    groups: Groups
    task: Task
    steps: int
    seed: int = 0
    schedule: Schedule | None = None
    dimension_times: Callable[[], dict[str, float]] | None = None
    teacher: nn.Module | None = None
    steps_per_epoch: int | None = None
    gradient_computer: GradientComputer = field(default_factory=GradientComputer)
    operations: Operations | None = None

    @property
    def num_scores(self) -> dict[str, int]:
        """Return the number of dimensions of each group, or of candidates if the search chooses operations."""
        if self.operations is not None:
            return {name: len(candidates) for name, candidates in self.operations.candidates.items()}
        return {group.name: group.width for group in self.groups}

    @torch.no_grad()
    def teacher_outputs(self, batch: Any) -> Any:
        """Run the dense model on a batch, as the task's `distil` expects it.

        Raises:
            ValueError: there is no dense model.
        """
        if self.teacher is None:
            raise ValueError("distill: there is no dense model to learn from; use compress.prune")
        return self.task.teach(self.teacher, batch)


class Search(ABC):
    """Base class of search algorithms.

    A search has a `Config` and measures importance; the training loop, logging, budget, ranking and checkpoints are
    handled elsewhere. A search that trains has a `Config` that derives from `TrainingConfig`, a `step`, and its
    `optimizers`. It returns the other tensors that it updates from step to step in `state`.
    """

    Config: ClassVar[type[SearchConfig]] = SearchConfig
    batches_per_step: ClassVar[int] = 1  # with 2, `batch` is a pair of batches, one from each half of the data
    trains: ClassVar[bool] = True  # whether steps run in training mode
    optimizers: Sequence[optim.Optimizer] = ()

    def __init__(self, config: Any, job: Job) -> None:
        self.config, self.job, self.done = config, job, 0

    def step(self, batch: Any) -> dict[str, Tensor]:
        """Train on one batch; return the terms of the loss."""
        raise TypeError(f"{type(self).__name__} does not train")

    @abstractmethod
    def importance(self) -> dict[str, Tensor]:
        """Return the importance of every dimension of every group."""

    def scores(self) -> dict[str, Tensor]:
        """Return the magnitude of the current score of every dimension, for charts; empty if no scores are trained."""
        return {}

    def policy(self) -> dict[str, Any]:
        """Return the distribution that widths are drawn from, as JSON data for charts; empty if there is none."""
        return {}

    def read_costs_(self) -> dict[str, CostSample]:
        """Return the signed costs of the scores on each half of the data since the last call; empty if none are kept.

        The result is the same on all processes.
        """
        return {}

    def finish(self) -> None:  # noqa: B027
        """Leave the model with the weights to hand over; called once, before `importance`."""

    def smaller_kernels(self) -> dict[str, dict[int, tuple[int, int]]]:
        """Return convolution weights whose kernels can be cropped: weight -> dimension -> kept range [start, end)."""
        return {}

    def notes(self) -> list[str]:
        """Return notes on the search for the report."""
        return []

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a resumed search needs beyond model and optimizers; they are restored in place."""
        return {}


_REGISTRY: dict[str, type[Search]] = {}
_OPERATION_SEARCHES: dict[str, type[Search]] = {}  # methods that choose operations with another class
SearchClass = TypeVar("SearchClass", bound=type[Search])


def register_search(name: str) -> Callable[[SearchClass], SearchClass]:
    """Register a search class, which recipes then select by `search: {method: NAME}`.

    Raises:
        ValueError: another search has that name.
        TypeError: the class does not derive from Search, or its Config not from SearchConfig.
    """

    def add(cls: SearchClass) -> SearchClass:
        if not (isinstance(cls, type) and issubclass(cls, Search)):
            raise TypeError(f"search {name}: expected a class derived from compress.Search; got {cls!r}")
        if not issubclass(cls.Config, SearchConfig):
            raise TypeError(f"search {name}: expected Config to derive from SearchConfig; got {cls.Config!r}")
        if _REGISTRY.get(name, cls).__qualname__ != cls.__qualname__:
            raise ValueError(f"search {name}: the name is taken by {_REGISTRY[name].__qualname__}; choose another")
        _REGISTRY[name] = cls
        register_config(name, cls.Config)
        return cls

    return add


def register_operation_search(name: str) -> Callable[[SearchClass], SearchClass]:
    """Register the class that a method chooses operations with, if it is not the one for dimensions."""

    def add(cls: SearchClass) -> SearchClass:
        _OPERATION_SEARCHES[name] = cls
        return cls

    return add


def search_class(name: str, operations: bool = False) -> type[Search]:
    """Return the search class registered under a name.

    Args:
        operations: whether operations are chosen instead of dimensions.

    Raises:
        ValueError: no search of that name is registered.
    """
    config_class(name)
    return _OPERATION_SEARCHES.get(name, _REGISTRY[name]) if operations else _REGISTRY[name]


def data_free_importance(config: SearchConfig, model: nn.Module, groups: Groups, seed: int = 0) -> dict[str, Tensor]:
    """Return the importance that a search without data gives the dimensions of a model.

    Raises:
        TypeError: the search reads data.
    """
    if config.length is not None:
        raise TypeError(f"search {config.method} reads data: use compress.prune or compress.search_session")
    return search_class(config.method)(config, Job(model, groups, Classification(), 0, seed)).importance()
