"""Settings that every search has, and the registry of search methods that a recipe can name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal, Protocol

from pydantic import Field

from .fields import Length, StrictModel
from .messages import did_you_mean

Ranking = Literal["auto", "balanced", "bounded", "cost", "global", "group", "lamp"]
RANKING_DESCRIPTION = (
    "how importance is compared across groups. global: as it is; bounded: as it is, but the best k/n of a group's "
    "dimensions count as the best 3/2 k/n of all, so that no group is emptied; group: relative to the mean of its "
    "group; cost: per cost in the budget's unit; lamp: LAMP score per cost; balanced: lamp if a dimension costs about "
    "the same in all groups, else bounded; auto: {} if only inner channels are pruned, {} if residual streams are "
    "pruned as well or the budget counts dimensions"
)


class HasKind(Protocol):
    """Protocol of anything with a kind of dimension, such as a group."""

    @property
    def kind(self) -> str: ...


class SearchConfig(StrictModel):
    """Base of the settings of a search.

    A search that reads data has a field `epochs`; one that trains also derives from `TrainingConfig`. The properties
    have defaults, which fit a search that only measures importance.
    """

    chooses_operations: ClassVar[bool] = False  # whether the search can rank the candidates of `compress.Choice`
    leaves_choice_to_repair: ClassVar[bool] = False  # whether least squares repair chooses which dimensions stay
    method: str
    ranking: Ranking = Field("global", description=RANKING_DESCRIPTION.format("balanced", "group"))

    def ranking_for(self, groups: Iterable[HasKind], unit: str) -> Ranking:
        """Return the ranking for these groups and a budget in this unit; resolves `auto`."""
        if self.ranking != "auto":
            return self.ranking
        return self.channel_ranking if only_inner_channels(groups, unit) else self.fallback_ranking

    @property
    def channel_ranking(self) -> Ranking:
        """Ranking that `auto` stands for if only inner channels are pruned, to a budget in which their costs differ."""
        return "balanced"

    @property
    def fallback_ranking(self) -> Ranking:
        """Ranking that `auto` stands for if residual streams are pruned or all dimensions cost the same.

        The cost and the importance of a stream are of another order of magnitude than those of inner channels.
        """
        return "group"

    @property
    def reaches_zero(self) -> bool:
        """Return whether the search decides what to drop: the importance of dropped dimensions is exactly zero."""
        return False

    @property
    def meets_budget(self) -> bool:
        """Return whether the search itself meets the budget: the scores of dropped dimensions are zero at its end."""
        return False

    @property
    def trains_scores(self) -> bool:
        """Return whether the search trains scores that may all become zero, which the report then warns about."""
        return False

    @property
    def removes_structures(self) -> bool:
        """Return whether the search also sets groups of weights within a dimension to zero, such as rows of kernels."""
        return False

    @property
    def measures_latency(self) -> bool:
        """Return whether the search measures latency, so that its result depends on the recipe's `timing`."""
        return False

    @property
    def length(self) -> Length | None:
        """Amount of training data that the search reads; None if it needs no data."""
        length = getattr(self, "epochs", None)
        return length if isinstance(length, Length) else None


def only_inner_channels(groups: Iterable[HasKind], unit: str) -> bool:
    """Return whether only inner channels are pruned, to a budget in which their costs differ."""
    return unit != "dims" and all(g.kind == "channels" for g in groups)


_CONFIGS: dict[str, type[SearchConfig]] = {}


def register_config(name: str, config: type[SearchConfig]) -> None:
    """Register the settings that `search: {method: NAME}` is validated with."""
    _CONFIGS[name] = config


def search_names() -> list[str]:
    """Return the names of the registered searches, sorted."""
    return sorted(_CONFIGS)


def config_class(name: Any) -> type[SearchConfig]:
    """Return the config class of a search.

    Raises:
        ValueError: no search of that name is registered.
    """
    if name not in _CONFIGS:
        hint = did_you_mean(str(name), search_names()) or " Register your own with compress.register_search."
        raise ValueError(f"expected one of {', '.join(search_names())}; got {name!r}.{hint}")
    return _CONFIGS[name]
