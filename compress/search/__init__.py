"""Search: how the importance of each dimension is found. Larger is kept."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from pydantic import Field
from torch import Tensor, nn, optim

from ..compute import Compute
from ..fields import Length, Strict

if TYPE_CHECKING:
    from ..groups import Groups
    from ..task import Task

Line = Callable[[dict[str, Tensor], float], dict[str, Any]]
Ranking = Literal["auto", "cost", "global", "group", "lamp"]
RANKING = (
    "across groups: cost is importance per unit of the budget's cost, global as it is, group relative to its group's "
    "mean, lamp relative to what is no less important in its group, per cost; auto is lamp for inner channels alone, "
    "and {} where streams are cut too or the budget counts dimensions"
)


class SearchConfig(Strict):
    """The settings of a search; one that trains has those of `Training`, too. One that reads data has `epochs`."""

    method: str
    ranking: Ranking = Field("global", description=RANKING.format("group"))

    def ranks_by(self, groups: Groups, unit: str) -> Ranking:
        """The ranking that counts for these groups and a budget in this unit."""
        return self.ranking if self.ranking != "auto" else "lamp" if inner(groups, unit) else self.otherwise

    @property
    def otherwise(self) -> Ranking:
        """The ranking where streams are cut, whose cost and importance are of another order, or all cost the same."""
        return "group"

    @property
    def reaches_zero(self) -> bool:
        """Whether the search itself says what goes: importance is zero there, and not by chance."""
        return False

    @property
    def settles(self) -> bool:
        """Whether what goes is settled when the search ends, and a budget of latency was measured on the way."""
        return False

    @property
    def length(self) -> Length | None:
        """How much of the training data the search reads; None if it needs none."""
        length = getattr(self, "epochs", None)
        return length if isinstance(length, Length) else None


def inner(groups: Groups, unit: str) -> bool:
    """Whether inner channels alone are cut, to a budget that tells them apart."""
    return unit != "dims" and all(g.kind == "channels" for g in groups)


@dataclass
class Job:
    """What a search works on: a copy of the model that is its own, on the device, and how many steps it will make.

    `line(importance, part)` is what would be kept of each group if a part (0 to 1) of the cut were due, by this
    importance per cost; `times()` is the part of the network's time that a dimension of each group takes, as measured.
    `teacher` is the dense model, `epoch` the steps that read all data once. They are None where nobody said what the
    budget is, how the network is called, what it came from, or how many data there are. `compute.gradients` takes a
    step's gradients in whatever precision, pieces and processes the run has.
    """

    model: nn.Module
    groups: Groups
    task: Task
    steps: int
    seed: int = 0
    line: Line | None = None
    times: Callable[[], dict[str, float]] | None = None
    teacher: nn.Module | None = None
    epoch: int | None = None
    compute: Compute = field(default_factory=Compute)


class Search(ABC):
    """One algorithm. The loop, logging, budget, ranking and checkpoints are not its business.

    A search that trains has a `Config` that derives from `Training`, a `step`, and its `optimizers`; what else it has
    to remember from step to step it names in `state`.
    """

    Config: ClassVar[type[SearchConfig]] = SearchConfig
    reads: ClassVar[int] = 1  # halves of the data that a step reads a batch of each: with 2, `batch` is a pair
    trains: ClassVar[bool] = True  # whether steps are made in training mode
    optimizers: Sequence[optim.Optimizer] = ()

    def __init__(self, config: Any, job: Job) -> None:
        self.config, self.job, self.done = config, job, 0

    def step(self, batch: Any) -> dict[str, Tensor]:
        """Train on one batch; returns the terms of the loss."""
        raise TypeError(f"{type(self).__name__} does not train")

    @abstractmethod
    def importance(self) -> dict[str, Tensor]:
        """The importance of every dimension of every group."""

    def scores(self) -> dict[str, Tensor]:
        """The scores as they are now, a positive number for every dimension, if it trains any; they are drawn."""
        return {}

    def kernels(self) -> dict[str, dict[int, tuple[int, int]]]:
        """Convolutions whose kernels can be smaller: weight -> dimension -> what is left, from and up to."""
        return {}

    def notes(self) -> list[str]:
        """What the report should say about how it went."""
        return []

    def state(self) -> dict[str, Tensor]:
        """Tensors beyond the model's and the optimisers' that a resumed search needs; they are restored in place."""
        return {}


_REGISTRY: dict[str, type[Search]] = {}
Class = TypeVar("Class", bound=type[Search])


def register_search(name: str) -> Callable[[Class], Class]:
    """Make a search known to recipes as `search: {method: NAME}`.

    Raises:
        ValueError: the name is taken.
        TypeError: the class or its config is not of the form that a search has.
    """

    def add(cls: Class) -> Class:
        if not (isinstance(cls, type) and issubclass(cls, Search)):
            raise TypeError(f"search {name}: expected a class derived from compress.Search; got {cls!r}")
        if not issubclass(cls.Config, SearchConfig):
            raise TypeError(f"search {name}: expected Config to derive from SearchConfig; got {cls.Config!r}")
        if _REGISTRY.get(name, cls).__qualname__ != cls.__qualname__:
            raise ValueError(f"search {name}: the name is taken by {_REGISTRY[name].__qualname__}; choose another")
        _REGISTRY[name] = cls
        return cls

    return add


def names() -> list[str]:
    """The searches that recipes may name."""
    return sorted(_REGISTRY)


def search_class(name: Any) -> type[Search]:
    """
    Raises:
        ValueError: no search of that name is registered.
    """
    if name not in _REGISTRY:
        near = difflib.get_close_matches(str(name), names(), n=1)
        hint = f" Did you mean {near[0]}?" if near else " Register one of your own with compress.register_search."
        raise ValueError(f"expected one of {', '.join(names())}; got {name!r}.{hint}")
    return _REGISTRY[name]


def config_class(name: Any) -> type[SearchConfig]:
    return search_class(name).Config


def importance(config: SearchConfig, model: nn.Module, groups: Groups, seed: int = 0) -> dict[str, Tensor]:
    """What a search that needs no data makes of a model.

    Raises:
        TypeError: it does need some.
    """
    from ..task import Classification

    if config.length is not None:
        raise TypeError(f"search {config.method} reads data: use compress.prune or compress.search_session")
    return search_class(config.method)(config, Job(model, groups, Classification(), 0, seed)).importance()


from . import bayes_compress, bayesnas, darts, magnitude, milenas, netslim, random, rarts, taylor  # noqa: E402, F401
