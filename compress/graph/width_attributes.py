"""Integer attributes of modules, such as `out_channels`, that must follow the widths of their tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from compress.modules import modules_of

from .atoms import Atoms, GroupedConv, SizeHint
from .axes import Axes
from .group import WidthAttribute

# There may be as many heads as a head has dimensions, so attributes are told apart by the ends of their names.
HEAD_COUNT_NAMES = ("heads", "nhead", "n_head", "num_head")
HEAD_WIDTH_NAMES = ("dim", "size", "width", "channels", "features")


class _AttributeCollector:
    """Collect attributes that exist on their module and whose tensor dimension has an axis."""

    def __init__(self, modules: dict[str, nn.Module], axes: Axes) -> None:
        self.modules, self.axes = modules, axes
        self.attributes: list[WidthAttribute] = []

    def add(self, module: str, name: str, tensor: str, dim: int, multiplier: int = 1, divisor: int = 1) -> None:
        owner, axis = self.modules[module], self.axes.number_of_key.get((tensor, dim))
        if axis is not None and (name in vars(owner) or hasattr(type(owner), name)):
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


def hinted_attributes(
    model: nn.Module, hints: Sequence[SizeHint], axes: Axes, known: Sequence[WidthAttribute]
) -> list[WidthAttribute]:
    """Return integer attributes of modules that equal a size their code used, except for those already known."""
    modules = modules_of(model)
    known_names = {(attribute.module, attribute.name) for attribute in known}
    hinted: dict[tuple[str, str], WidthAttribute] = {}
    for hint in hints:
        for name, value in vars(modules[hint.module]).items() if hint.module in modules else ():
            key = (hint.module, name)
            if type(value) is not int or value != hint.size or key in known_names:
                continue
            counts_heads = hint.name_part in name and not name.endswith(HEAD_WIDTH_NAMES)
            if counts_heads if hint.name_part else not name.endswith(HEAD_COUNT_NAMES):
                hinted.setdefault(key, WidthAttribute(hint.module, name, axes.number(hint.atom_ids)))
    return list(hinted.values())
