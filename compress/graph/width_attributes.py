"""Integer attributes of modules, such as `out_channels`, that must follow the widths of their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import nn

from compress.modules import modules_of

from .atoms import AtomIds, Atoms, GroupedConv
from .attribute_sizes import Attribute
from .axes import Axes
from .group import WidthAttribute

HEAD_COUNT_NAMES = ("heads", "nhead", "n_head", "num_head")  # attributes that count heads may happen to equal a width


class _AttributeCollector:
    """Collect attributes that exist on their module and whose tensor dimension has an axis."""

    def __init__(self, modules: dict[str, nn.Module], axes: Axes) -> None:
        self.modules, self.axes = modules, axes
        self.attributes: list[WidthAttribute] = []

    def add(self, module: str, name: str, tensor: str, dim: int, multiplier: int = 1, divisor: int = 1) -> None:
        owner, axis = self.modules[module], self.axes.number_of_key.get((tensor, dim))
        if axis is not None and vars(owner).get(name) == self.axes.atom_ids[axis].size * multiplier // divisor:
            self.attributes.append(WidthAttribute(module, name, axis, multiplier, divisor))

    def add_conv(self, path: str, module: nn.modules.conv._ConvNd, tensor: str, grouped: GroupedConv) -> None:
        rows, columns = ("in", "out") if module.transposed else ("out", "in")
        size = module.weight.shape[0]
        self.add(path, f"{rows}_channels", tensor, 0)
        if grouped.cut_whole_groups:
            self.add(path, f"{columns}_channels", tensor, 0, module.weight.shape[1] * grouped.groups, size)
            self.add(path, "groups", tensor, 0, grouped.groups, size)
        else:
            self.add(path, f"{columns}_channels", tensor, 1, grouped.groups)

    def add_others(self, path: str, module: nn.Module, tensor: str) -> None:
        for name in ("num_features", "num_parameters", "num_channels"):
            self.add(path, name, tensor, 0)
        if isinstance(module, nn.Embedding):
            self.add(path, "embedding_dim", tensor, 1)
        if isinstance(module, nn.GroupNorm):
            self.add(path, "num_groups", tensor, 0, module.num_groups, module.num_channels)


def layer_attributes(model: nn.Module, atoms: Atoms, axes: Axes) -> list[WidthAttribute]:
    """Return the attributes in which torch's own layers store their shapes."""
    modules = modules_of(model)
    collector = _AttributeCollector(modules, axes)
    owners: dict[int, list[str]] = {}  # tied layers share a weight and have attributes of their own
    for name, module in modules.items():
        if module._parameters.get("weight") is not None:
            owners.setdefault(id(module._parameters["weight"]), []).append(name)
    for tensor in dict.fromkeys(name for name, _ in axes.number_of_key):
        path, _, leaf = tensor.rpartition(".")
        for owner in owners.get(id(modules[path]._parameters.get("weight")), [path]):
            module = modules[owner]
            if isinstance(module, nn.modules.conv._ConvNd) and leaf == "weight":
                collector.add_conv(owner, module, tensor, atoms.grouped_convs.get(tensor, GroupedConv(1, False)))
            elif isinstance(module, nn.Linear) and leaf == "weight":
                collector.add(owner, "out_features", tensor, 0)
                collector.add(owner, "in_features", tensor, 1)
            elif leaf in ("weight", "running_mean"):
                collector.add_others(owner, module, tensor)
    return collector.attributes


class FollowedWidth(NamedTuple):
    """The dimension that an attribute follows: `multiplier * its size / divisor`."""

    atom_ids: AtomIds
    multiplier: int = 1
    divisor: int = 1


def resolve_size_uses_(atoms: Atoms) -> dict[Attribute, FollowedWidth]:
    """Return the dimension that each attribute follows which the model's code passes to operators as a size.

    An attribute has one value. If several dimensions have it as their size, they keep equal numbers of positions: their
    atoms are joined. If one of them is fixed, all are frozen.
    """
    plain: dict[Attribute, list[AtomIds | None]] = {}
    for use in atoms.size_uses:
        if use.size.is_plain:
            plain.setdefault(next(iter(use.size.attributes)), []).append(use.atom_ids)
    followed: dict[Attribute, FollowedWidth] = {}
    for attribute, used_for in plain.items():
        dims = [atom_ids for atom_ids in used_for if atom_ids is not None]
        if dims and attribute in atoms.numeric_attributes:
            atoms.freeze(
                dims[0], f"has its size in `{attribute.name}` of {attribute.module}, which is used otherwise, too"
            )
        for other in dims[1:]:
            atoms.join(dims[0], other)
        if dims and len(dims) < len(used_for):
            atoms.freeze(dims[0], f"has the same size as a fixed dimension, `{attribute.name}` of {attribute.module}")
        elif dims:
            followed[attribute] = FollowedWidth(dims[0])
    for use in atoms.size_uses:  # sums and products with one attribute that is known by nothing else
        known = plain.keys() | atoms.numeric_attributes
        unknown = [attribute for attribute in use.size.attributes if attribute not in known]
        if use.atom_ids is not None and len(unknown) == 1 and unknown[0] not in followed:
            followed[unknown[0]] = FollowedWidth(use.atom_ids, 0, use.atom_ids.size)  # in proportion to its own value
    return followed


def size_attributes(model: nn.Module, followed: Mapping[Attribute, FollowedWidth], axes: Axes) -> list[WidthAttribute]:
    """Return the attributes that the model's code passes to operators as sizes."""
    modules = modules_of(model)
    attributes = []
    for (module, name, item), width in followed.items():
        value = vars(modules[module]).get(name)
        if value is None:  # an attribute of the compact form, which the dense module lacks
            continue
        multiplier = width.multiplier or (value if item is None else value[item])
        attributes.append(WidthAttribute(module, name, axes.number(width.atom_ids), multiplier, width.divisor, item))
    return attributes


def unused_attributes(
    model: nn.Module, atoms: Atoms, roots: AtomIds, axes: Axes, known: Sequence[WidthAttribute]
) -> list[WidthAttribute]:
    """Return attributes that equal a size in their module's code, which the traced path does not use as a size.

    Other code may: `forward` in export mode, or a method that is not traced. An attribute that equals the sizes of
    dimensions in different groups, or that the code computes with, is left alone.
    """
    modules = modules_of(model)
    excluded = {(attribute.module, attribute.name) for attribute in known}
    excluded |= {(attribute.module, attribute.name) for attribute in atoms.numeric_attributes}
    excluded |= {(a.module, a.name) for use in atoms.size_uses for a in use.size.attributes}
    hints: dict[tuple[str, int], list[AtomIds]] = {}
    for hint in atoms.size_hints:
        hints.setdefault((hint.module, hint.size), []).append(hint.atom_ids)
    attributes = []
    for (path, size), arrays in hints.items():
        classes = np.sort(roots[arrays[0]])
        if path not in modules or any(not np.array_equal(np.sort(roots[a]), classes) for a in arrays[1:]):
            continue
        for name, value in vars(modules[path]).items():
            is_count = name.endswith(HEAD_COUNT_NAMES)
            if type(value) is int and value == size and not is_count and (path, name) not in excluded:
                attributes.append(WidthAttribute(path, name, axes.number(arrays[0])))
    return attributes
