"""Choice: one of several modules, to be chosen by a search.

While it is searched, a choice computes the mixture of its candidates (Liu et al. 2019; Xue 2022, 3.6)

    y = sum_k softmax(scores)_k candidate_k(x)

or, with a switch (Zhou et al. 2019, 4.2), y = switch * sum_k w_k candidate_k(x) with free weights w. After the cut the
chosen candidate stands in its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils import _pytree as pytree

from .traversal import modules_of


class Zero(nn.Module):
    """Return zeros: the operation `none`, which removes an edge."""

    def __init__(self, stride: int = 1) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        return torch.zeros_like(x)


class Choice(nn.Module):
    """A place in a network for one of several candidates, which take the same inputs and return the same shapes.

    >>> block = Choice(conv=nn.Conv2d(8, 8, 3, padding=1), skip=nn.Identity())
    >>> block.scores.shape, block.names
    (torch.Size([2]), ['conv', 'skip'])

    Args:
        shared: name of a group of choices. Within a model, the choices of a group have one tensor of scores, and the
            same candidate is chosen for all of them.
        candidates: the modules to choose from, by name.

    Raises:
        ValueError: there are fewer than two candidates, or a name cannot be used.
        TypeError: a candidate is not a module, or has no name.
    """

    def __init__(self, /, *unnamed: nn.Module, shared: str | None = None, **candidates: nn.Module) -> None:
        super().__init__()
        if unnamed:
            raise TypeError(
                "Choice: expected a name for each candidate, as Choice(conv=..., skip=nn.Identity()); got "
                f"{len(unnamed)} without a name"
            )
        if len(candidates) < 2:
            got = f"only {next(iter(candidates))!r}" if candidates else "none"
            raise ValueError(
                f"Choice: expected two or more candidates, as Choice(conv=..., skip=nn.Identity()); got {got}"
            )
        for name, candidate in candidates.items():
            if not isinstance(candidate, nn.Module):
                raise TypeError(f"Choice: candidate {name}: expected a torch.nn.Module; got {type(candidate).__name__}")
            if not name or "." in name:
                raise ValueError(
                    f"Choice: candidate {name!r}: expected a name without dots, such as 'conv3'; rename it"
                )
            if hasattr(nn.ModuleDict, name):
                raise ValueError(
                    f"Choice: candidate {name!r}: torch.nn.ModuleDict has a method of that name; rename it"
                )
        if shared is not None and (not isinstance(shared, str) or not shared):
            raise ValueError(f"Choice: shared: expected a name such as 'normal.0'; got {shared!r}")
        self.shared = shared
        self.candidates = nn.ModuleDict(candidates)
        device = next((p.device for module in candidates.values() for p in module.parameters()), None)
        self.scores = nn.Parameter(torch.zeros(len(candidates), device=device))
        self.free_weights: nn.Parameter | None = None
        self.switch: nn.Parameter | None = None
        self.offsets: nn.Parameter | None = None
        if shared is not None:
            _tie_in_every_parent()

    @property
    def names(self) -> list[str]:
        """Return the names of the candidates, in the order of the scores."""
        return list(self.candidates)

    @property
    def weights(self) -> Tensor:
        """Return the weight of each candidate in the mixture."""
        if self.free_weights is not None and self.switch is not None:
            weights = self.switch * self.free_weights
        else:
            weights = torch.softmax(self.scores, 0)
        return weights if self.offsets is None else weights + self.offsets

    def attach_switch_(self) -> None:
        """Give this choice a switch and free weights, all 1, in place of the softmax of the scores."""
        self.free_weights = nn.Parameter(torch.ones_like(self.scores))
        self.switch = nn.Parameter(torch.ones_like(self.scores[:1]))

    def remove_switch_(self) -> None:
        """Return to the softmax of the scores."""
        self.free_weights = self.switch = None

    def attach_offsets_(self) -> nn.Parameter:
        """Add zeros to the weights, which nobody trains: their gradient is the cost of each candidate."""
        self.offsets = nn.Parameter(torch.zeros_like(self.scores))
        return self.offsets

    def remove_offsets_(self) -> None:
        """Remove the zeros."""
        self.offsets = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        mixture: Any = None
        first = ""
        for (name, candidate), weight in zip(self.candidates.items(), self.weights, strict=True):
            if isinstance(candidate, Zero):
                continue  # adds nothing
            output = candidate(*args, **kwargs)
            if mixture is None:
                first, mixture = name, self._weighted(output, weight, name)
            elif isinstance(output, Tensor) and isinstance(mixture, Tensor) and output.shape == mixture.shape:
                mixture = mixture + weight.to(output.dtype) * output
            else:
                mixture = self._mix(mixture, output, weight, first, name)
        if mixture is None:  # only zeros
            return next(iter(self.candidates.values()))(*args, **kwargs)
        return mixture

    def _weighted(self, output: Any, weight: Tensor, name: str) -> Any:
        """Multiply the tensors of an output; None stays None, as in what attention returns without its weights.

        Raises:
            TypeError: the candidate returns something else.
        """
        if isinstance(output, Tensor):
            return weight.to(output.dtype) * output
        leaves, structure = pytree.tree_flatten(output)
        for leaf in leaves:
            if leaf is not None and not isinstance(leaf, Tensor):
                raise TypeError(
                    f"Choice of {', '.join(self.names)}: expected tensors, or tuples, lists and dicts of tensors and "
                    f"None; {name} returns a {type(leaf).__name__}"
                )
        scaled = [None if leaf is None else weight.to(leaf.dtype) * leaf for leaf in leaves]
        return pytree.tree_unflatten(scaled, structure)

    def _mix(self, mixture: Any, output: Any, weight: Tensor, first: str, name: str) -> Any:
        """Add a weighted output that is not a single tensor of the same shape.

        Raises:
            ValueError: the candidates return different structures or shapes.
        """
        left, structure = pytree.tree_flatten(mixture)
        right, other = pytree.tree_flatten(self._weighted(output, weight, name))
        if structure != other or any(_shape(a) != _shape(b) for a, b in zip(left, right, strict=True)):
            shapes = [[_shape(leaf) for leaf in side] for side in (left, right)]
            texts = [str(side[0]) if len(side) == 1 else f"a structure of {side}" for side in shapes]
            raise ValueError(
                f"Choice of {', '.join(self.names)}: expected outputs of one shape; {first} returns {texts[0]}, "
                f"{name} returns {texts[1]}. Give them the same channels, stride and padding"
            )
        sums = [None if a is None else a + b for a, b in zip(left, right, strict=True)]
        return pytree.tree_unflatten(sums, structure)

    def extra_repr(self) -> str:
        return f"shared={self.shared!r}" if self.shared is not None else ""


def _shape(leaf: Tensor | None) -> list[int] | None:
    return None if leaf is None else list(leaf.shape)


def choices_of(model: nn.Module) -> dict[str, Choice]:
    """Return the choices of a model by the name of their module."""
    return {path: module for path, module in modules_of(model).items() if isinstance(module, Choice)}


def choice_groups(model: nn.Module) -> dict[str, list[str]]:
    """Return the choices that are made together: the paths of all with one `shared` name, else the path alone."""
    groups: dict[str, list[str]] = {}
    for path, choice in choices_of(model).items():
        groups.setdefault(choice.shared if choice.shared is not None else path, []).append(path)
    return groups


def choose_(model: nn.Module, chosen: Mapping[str, str]) -> nn.Module:
    """Put the chosen candidate of each named choice in its place; the others are removed.

    Args:
        chosen: path of a choice -> name of its candidate.
    """
    choices = choices_of(model)
    replacement: dict[int, nn.Module] = {}
    for path, name in chosen.items():
        candidate = choices[path].candidates[name]
        candidate.training = choices[path].training
        replacement[id(choices[path])] = candidate
    for module in list(modules_of(model).values()):
        for name, child in module._modules.items():
            if id(child) in replacement:
                module._modules[name] = replacement[id(child)]
    return model


def tie_shared_scores_(*modules: nn.Module) -> None:
    """Give the choices of each `shared` group one tensor of scores: that of the first.

    Raises:
        ValueError: choices of one group have different candidates.
    """
    first_of: dict[str, Choice] = {}
    for choice in (choice for module in modules for choice in _shared_choices(module)):
        assert choice.shared is not None
        first = first_of.setdefault(choice.shared, choice)
        if first.names != choice.names:
            raise ValueError(
                f"Choice: shared={choice.shared!r}: expected the same candidates wherever the name is used; got "
                f"{', '.join(first.names)} and {', '.join(choice.names)}"
            )
        if choice.scores is not first.scores:
            choice.scores = first.scores


def _shared_choices(model: nn.Module) -> Iterator[Choice]:
    return (m for m in modules_of(model).values() if isinstance(m, Choice) and m.shared is not None)


_registration_hooks: list[Any] = []  # at most one


def _tie_in_every_parent() -> None:
    """Let modules tie the scores of shared choices when they get a child, from the first shared choice on."""
    if not _registration_hooks:
        _registration_hooks.append(register_module_module_registration_hook(_tie_with_child))


def _tie_with_child(module: nn.Module, name: str, child: nn.Module | None) -> None:
    if isinstance(child, nn.Module) and next(_shared_choices(child), None) is not None:
        tie_shared_scores_(module, child)
