"""SearchSpace: a network whose choices are made together by a rule of its own, such as two edges into every node."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from .choice import choice_groups, choices_of

Strengths = Mapping[str, Mapping[str, float]]  # group of choices -> candidate -> strength, larger is better


@dataclass(frozen=True)
class Option:
    """One way to make a decision: the candidate of each group of choices that it concerns, and its strength."""

    chosen: dict[str, str]
    strength: float


Decision = Sequence[Option]  # exactly one of these is taken


class SearchSpace(nn.Module, ABC):
    """Base class of networks with a genotype, which chooses their operations by a rule of its own."""

    can_have_auxiliary_head: ClassVar[bool] = False
    auxiliary_outputs: Tensor | None = None  # of the auxiliary head, in the last training pass

    @abstractmethod
    def set_drop_path_(self, rate: float) -> None:
        """Drop each path of a cell with this probability in training."""

    def add_auxiliary_head_(self) -> None:
        """Add an auxiliary head, which is used in training only.

        Raises:
            ValueError: the space has none.
        """
        raise ValueError(f"{type(self).__name__} has no auxiliary head")

    def remove_auxiliary_head_(self) -> None:
        """Remove the auxiliary head, if there is one."""

    @abstractmethod
    def decisions(self, strengths: Strengths) -> list[Decision]:
        """Return the decisions to take; the options of all decisions together choose for every group."""

    @abstractmethod
    def predecessors(self) -> dict[str, list[str]]:
        """Return the groups of choices on the edges into the node that each group reads; none for an input."""

    @abstractmethod
    def genotype_of(self, chosen: Mapping[str, str]) -> dict[str, Any]:
        """Return the genotype of a choice of operations, as JSON data.

        Args:
            chosen: group of choices -> candidate.
        """

    @abstractmethod
    def rebuild_(self, description: Mapping[str, Any]) -> None:
        """Become the network of a description that `describe` returned, with new weights.

        Raises:
            ValueError: the description is not one of this space.
        """

    @abstractmethod
    def describe(self, genotype: Mapping[str, Any], **sizes: Any) -> dict[str, Any]:
        """Return the description of the network with this genotype, as JSON data.

        Args:
            sizes: depth and width of the network; those left out stay as they are.

        Raises:
            ValueError: the genotype or a size is not one of this space.
        """


def decisions_of(model: nn.Module, strengths: Strengths) -> list[Decision]:
    """Return the decisions about a model's choices: by the rule of its search space, else each group by itself."""
    if isinstance(model, SearchSpace):
        return model.decisions(strengths)
    return [[Option({group: name}, value) for name, value in strengths[group].items()] for group in strengths]


def chosen_by_path(model: nn.Module, chosen: Mapping[str, str]) -> dict[str, str]:
    """Return the chosen candidate of every choice by its path, from those of the groups."""
    return {path: chosen[group] for group, paths in choice_groups(model).items() for path in paths}


def candidate_names(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of the candidates of each group of choices."""
    choices = choices_of(model)
    return {group: choices[paths[0]].names for group, paths in choice_groups(model).items()}
