"""From importance and a budget to what is kept."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .groups import Groups
from .recipe import Bound, Budget, Target
from .search import Ranking

Int = NDArray[np.int64]
Float = NDArray[np.float64]
Importance = Mapping[str, NDArray[np.floating] | Tensor]


class BudgetError(ValueError):
    """A budget that no choice of widths can meet."""


@dataclass(frozen=True)
class Bounds:
    """The widths that a group may get: `least`, the multiples of `step` above it, and at most `full`."""

    least: Int  # zero where a group may go altogether
    floor: Int  # of what stays
    full: Int
    step: Int
    with_it: dict[int, list[int]]  # group that may go -> those that nobody reads then

    @classmethod
    def of(cls, groups: Groups, target: Target, dense: Mapping[str, int] | None = None) -> Bounds:
        """The bounds that `target` sets; `dense` has the dense widths where the groups are already cut.

        Raises:
            ValueError: a pattern in `target.bounds` is wrong, matches no group, or leaves a group no width.
        """
        full = groups.cost.widths.copy()
        whole = np.array([g.kind == "heads" for g in groups], dtype=bool)  # a head is many dimensions
        step = np.where(whole, 1, target.round_to * groups.cost.ways)
        least = np.minimum(-(-np.where(whole, 1, target.min_keep * groups.cost.ways) // step) * step, full)
        for i, bound in _matching(groups, target, strict=dense is None).items():
            least[i], full[i] = _span(groups, i, bound, int(least[i]), int(step[i]), dense or {})
        number = {name: i for i, name in enumerate(groups.cost.names)}
        bounded = _matching(groups, target, strict=False)
        with_it = {
            number[name]: [number[n] for n in branch.unread if n in number]
            for name, branch in groups.branches.items()
            if number[name] not in bounded
        }
        floor = least.copy()
        for i, others in with_it.items():
            least[[i, *others]] = 0
        return cls(least, floor, full, step, with_it)

    def up(self, kept: Int) -> Int:
        """The next allowed width above; none for branches of which nothing is kept."""
        rounded = -(-np.maximum(kept, self.floor) // self.step) * self.step
        allowed: Int = np.minimum(rounded, self.full)
        for i, others in self.with_it.items():
            if kept[i] == 0:
                allowed[[i, *others]] = 0
        return allowed

    def alive(self, groups: Groups, importance: Importance) -> Int:
        """The widths that hold every dimension of any importance."""
        values = _checked(groups, importance)
        most = [g.ways * (values[g.name].reshape(g.ways, -1) != 0).sum(1).max() for g in groups]
        return self.up(np.array(most, dtype=np.int64))


@dataclass(frozen=True)
class Ladder:
    """The widths that follow a ranking: rung n holds the n best dimensions over all groups, within bounds."""

    names: tuple[str, ...]
    orders: list[Int]  # of each group: its dimensions, best first
    owners: Int  # group of the best dimension, of the second best ...; none that lie beyond their group's bound
    bounds: Bounds

    @classmethod
    def of(cls, groups: Groups, importance: Importance, bounds: Bounds, ranking: Ranking, unit: str) -> Ladder:
        """
        Raises:
            ValueError: importance is missing, of another width, or not a number; or the ranking is unknown.
        """
        names = groups.cost.names
        values, ranked = _checked(groups, importance), rank(groups, importance, ranking, unit)
        orders = [_best_first(values[g.name], g.ways) for g in groups]
        worth = [_level(ranked[g.name][order], g.ways) for g, order in zip(groups, orders, strict=True)]
        owners = np.repeat(np.arange(len(names)), bounds.full)
        within = [value[:most] for value, most in zip(worth, bounds.full, strict=True)]
        best_first = np.argsort(-np.concatenate([np.zeros(0), *within]), kind="stable")
        return cls(names, orders, owners[best_first], bounds)

    @property
    def top(self) -> int:
        return len(self.owners)

    def widths(self, rung: int) -> Int:
        return self.bounds.up(np.bincount(self.owners[:rung], minlength=len(self.names)))

    def keep(self, widths: Int) -> dict[str, Int]:
        """The best dimensions of each group, so many as its width."""
        return {name: np.sort(self.orders[i][: widths[i]]) for i, name in enumerate(self.names)}


def _best_first(value: Float, ways: int) -> Int:
    """The dimensions in the order of their importance; where heads have their own, the best of each head, then ..."""
    runs = np.argsort(-value.reshape(ways, -1), axis=1, kind="stable")
    order: Int = (runs + np.arange(ways)[:, None] * runs.shape[1]).T.ravel()
    return order


def _level(ranked: Float, ways: int) -> Float:
    """Those that go together count as much as they do on average."""
    return np.repeat(ranked.reshape(-1, ways).mean(1), ways)


def percent(fraction: float) -> str:
    """Rounded up to four digits: a budget that is named as reachable can be reached."""
    digits = 3 - math.floor(math.log10(100 * fraction)) if fraction > 0 else 0
    return f"{math.ceil(round(100 * fraction * 10**digits, 6)) / 10**digits:.4g}%"


def smallest(groups: Groups, budget: Budget, target: Target, dense: Mapping[str, int] | None = None) -> float:
    """The fraction that is left when every group is cut as far as it may be.

    Raises:
        ValueError: the budget is one of latency, or `target.bounds` are wrong.
    """
    measure = _measure(groups, "macs" if budget.auto else budget.unit)
    whole = int(measure(groups.cost.widths))
    return int(measure(Bounds.of(groups, target, dense).least)) / whole if whole else 1.0


def rank(groups: Groups, importance: Importance, ranking: Ranking, unit: str) -> dict[str, Float]:
    """Make importance comparable across groups.

    `global` takes it as it is; `group` divides by the mean size of the group's; `cost` divides by the part of the
    network's cost in the budget's unit (else in MACs) that one dimension takes: what takes nothing comes first. `lamp`
    does so as well, once importance is the root of its part in what is at least as important in its group (Lee et al.,
    Layer-adaptive sparsity for the magnitude-based pruning, ICLR 2021): no group can be emptied before the others.

    Raises:
        ValueError: importance is missing, of another width, or not a number; or the ranking is unknown.
    """
    values = _checked(groups, importance)
    if ranking == "global":
        return values
    if ranking == "group":
        return {name: value / _mean_size(value) for name, value in values.items()}
    if ranking == "lamp":
        values = {name: _part_in_the_best(value) for name, value in values.items()}
    elif ranking != "cost":
        raise ValueError(f"ranking: expected cost, global, group or lamp; got {ranking!r}")
    counted = "macs" if unit in ("latency", "auto") else unit
    whole, prices = int(_measure(groups, counted)(groups.cost.widths)), groups.cost.prices(counted)
    return {
        name: values[name] / (price / whole) if price else np.full(len(values[name]), np.inf)
        for name, price in zip(groups.cost.names, prices.tolist(), strict=True)
    }


def choose(
    groups: Groups,
    importance: Importance,
    budget: Budget,
    target: Target,
    *,
    ranking: Ranking = "global",
    dense: Mapping[str, int] | None = None,
    limit: float | None = None,
    measure: Callable[[Int], Any] | None = None,
) -> dict[str, Int]:
    """Keep the most important dimensions over all groups that the budget has room for.

    The cost of what is kept never exceeds the budget, and no group could keep one step (`round_to` dimensions, or a
    head) more without exceeding it or its bounds. The widths are found by bisection on the ranking; what room is left
    is then given to the groups in the order of their next best dimension.

    Where the groups are already cut, `dense` has the dense widths that bounds refer to, and `limit` is the cost to stay
    within, in the budget's unit, in place of the budget's part of this network's. `measure` is another cost of widths.
    With `budget: auto` all that has any importance is kept.

    Raises:
        BudgetError: the budget is out of reach; the message names the smallest that is not.
        ValueError: importance is missing, of another width, or not a number; `target.bounds` are wrong; the budget is
            one of latency, which is for `timing.choose_by_latency`.
    """
    bounds = Bounds.of(groups, target, dense)
    ladder = Ladder.of(groups, importance, bounds, ranking, budget.unit)
    if budget.unit == "auto":
        return ladder.keep(bounds.alive(groups, importance))
    measure = measure or _measure(groups, budget.unit)
    room = budget.left * int(measure(groups.cost.widths)) if limit is None else limit
    room = math.floor(room * (1 + 1e-12))  # 0.29 * 100 is a hair below 29
    if int(measure(bounds.least)) > room:
        raise BudgetError(_out_of_reach(groups, budget, target, dense, limit))
    low, high = 0, ladder.top
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if int(measure(ladder.widths(middle))) <= room else (low, middle - 1)
    return ladder.keep(_fill(ladder.widths(low), ladder, measure, room))


def _fill(kept: Int, ladder: Ladder, measure: Callable[[Int], Any], room: int) -> Int:
    """Widen groups one after the other, best next dimension first, as far as the budget has room."""
    bounds = ladder.bounds
    ranks = np.argsort(ladder.owners, kind="stable")  # rank of each dimension, group after group
    starts = np.concatenate([[0], np.cumsum(bounds.full)])
    open_groups = [g for g in range(len(kept)) if 0 < kept[g] < bounds.full[g]]  # what is gone stays so
    for g in sorted(open_groups, key=lambda g: int(ranks[starts[g] + kept[g]])):
        low, high = 0, int(-(-(bounds.full[g] - kept[g]) // bounds.step[g]))
        while low < high:
            middle = (low + high + 1) // 2
            fits = int(measure(_widened(kept, g, middle, bounds))) <= room
            low, high = (middle, high) if fits else (low, middle - 1)
        kept = _widened(kept, g, low, bounds)
    return kept


def _widened(kept: Int, g: int, steps: int, bounds: Bounds) -> Int:
    wider = kept.copy()
    wider[g] = min(kept[g] + steps * bounds.step[g], bounds.full[g])
    return wider


def _measure(groups: Groups, unit: str) -> Callable[[Int], Any]:
    if unit == "latency":
        raise ValueError("budget.latency is measured, not computed: call compress.timing.choose_by_latency")
    measure: Callable[[Int], Any] = getattr(groups.cost, unit)
    return measure


def _part_in_the_best(value: Float) -> Float:
    """The root of each number's part in the sum of those that are no smaller: one for the largest, infinities too."""
    sizes = np.where(np.isfinite(value), np.maximum(value, 0), 0)
    order = np.argsort(-sizes, kind="stable")
    sums = np.maximum(np.cumsum(sizes[order]), np.finfo(np.float64).tiny)
    part = np.empty_like(sizes)
    part[order] = np.sqrt(sizes[order] / sums)
    return np.where(np.isposinf(value), np.inf, part)


