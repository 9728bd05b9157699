"""Remove residual branches of which no dimension is kept.

If every input of a branch's last layer is dropped, the layer returns its bias for any input. The layer then becomes a
`ConstantLayer`, the layers before it are emptied, and an attention module keeps its output layer only. Modules that
remain keep their names, so a saved state dict fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, NamedTuple

from torch import Tensor, nn

from compress.graph import Group, Groups, Index
from compress.modules import ForwardCheck, is_plain_layer


class RemovalKind(str, Enum):
    """The replacement of a module of a removed branch; the values are stored in plan.json."""

    CONSTANT = "blank"  # the last layer of a branch: its bias
    SINGLE_CHANNEL = "thin"  # a layer before the last: one channel of zeros
    IDENTITY = "identity"  # a norm
    OUTPUT_LAYER = "only"  # attention: its output layer only
    OUTPUT_LAYER_PAIR = "pair"  # the same for attention that returns (output, weights)


class Removal(NamedTuple):
    """The replacement of one module; plans store it as text: "blank", "only proj"."""

    kind: RemovalKind
    output_layer: str = ""  # its name inside the module, for attention

    @classmethod
    def parse(cls, text: str) -> Removal:
        """Read a removal as a plan stores it.

        Raises:
            ValueError: the kind is unknown.
        """
        kind, _, output_layer = text.partition(" ")
        return cls(RemovalKind(kind), output_layer)

    @property
    def text(self) -> str:
        """Return the removal as a plan stores it."""
        return f"{self.kind.value} {self.output_layer}" if self.output_layer else self.kind.value

    @property
    def is_attention(self) -> bool:
        """Return whether the module is attention, of which the output layer remains."""
        return self.kind in (RemovalKind.OUTPUT_LAYER, RemovalKind.OUTPUT_LAYER_PAIR)


class ConstantLayer(nn.Module):
    """Return the bias of a linear layer or convolution, in the output shape of that layer."""

    zeros: Tensor

    def __init__(self, layer: nn.Module, single_channel: bool = False) -> None:
        super().__init__()
        weight: Any = layer.weight
        self.bias: nn.Parameter | None = None if single_channel else layer.bias  # type: ignore[assignment]
        if self.bias is None:  # a tensor, not its width as a number, so that later cuts find and slice it
            self.register_buffer("zeros", weight.new_zeros(1 if single_channel else len(weight)), persistent=False)
        self.window: list[tuple[int, int, int]] = []  # of each spatial dimension: reach, stride, padding
        if not isinstance(layer, nn.Linear):
            conv: Any = layer
            rank = len(conv.kernel_size)
            padding = (0,) * rank if conv.padding == "valid" else conv.padding
            reach = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
            total_padding = reach if padding == "same" else [2 * p for p in padding]
            self.window = list(zip(reach, conv.stride, total_padding, strict=True))

    def forward(self, x: Tensor) -> Tensor:
        bias = (self.zeros if self.bias is None else self.bias).to(x.dtype)
        if not self.window:
            return bias.expand(*x.shape[:-1], len(bias)).contiguous()
        rank = len(self.window)
        sizes = [
            (size + padding - reach - 1) // stride + 1
            for size, (reach, stride, padding) in zip(x.shape[-rank:], self.window, strict=True)
        ]
        return bias.view(-1, *[1] * rank).expand(*x.shape[: -rank - 1], len(bias), *sizes).contiguous()


class OutputLayerOnly(nn.Module):
    """Attention of which only the output layer is left; it takes the shape of its output from the first input."""

    def __init__(self, name: str, layer: nn.Module, returns_pair: bool) -> None:
        super().__init__()
        self.name, self.returns_pair = name, returns_pair
        self.add_module(name, ConstantLayer(layer))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else next(iter(kwargs.values()))
        out = self.get_submodule(self.name)(x)
        return (out, None) if self.returns_pair else out


def branch_removal(model: nn.Module, group: Group, pairs: Iterable[str]) -> dict[str, str] | None:
    """Return the removal of each module of the branch that `group` spans, or None if it cannot be removed.

    Args:
        model: the dense model.
        group: a group of which nothing is kept.
        pairs: the modules that return two values.
    """
    last_layers = {slot.tensor.rpartition(".")[0] for slot in group.slots if slot.is_input}
    owners = {slot.tensor.rpartition(".")[0] for slot in group.slots}
    if not group.can_drop_branch or not all(_uses_torch_forward(model.get_submodule(path)) for path in last_layers):
        return None
    if group.kind in ("attention", "heads"):
        paths = [path.split(".") for path in owners]
        common = [parts[0] for parts in zip(*paths, strict=False) if len(set(parts)) == 1]
        module, last = ".".join(common), next(iter(last_layers))
        output_layer = last.removeprefix(f"{module}.")
        if not common or len(last_layers) > 1 or "." in output_layer or output_layer == last:
            return None
        kind = RemovalKind.OUTPUT_LAYER_PAIR if module in set(pairs) else RemovalKind.OUTPUT_LAYER
        return {module: Removal(kind, output_layer).text}
    return _layer_removals(model, owners, last_layers)


def _layer_removals(model: nn.Module, paths: set[str], last_layers: set[str]) -> dict[str, str] | None:
    """Return the removal of each of these layers and norms, or None if one of them cannot be removed."""
    removals = {}
    for path in paths:
        layer = model.get_submodule(path)
        is_norm = isinstance(layer, nn.modules.batchnorm._NormBase)
        if not is_norm and not _uses_torch_forward(layer):
            return None
        if path in last_layers:
            kind = RemovalKind.CONSTANT
        else:
            kind = RemovalKind.IDENTITY if is_norm else RemovalKind.SINGLE_CHANNEL
        removals[path] = Removal(kind).text
    return removals


def _uses_torch_forward(layer: nn.Module) -> bool:
    """Return whether this is a linear layer or convolution whose `forward` is torch's own."""
    return is_plain_layer(layer, forward=ForwardCheck.CLASS, grouped=True)


