"""Residual branches that nothing is left of: what gives their constant, and how they are taken out.

Where every dimension that a branch's last layer reads is dropped, the layer gives its bias, whatever comes in. Then
that layer becomes a `Blank`, the layers before it nothing at all, and attention is its last layer alone. What stays has
its name, so a saved network fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from .groups import Group, Groups

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BLANK, THIN, IDENTITY, ONLY, PAIR = "blank", "thin", "identity", "only", "pair"


class Blank(nn.Module):
    """A linear layer or a convolution that reads nothing: its bias, in the shape that the layer would give."""

    def __init__(self, layer: nn.Module, thin: bool = False) -> None:
        super().__init__()
        linear = isinstance(layer, nn.Linear)
        self.channels = 1 if thin else int(layer.out_features if linear else layer.out_channels)  # type: ignore[arg-type]
        self.bias: nn.Parameter | None = None if thin else layer.bias  # type: ignore[assignment]
        self.window: list[tuple[int, int, int]] = []  # of each spatial dimension: reach, stride, padding
        if not linear:
            parts: Any = layer
            rank = len(parts.kernel_size)
            padding = (0,) * rank if parts.padding == "valid" else parts.padding
            reach = [d * (k - 1) for d, k in zip(parts.dilation, parts.kernel_size, strict=True)]
            both = reach if padding == "same" else [2 * p for p in padding]
            self.window = list(zip(reach, parts.stride, both, strict=True))

    def forward(self, x: Tensor) -> Tensor:
        bias = x.new_zeros(self.channels) if self.bias is None else self.bias.to(x.dtype)
        if not self.window:
            return bias.expand(*x.shape[:-1], len(bias)).contiguous()
        rank = len(self.window)
        sizes = [
            (s + pad - reach - 1) // stride + 1
            for s, (reach, stride, pad) in zip(x.shape[-rank:], self.window, strict=True)
        ]
        return bias.view(-1, *[1] * rank).expand(*x.shape[: -rank - 1], len(bias), *sizes).contiguous()


class Only(nn.Module):
    """Attention of which the last layer is left, on the first of its inputs."""

    def __init__(self, name: str, layer: nn.Module, pair: bool) -> None:
        super().__init__()
        self.name, self.pair = name, pair
        self.add_module(name, Blank(layer))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else next(iter(kwargs.values()))
        out = self.get_submodule(self.name)(x)
        return (out, None) if self.pair else out


def removal(model: nn.Module, group: Group, pairs: Iterable[str]) -> dict[str, str] | None:
    """What becomes of each module if all of a branch's group goes; None if that cannot be done.

    `pairs` are the modules that return two things.
    """
    exits = {slot.tensor.rpartition(".")[0] for slot in group.slots if slot.column}
    owners = {slot.tensor.rpartition(".")[0] for slot in group.slots}
    if not group.branch or not all(_plain(model.get_submodule(path)) for path in exits):
        return None
    if group.kind in ("attention", "heads"):
        paths = [path.split(".") for path in owners]
        common = [parts[0] for parts in zip(*paths, strict=False) if len(set(parts)) == 1]
        module, last = ".".join(common), next(iter(exits))
        inside = last.removeprefix(f"{module}.")
        if not common or len(exits) > 1 or "." in inside or inside == last:
            return None
        return {module: f"{PAIR if module in set(pairs) else ONLY} {inside}"}
    return _layers(model, owners, exits)


def _layers(model: nn.Module, owners: set[str], exits: set[str]) -> dict[str, str] | None:
    found = {}
    for path in owners:
        layer = model.get_submodule(path)
        norm = isinstance(layer, nn.modules.batchnorm._NormBase)
        if not norm and not _plain(layer):
            return None
        found[path] = BLANK if path in exits else IDENTITY if norm else THIN
    return found


def _plain(layer: nn.Module) -> bool:
    """Whether a layer's forward is torch's own."""
    return any(isinstance(layer, kind) and type(layer).forward is kind.forward for kind in (nn.Linear, *CONVS))


def unread(model: nn.Module, groups: Groups, gone: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """The groups that nobody reads once these modules are taken out, and what becomes of theirs."""

    def out(path: str) -> bool:
        return any(path == p or path.startswith(f"{p}.") for p in gone)

    found: dict[str, dict[str, str]] = {}
    for group in groups:
        owners = {slot.tensor.rpartition(".")[0] for slot in group.slots}
        readers = {slot.tensor.rpartition(".")[0] for slot in group.slots if slot.column}
        if group.kind in ("residual", "embedding") or not all(map(out, readers or owners)):
            continue
        rest = _layers(model, {path for path in owners if not out(path)}, set())
        if rest is not None:
            found[group.name] = rest
    return found


def survives(name: str, gone: Mapping[str, str]) -> bool:
    """Whether a tensor is still there when these modules are taken out: the biases of last layers are."""
    for path, how in gone.items():
        if name.startswith(f"{path}."):
            word, _, inside = how.partition(" ")
            kept = {BLANK: "bias", ONLY: f"{inside}.bias", PAIR: f"{inside}.bias"}.get(word)
            return name == f"{path}.{kept}"
    return True


def along_with(model: nn.Module, groups: Groups, name: str) -> int:
    """Parameters that go with a group's branch and have none of its dimensions, such as tables of positions."""
    branch = groups.branches.get(name)
    if branch is None:
        return 0
    sliced = {slot.tensor for group in (name, *branch.unread) for slot in groups[group].slots}
    rest = [(n, p) for n, p in model.named_parameters() if n not in sliced and not survives(n, branch.modules)]
    return sum(p.numel() for _, p in rest)


def remove_(model: nn.Module, gone: Mapping[str, str]) -> None:
    """Take branches out, in place."""
    for path, how in gone.items():
        word, _, name = how.partition(" ")
        module = model.get_submodule(path)
        new: nn.Module
        if word in (ONLY, PAIR):
            new = Only(name, module.get_submodule(name), word == PAIR)
        elif word == IDENTITY:
            new = nn.Identity()
        else:
            new = Blank(module, thin=word == THIN)
        model.set_submodule(path, new.train(module.training))