def _mean_size(value: Float) -> float:
    """The mean of the absolute values, those that are infinite left out; never zero."""
    sizes = np.abs(value[np.isfinite(value)])
    return max(float(sizes.mean()) if sizes.size else 0.0, float(np.finfo(np.float64).tiny))


def _out_of_reach(
    groups: Groups, budget: Budget, target: Target, dense: Mapping[str, int] | None, limit: float | None
) -> str:
    measure = _measure(groups, budget.unit)
    whole = int(measure(groups.cost.widths))

    def least(target: Target) -> str:
        cost = int(measure(Bounds.of(groups, target, dense).least))
        return percent(cost / whole) if limit is None else str(cost)

    bounded = least(target)
    free = {name: least(target.model_copy(update={name: none})) for name, none in (("bounds", {}), ("round_to", 1))}
    free = {f"target.{name}": without for name, without in free.items() if without != bounded}
    held = "".join(f"Without {name} it would be {without}. " for name, without in free.items())
    loosen = " or ".join(free) or "target.min_keep"
    return (
        f"budget.{budget.unit}: {f'{percent(budget.left)} of the dense network' if limit is None else f'{limit:.0f}'} "
        f"cannot be reached; the smallest that can is {bounded} "
        f"({len(groups)} groups offered, {len(groups.refused)} refused). {groups.held_back()}{held}"
        + (f"Raise the budget, allow more in target, or lower {loosen}." if len(groups) else "Allow more in target.")
    )


