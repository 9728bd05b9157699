"""Select the groups that a recipe's target asks for."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from torch import nn

from compress.modules import modules_of, scripted_modules
from compress.recipe import NamePattern, Target

from .atom_classes import GroupKind
from .group import Group
from .model_groups import Groups


class AttentionMode(str, Enum):
    """Values of `target.attention` other than true and false."""

    QK = "qk"  # queries and keys have scores of their own
    V = "v"  # values have scores of their own
    PER_HEAD = "per_head"  # every head has scores of its own
    HEADS = "heads"  # whole heads are cut


def attention_modes(target: Target) -> set[AttentionMode]:
    """Return how finely attention is cut; empty for plain true or false."""
    modes = target.attention if isinstance(target.attention, tuple) else ()
    return {AttentionMode(mode) for mode in modes}


def included_modules(model: nn.Module, target: Target) -> set[str] | None:
    """Return the modules that `target.include` names; None if it is empty or names groups, which are not known yet."""
    names = _module_names(model)
    try:
        return _matching_names(target.include, names, "target.include") if target.include else None
    except ValueError:
        return None


def _module_names(model: nn.Module) -> list[str]:
    return [name for name in [*modules_of(model), *scripted_modules(model)] if name]


def select_groups_(groups: Groups, model: nn.Module, target: Target) -> None:
    """Refuse all groups that the target does not ask for.

    Raises:
        ValueError: A name in `include` or `exclude` matches no module and no group.
    """
    names = _module_names(model)
    names += [g.name for g in groups if g.name not in names]
    include = _matching_names(target.include, names, "target.include")
    exclude = _matching_names(target.exclude, names, "target.exclude")
    _refuse_kinds_(groups, target)
    _refuse_attention_parts_(groups, model, attention_modes(target) & {AttentionMode.QK, AttentionMode.V})
    if target.include:
        groups.refuse([g for g in groups if not _is_written_in(g, include)], "not in target.include")
    groups.refuse([g for g in groups if _is_written_in(g, exclude)], "in target.exclude")
    groups.refuse([g for g in groups if g.width == 1], "has one dimension only")
    round_to = 1 if target.round_to == "auto" else target.round_to  # auto leaves every group several widths
    narrow = [g.name for g in groups if g.width <= round_to > 1 and g.kind != GroupKind.HEADS.label]
    if narrow:
        groups.notes.append(
            f"{len(narrow)} groups have no more than target.round_to = {target.round_to} dimensions, {narrow[0]} among "
            "them, and stay whole; lower round_to"
        )


def _refuse_kinds_(groups: Groups, target: Target) -> None:
    """Refuse groups whose kind the target does not ask for."""
    whole_heads = AttentionMode.HEADS in attention_modes(target)
    wanted = {
        GroupKind.CHANNELS: target.channels,
        GroupKind.RESIDUAL: target.residual,
        GroupKind.ATTENTION: bool(target.attention) and not whole_heads,
        GroupKind.MLP: bool(target.mlp) or target.channels,
        GroupKind.HEADS: whole_heads,
        GroupKind.EMBEDDING: target.embedding,
        GroupKind.SELECTION: target.selection,
    }
    for kind in GroupKind:
        if not wanted[kind]:
            groups.refuse([g for g in groups if g.kind == kind.label], f"target.{kind.label} is off")


def gate_before_activation_(groups: Groups) -> list[str]:
    """Move the gates of MLPs to the rows and biases that write the hidden dimensions; return the names of the groups.

    Such a gate multiplies the input of the activation function: sigma(x W1 A) W2 in the thesis (4.3.2). Whether a
    score of zero removes the dimension is left to verification: the function must map 0 to 0.
    """
    moved = [g.name for g in groups if g.kind == GroupKind.MLP.label and not g.gated_on_output]
    groups.offered = [
        replace(group, slots=tuple(replace(s, gated=not s.is_input) for s in group.slots), gated_on_output=True)
        if group.name in moved
        else group
        for group in groups.offered
    ]
    return moved


def explain_refused_gates_(groups: Groups, names: list[str]) -> None:
    """Say of groups whose gates were moved and that were refused since how else they can be scored."""
    groups.refused = [
        replace(
            group,
            reason="cannot be scored in front of its activation function, where a score of zero does not remove it "
            f"({group.reason}); mlp: true scores the layer that reads it",
        )
        if group.name in names
        else group
        for group in groups.refused
    ]


def _refuse_attention_parts_(groups: Groups, model: nn.Module, wanted: set[AttentionMode]) -> None:
    """If queries and keys, or values, are cut on their own, refuse all other groups of attention."""
    if not wanted:
        return
    attention = [g for g in groups if g.kind == GroupKind.ATTENTION.label]
    for group in [g for g in attention if g.attention_part == "qkv"]:
        module_class = type(model.get_submodule(group.name.partition(":")[0].rpartition(".")[0])).__name__
        groups.refuse(
            [group],
            f"{module_class} uses one width for queries, keys and values, so they cannot be scored separately. "
            f"Write a compact form of {module_class} to cut it: see compress/modules/compact_forms.py",
        )
    for part in {AttentionMode.QK, AttentionMode.V} - wanted:
        groups.refuse([g for g in attention if g.attention_part == part.value], f"target.attention has no {part.value}")


def _is_written_in(group: Group, modules: set[str]) -> bool:
    """Return whether a group is written in one of these modules or below one."""
    paths = {group.name} | {slot.tensor.rpartition(".")[0] for slot in group.output_slots}
    return any(path == m or path.startswith(f"{m}.") for path in paths for m in modules)


def _matching_names(patterns: Sequence[str], names: Sequence[str], recipe_key: str) -> set[str]:
    """Return the names that match full names or `re:` patterns."""
    matching: set[str] = set()
    for pattern in patterns:
        matches = NamePattern(pattern).matches
        hits = {name for name in names if matches(name)}
        if not hits:
            near = difflib.get_close_matches(pattern.removeprefix("re:"), names, n=3, cutoff=0.3)
            raise ValueError(
                f"{recipe_key}: {pattern!r} matches no module of the model"
                + (f"; the nearest names are {', '.join(near)}" if near else "")
                + ". Give a module's full name, or re: and a regular expression for the whole name."
            )
        matching |= hits
    return matching
