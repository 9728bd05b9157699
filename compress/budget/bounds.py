"""Widths that each group may get, from the `target` section of the recipe."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from compress.graph import Group, Groups
from compress.recipe import Bound, NamePattern, Target

from .importance import Importance, Int, checked_importance


@dataclass(frozen=True)
class WidthBounds:
    """Allowed widths of each group: `least`, the multiples of `multiple` above it, and at most `most`.

    A dense group may stay whole even if its width is no multiple; one that is cut already may not.
    """

    least: Int  # zero where a group may be removed with its residual branch
    least_if_kept: Int  # least width of a group that is not removed
    most: Int
    multiple: Int
    dependents: dict[int, list[int]]  # removable group -> groups that no layer reads once it is removed

    @classmethod
    def of(cls, groups: Groups, target: Target, dense_widths: Mapping[str, int] | None = None) -> WidthBounds:
        """Return the bounds that `target` sets.

        Args:
            dense_widths: the dense network's widths by group, if the groups are those of a network already pruned.

        Raises:
            ValueError: a pattern in `target.bounds` is invalid, matches no group, or leaves a group no width.
        """
        most = groups.cost.widths.copy()
        are_heads = np.array([g.kind == "heads" for g in groups], dtype=bool)  # one unit of the group is a whole head
        multiple = np.where(are_heads, 1, _multiples(groups, target, dense_widths or {}) * groups.cost.num_heads)
        min_keep = np.where(are_heads, 1, target.min_keep * groups.cost.num_heads)
        if dense_widths is not None:
            is_cut = most < np.array([dense_widths.get(name, 0) for name in groups.cost.names], dtype=np.int64)
            most = np.where(is_cut & (most > multiple), most // multiple * multiple, most)
        rounds_least = target.round_to != "auto"  # auto puts no budget out of reach
        least = np.minimum(-(-min_keep // multiple) * multiple if rounds_least else min_keep, most)
        for i, bound in _bounds_by_group(groups, target, strict=dense_widths is None).items():
            multiple[i] = groups.cost.num_heads[i] if target.round_to == "auto" else multiple[i]
            least[i], most[i] = _width_range(groups, i, bound, int(least[i]), int(multiple[i]), dense_widths or {})
        index_of = {name: i for i, name in enumerate(groups.cost.names)}
        bounded = _bounds_by_group(groups, target, strict=False)
        dependents = {
            index_of[name]: [index_of[n] for n in branch.unread_groups if n in index_of]
            for name, branch in groups.branches.items()
            if index_of[name] not in bounded
        }
        least_if_kept = least.copy()
        for i, others in dependents.items():
            least[[i, *others]] = 0
        return cls(least, least_if_kept, most, multiple, dependents)

    def round_up(self, widths: Int) -> Int:
        """Return the next allowed widths; a branch of width zero stays removed, with its dependents."""
        rounded = np.where(
            widths <= self.least_if_kept, self.least_if_kept, -(-widths // self.multiple) * self.multiple
        )
        allowed: Int = np.minimum(rounded, self.most)
        for i, others in self.dependents.items():
            if widths[i] == 0:
                allowed[[i, *others]] = 0
        return allowed

    def nonzero_widths(self, groups: Groups, importance: Importance) -> Int:
        """Return the smallest allowed widths that keep every dimension of nonzero importance."""
        values = checked_importance(groups, importance)
        nonzero = [g.num_heads * (values[g.name].reshape(g.num_heads, -1) != 0).sum(1).max() for g in groups]
        return self.round_up(np.array(nonzero, dtype=np.int64))


def _multiples(groups: Groups, target: Target, dense_widths: Mapping[str, int]) -> Int:
    """Return the step between the widths of each group.

    Convolutions run fast at multiples of 8 channels (benchmarks/deploy.py). Narrow groups get smaller steps, so that
    each has at least eight widths; the dimensions of attention run in small products, where steps do not help.
    """
    if target.round_to != "auto":
        return np.full(len(groups), target.round_to, dtype=np.int64)
    widths = np.array([dense_widths.get(group.name, group.width) for group in groups], dtype=np.int64)
    is_attention = np.array([group.kind in ("attention", "heads") for group in groups], dtype=bool)
    steps: Int = np.select([is_attention, widths >= 64, widths >= 32, widths >= 16], [1, 8, 4, 2], default=1)
    return steps


def _bounds_by_group(groups: Groups, target: Target, *, strict: bool) -> dict[int, Bound]:
    """Return the bound of each group that has one, by group index. A group's name takes precedence over modules."""
    names = list(groups.cost.names)
    modules: list[set[str]] = []
    if target.bounds:
        modules = [_modules_that_write(groups[name]) for name in names]
    withdrawn = {name for group in groups.withdrawn for name in (group.name, *_modules_that_write(group))}
    bounds: dict[int, Bound] = {}
    for pattern, bound in target.bounds.items():
        matches = NamePattern(pattern).matches
        hits = [i for i, name in enumerate(names) if matches(name)]
        hits = hits or [i for i, enclosing in enumerate(modules) if any(map(matches, enclosing))]
        is_withdrawn = any(map(matches, withdrawn))  # the plan has refused the group: it stays whole
        if not hits and strict and not is_withdrawn:  # not in later rounds, where a group may no longer exist
            known_names = {*names, *(module for enclosing in modules for module in enclosing)}
            raise ValueError(_no_match_message(groups, pattern, sorted(known_names)))
        bounds.update(dict.fromkeys(hits, bound))
    return bounds