def _matching(groups: Groups, target: Target, *, strict: bool) -> dict[int, Bound]:
    """The bound of each group that has one, by the group's number; a group's own name goes before those of modules."""
    names = list(groups.cost.names)
    modules = [_modules(slot.tensor for slot in groups[name].writers) for name in names] if target.bounds else []
    found: dict[int, Bound] = {}
    for pattern, bound in target.bounds.items():
        fits = _matcher(pattern)
        hits = [i for i, name in enumerate(names) if fits(name)]
        hits = hits or [i for i, within in enumerate(modules) if any(map(fits, within))]
        if not hits and strict:  # later rounds may have groups no more that the first had
            raise ValueError(_no_match(groups, pattern, sorted({*names, *(m for within in modules for m in within)})))
        found.update(dict.fromkeys(hits, bound))
    return found


def _modules(tensors: Iterable[str]) -> set[str]:
    """The modules that these tensors belong to, and all that those lie in."""
    found: set[str] = set()
    for path in tensors:
        while path := path.rpartition(".")[0]:
            found.add(path)
    return found


def _matcher(pattern: str) -> Callable[[str], bool]:
    if not pattern.startswith("re:"):
        return lambda name: name == pattern
    expression = re.compile(pattern[3:])
    return lambda name: expression.fullmatch(name) is not None


