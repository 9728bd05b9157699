"""Search: how the importance of each dimension is found. Larger is kept."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ..groups import Groups

Method = Callable[[nn.Module, Groups, int], dict[str, Tensor]]
METHODS: dict[str, Method] = {}


def method(name: str) -> Callable[[Method], Method]:
    def add(function: Method) -> Method:
        METHODS[name] = function
        return function

    return add


def importance(name: str, model: nn.Module, groups: Groups, seed: int = 0) -> dict[str, Tensor]:
    """The importance of every dimension of every group, by a method that needs no data."""
    return METHODS[name](model, groups, seed)


from . import magnitude, random  # noqa: E402, F401