def unread_groups(model: nn.Module, groups: Groups, removed: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the groups that no layer reads without the removed modules, each with the removals of its own layers."""

    def is_removed(path: str) -> bool:
        return any(path == module or path.startswith(f"{module}.") for module in removed)

    unread: dict[str, dict[str, str]] = {}
    for group in groups:
        owners = {slot.tensor.rpartition(".")[0] for slot in group.slots}
        readers = {slot.tensor.rpartition(".")[0] for slot in group.slots if slot.is_input}
        if group.kind in ("residual", "embedding") or not all(map(is_removed, readers or owners)):
            continue
        removals = _layer_removals(model, {path for path in owners if not is_removed(path)}, set())
        if removals is not None:
            unread[group.name] = removals
    return unread


def is_kept_tensor(name: str, removed: Mapping[str, str]) -> bool:
    """Return whether the tensor `name` remains when these modules are removed: biases of last layers do."""
    for path, text in removed.items():
        if name.startswith(f"{path}."):
            removal = Removal.parse(text)
            if removal.is_attention:
                return name == f"{path}.{removal.output_layer}.bias"
            return removal.kind is RemovalKind.CONSTANT and name == f"{path}.bias"
    return True


def parameters_removed_with_branch(model: nn.Module, groups: Groups, name: str) -> int:
    """Count the parameters removed with a group's branch that no group slices, such as position bias tables."""
    branch = groups.branches.get(name)
    if branch is None:
        return 0
    sliced = {slot.tensor for group in (name, *branch.unread_groups) for slot in groups[group].slots}
    return sum(
        parameter.numel()
        for tensor, parameter in model.named_parameters()
        if tensor not in sliced and not is_kept_tensor(tensor, branch.modules)
    )


def constant_layers(removed: Mapping[str, str]) -> list[str]:
    """Return the paths of the layers that become a `ConstantLayer` of the same width if these modules are removed."""
    paths = []
    for path, text in removed.items():
        removal = Removal.parse(text)
        if removal.is_attention:
            paths.append(f"{path}.{removal.output_layer}")
        elif removal.kind is RemovalKind.CONSTANT:
            paths.append(path)
    return paths


def remove_modules_(model: nn.Module, removed: Mapping[str, str], slices: Mapping[str, Mapping[int, Index]]) -> None:
    """Replace the modules of removed branches, in place.

    Args:
        model: the model.
        removed: the removal of each module.
        slices: the kept positions of every tensor that is cut, by dimension; the streams that the branches end in may
            be cut as well.
    """
    for path, text in removed.items():
        removal = Removal.parse(text)
        module = model.get_submodule(path)
        new: nn.Module
        if removal.is_attention:
            layer = module.get_submodule(removal.output_layer)
            new = OutputLayerOnly(removal.output_layer, layer, removal.kind is RemovalKind.OUTPUT_LAYER_PAIR)
        elif removal.kind is RemovalKind.IDENTITY:
            new = nn.Identity()
        else:
            new = ConstantLayer(module, single_channel=removal.kind is RemovalKind.SINGLE_CHANNEL)
        model.set_submodule(path, new.train(module.training))
    for path in constant_layers(removed):
        layer, kept_rows = model.get_submodule(path), slices.get(f"{path}.weight", {}).get(0)
        if isinstance(layer, ConstantLayer) and layer.bias is None and kept_rows is not None:
            layer.zeros = layer.zeros.new_zeros(len(kept_rows))