def _no_match(groups: Groups, pattern: str, names: list[str]) -> str:
    refused = next((r for r in groups.refused if _matcher(pattern)(r.name)), None)
    near = difflib.get_close_matches(pattern.removeprefix("re:"), names, n=3, cutoff=0.3)
    why = f"; the nearest names are {', '.join(near)}" if near else ""
    why = f"; {refused.name} is left alone: {refused.reason}" if refused else why
    return (
        f"target.bounds: {pattern!r} matches no group{why}. "
        "Give the full name of a group or a module, or re: and a regular expression for the whole name."
    )


def _span(
    groups: Groups, i: int, bound: Bound, min_keep: int, round_to: int, dense: Mapping[str, int]
) -> tuple[int, int]:
    """The least and the most that a bound leaves to a group; `min_keep` counts where the bound does not speak."""
    name, width = groups.cost.names[i], int(groups.cost.widths[i])
    whole = max(dense.get(name, width), width)
    low = None if bound.least is None else max(1, math.ceil(_dimensions(bound.least, whole) - 1e-9))
    high = None if bound.most is None else max(1, math.floor(_dimensions(bound.most, whole) + 1e-9))
    if low is not None and low > whole:
        raise ValueError(f"target.bounds: group {name} has {whole} dimensions; it cannot keep {low} at least")
    most = width if high is None or high >= width else high // round_to * round_to
    least = min(min_keep, most) if low is None else min(_next(low, round_to), width)
    if not 1 <= least <= most:
        what = "width" if round_to == 1 else f"multiple of {round_to}"
        raise ValueError(
            f"target.bounds: group {name} of {whole} dimensions: no {what} lies between least {low or 1} and most "
            f"{high or whole}. Loosen the bound{'' if round_to == 1 else ', or lower target.round_to'}."
        )
    return least, most


def _dimensions(size: int | float, whole: int) -> float:
    return size if isinstance(size, int) else size * whole


def _next(width: int, round_to: int) -> int:
    """The next multiple of `round_to`."""
    return -(-width // round_to) * round_to


def _checked(groups: Groups, importance: Importance) -> dict[str, Float]:
    return {g.name: _numbers(g.name, g.width, importance) for g in groups}


def _numbers(name: str, width: int, importance: Importance) -> Float:
    if name not in importance:
        raise ValueError(f"importance: group {name} is missing")
    value = importance[name]
    array = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value, dtype=np.float64)
    if array.shape != (width,):
        raise ValueError(f"importance of {name}: expected {width} numbers, got shape {list(array.shape)}")
    if bad := int(np.isnan(array).sum()):
        raise ValueError(
            f"importance of {name}: {bad} of {width} are NaN, the first at {int(np.flatnonzero(np.isnan(array))[0])}. "
            "Look for NaN in the model's weights and in the data; a search that trains may need a lower learning rate."
        )
    return array