def _modules_that_write(group: Group) -> set[str]:
    """Return the modules that own the tensors which write a group, with all their parents."""
    modules: set[str] = set()
    for slot in group.output_slots:
        path = slot.tensor
        while path := path.rpartition(".")[0]:
            modules.add(path)
    return modules


def _no_match_message(groups: Groups, pattern: str, names: list[str]) -> str:
    refused = next((r for r in groups.refused if NamePattern(pattern).matches(r.name)), None)
    nearest = difflib.get_close_matches(pattern.removeprefix("re:"), names, n=3, cutoff=0.3)
    hint = f"; the nearest names are {', '.join(nearest)}" if nearest else ""
    hint = f"; {refused.name} is not cut: {refused.explanation}" if refused else hint
    return (
        f"target.bounds: {pattern!r} matches no group{hint}. "
        "Give the full name of a group or a module, or re: and a regular expression for the whole name."
    )


def _width_range(
    groups: Groups, i: int, bound: Bound, min_keep: int, round_to: int, dense_widths: Mapping[str, int]
) -> tuple[int, int]:
    """Return the least and the most width that a bound allows; `min_keep` applies if the bound has no `least`."""
    name, width = groups.cost.names[i], int(groups.cost.widths[i])
    dense_width = max(dense_widths.get(name, width), width)
    low = None if bound.least is None else max(1, math.ceil(_to_dimensions(bound.least, dense_width) - 1e-9))
    high = None if bound.most is None else max(1, math.floor(_to_dimensions(bound.most, dense_width) + 1e-9))
    if low is not None and low > dense_width:
        raise ValueError(f"target.bounds: group {name} has {dense_width} dimensions; it cannot keep {low} at least")
    most = width if high is None or high >= width else high // round_to * round_to
    least = min(min_keep, most) if low is None else min(_round_up(low, round_to), width)
    if not 1 <= least <= most:
        allowed = "width" if round_to == 1 else f"multiple of {round_to}"
        raise ValueError(
            f"target.bounds: group {name} of {dense_width} dimensions: no {allowed} lies between least {low or 1} and "
            f"most {high or dense_width}. Loosen the bound{'' if round_to == 1 else ', or lower target.round_to'}."
        )
    return least, most


def _to_dimensions(size: int | float, dense_width: int) -> float:
    return size if isinstance(size, int) else size * dense_width


def _round_up(width: int, round_to: int) -> int:
    return -(-width // round_to) * round_to
