"""Integers that remember which attributes of modules they were computed from.

While a model is traced, the integer attributes of its modules are `AttributeSize`s. If the model's code reshapes or
splits a tensor by one (`x.view(B, N, self.num_heads, self.head_dim)`), the trace knows which attribute has to follow
which width, and no attribute is guessed from its value.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from compress.modules import modules_of

AtomIds = NDArray[np.int64]


class Attribute(NamedTuple):
    """An integer attribute of a module, or one item of an attribute that is a list or tuple of integers."""

    module: str
    name: str
    item: int | None = None


class AttributeSize(int):
    """An integer computed from attributes of modules."""

    attributes: frozenset[Attribute]
    is_plain: bool  # it is the attribute itself, not a sum or product
    numeric_uses: set[Attribute]  # attributes that the code computes with other than in integers; shared by all

    @classmethod
    def of(
        cls, value: int, attributes: frozenset[Attribute], numeric_uses: set[Attribute], is_plain: bool = False
    ) -> AttributeSize:
        """Return an integer with its origin."""
        size = cls(value)
        size.attributes, size.numeric_uses, size.is_plain = attributes, numeric_uses, is_plain
        return size

    def _computed(self, value: Any, other: Any) -> Any:
        if type(value) is not int:
            return value
        attributes = self.attributes | (other.attributes if isinstance(other, AttributeSize) else frozenset())
        return AttributeSize.of(value, attributes, self.numeric_uses)

    def _as_number(self) -> int:
        self.numeric_uses.update(self.attributes)
        return int.__int__(self)

    def __add__(self, other: Any) -> Any:
        return self._computed(int.__add__(self, other), other)

    def __sub__(self, other: Any) -> Any:
        return self._computed(int.__sub__(self, other), other)

    def __mul__(self, other: Any) -> Any:
        return self._computed(int.__mul__(self, other), other)

    def __floordiv__(self, other: Any) -> Any:
        return self._computed(int.__floordiv__(self, other), other)

    def __radd__(self, other: Any) -> Any:
        return self._computed(int.__radd__(self, other), other)

    def __rsub__(self, other: Any) -> Any:
        return self._computed(int.__rsub__(self, other), other)

    def __rmul__(self, other: Any) -> Any:
        return self._computed(int.__rmul__(self, other), other)

    def __rfloordiv__(self, other: Any) -> Any:
        return self._computed(int.__rfloordiv__(self, other), other)

    def __pow__(self, other: Any, modulo: Any = None) -> Any:
        return pow(self._as_number(), other, modulo)

    def __truediv__(self, other: Any) -> Any:
        return self._as_number() / other

    def __rtruediv__(self, other: Any) -> Any:
        return other / self._as_number()

    def __float__(self) -> float:
        return float(self._as_number())

    def __lt__(self, other: Any) -> Any:
        return int.__lt__(self._as_number(), other)

    def __le__(self, other: Any) -> Any:
        return int.__le__(self._as_number(), other)

    def __gt__(self, other: Any) -> Any:
        return int.__gt__(self._as_number(), other)

    def __ge__(self, other: Any) -> Any:
        return int.__ge__(self._as_number(), other)

    def __deepcopy__(self, memo: Any) -> int:
        return int.__int__(self)

    def __reduce__(self) -> Any:
        return int, (int.__int__(self),)


class SizeUse(NamedTuple):
    """A size that the model's code passed to an operator, and the atoms of the dimension that has this size."""

    size: AttributeSize
    atom_ids: AtomIds | None  # None: the dimension is fixed


@contextlib.contextmanager
def tracked_attributes(model: nn.Module, prefix: str = "") -> Iterator[set[Attribute]]:
    """Replace the integer attributes of a shared copy's modules by `AttributeSize`s, for the time of the context.

    Yields the attributes that the code computes with other than in integers, such as `self.dim ** -0.5`. The layers of
    torch are left as they are: their attributes follow from their weights.
    """
    numeric_uses: set[Attribute] = set()
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    for path, module in modules_of(model).items():
        if type(module).__module__.startswith("torch.") or isinstance(module, torch.jit.ScriptModule):
            continue
        for name, value in list(vars(module).items()):
            attribute = Attribute((prefix + path).rstrip("."), name)
            if type(value) is int:
                tracked: Any = AttributeSize.of(value, frozenset({attribute}), numeric_uses, is_plain=True)
            elif type(value) in (list, tuple) and value and all(type(item) is int for item in value):
                items = (attribute._replace(item=number) for number in range(len(value)))
                tracked = type(value)(
                    AttributeSize.of(item, frozenset({origin}), numeric_uses, is_plain=True)
                    for item, origin in zip(value, items, strict=True)
                )
            else:
                continue
            replaced.append((vars(module), name, value))
            vars(module)[name] = tracked
    try:
        yield numeric_uses
    finally:
        for table, name, value in replaced:
            table[name] = value


VIEWS = frozenset({Tensor.view, Tensor.reshape, torch.reshape, Tensor.expand})
UNFLATTENS = frozenset({Tensor.unflatten, torch.unflatten})


def attribute_sizes_in(args: Any, kwargs: Any) -> list[AttributeSize]:
    """Return the `AttributeSize`s among the arguments of a function, their items, and the bounds of slices."""
    sizes: list[AttributeSize] = []
    for arg in (*args, *(kwargs or {}).values()):
        for item in arg if type(arg) in (list, tuple, torch.Size) else (arg,):
            bounds = (item.start, item.stop, item.step) if type(item) is slice else (item,)
            sizes += [value for value in bounds if type(value) is AttributeSize]
    return sizes


def uses_by_position(
    func: Any, args: Any, result: Any, atoms_of: Callable[[Tensor], list[AtomIds | None]]
) -> list[SizeUse] | None:
    """Return the uses of sizes in a view, whose arguments are the sizes of the result; None for other functions.

    A size of -1 stands for whatever is left, so it fits any width and follows none.
    """
    if func in VIEWS:
        sizes = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
        first = 0
    elif func in UNFLATTENS and len(args) > 2:
        sizes, first = args[2], args[1] % args[0].ndim
    else:
        return None
    atom_ids = atoms_of(result)
    return [
        SizeUse(size, atom_ids[first + number])
        for number, size in enumerate(sizes)
        if type(size) is AttributeSize and first + number < len(atom_ids) and size != -1
    ]
