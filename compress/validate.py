"""A plan from a file: nothing in it is believed before it was checked, first by itself and then against the model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from operator import lt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .branches import BLANK, CONVS, IDENTITY, ONLY, PAIR, THIN

if TYPE_CHECKING:
    from .plan import Plan

LARGEST = 1 << 28  # bytes of a plan
WIDEST = 2**31 - 1  # along any dimension


class PlanError(ValueError):
    """A plan that does not fit the model, or a file that is not a plan."""


def read(path: Path) -> Any:
    """The JSON of a file, in which no key stands twice and every number is finite.

    Raises:
        ValueError: it is something else.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError("a key is given twice")
        return found

    def finite(text: str) -> float:
        if not math.isfinite(number := float(text)):
            raise ValueError(f"expected finite numbers; got {text[:20]}")
        return number

    if (size := path.stat().st_size) > LARGEST:
        raise ValueError(f"expected at most {LARGEST >> 20} MB; got {size} bytes")
    try:
        return json.loads(path.read_bytes(), object_pairs_hook=once, parse_float=finite, parse_constant=finite)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def check_form(data: Any, version: int) -> None:
    """
    Raises:
        PlanError: it is no plan of this version, or one that contradicts itself.
    """
    if not isinstance(data, Mapping) or "version" not in data:
        raise PlanError(f"not a plan: expected keys such as version, keep and slices; got {str(data)[:40]}")
    if data["version"] != version or not _whole(data["version"]):
        raise PlanError(f"plan of version {str(data['version'])[:20]}: this library reads version {version}")
    for key in PARTS:
        if key not in data:
            raise PlanError(f"not a plan: {key} is missing")
        if not isinstance(data[key], list if key in ("scales", "indices") else dict):
            raise PlanError(f"not a plan: {key}: expected a table; got {str(data[key])[:40]}")
    for key, part in PARTS.items():
        for name in data[key] if isinstance(data[key], dict) else ():
            if name.startswith("/") or ".." in name or "\\" in name or not name.isprintable():
                raise PlanError(f"{key}: expected names of modules and tensors; got {name[:80]!r}")
        for name, value in data[key].items() if isinstance(data[key], dict) else enumerate(data[key]):
            try:
                right = part(data, name, value)
            except (TypeError, KeyError, IndexError, ValueError, AttributeError):
                right = False  # of another form altogether
            if not right:
                text = EXPECTED[key](data, name) if key == "keep" else EXPECTED[key]
                raise PlanError(f"{'group' if key == 'keep' else key} {name}: expected {text}; got {str(value)[:60]}")
    if unknown := [key for key in data if key != "version" and key not in PARTS]:
        raise PlanError(f"not a plan: unknown key {unknown[0][:40]!r}")


def _whole(value: Any, least: int = 0, most: int = WIDEST) -> bool:
    return type(value) is int and least <= value <= most


def _rising(values: Any, most: int = WIDEST) -> bool:
    """Whether these are whole numbers in order, each once."""
    return isinstance(values, list) and all(_whole(v, 0, most) for v in values) and all(map(lt, values, values[1:]))


def _within(data: Any, number: Any, tensor: str, dim: int) -> bool:
    """Whether there is a row of positions of this number, and it lies in the tensor; rows are in order."""
    return _whole(number) and all(last < data["shapes"][tensor][dim] for last in data["indices"][number][-1:])


def _slices(data: Any, name: str, dims: Any) -> bool:
    return isinstance(dims, dict) and all(
        str(int(dim)) == dim
        and _whole(int(dim), 0, len(data["shapes"][name]) - 1)
        and _within(data, number, name, int(dim))
        for dim, number in dims.items()
    )


def _attributes(data: Any, module: str, values: Any) -> bool:
    return isinstance(values, dict) and all(
        name.isidentifier()
        and not name.startswith("__")
        and (
            _whole(value)
            or value in ("zeros", "constant")
            or (isinstance(value, list) and all(_whole(v, -WIDEST) for v in value))
        )
        for name, value in values.items()
    )


def _scale(data: Any, _: int, value: Any) -> bool:
    name, dim, number, factor = value
    return (
        isinstance(name, str)
        and _whole(dim)
        and _within(data, number, name, dim)
        and str(dim) in data["slices"][name]
        and isinstance(factor, (int, float))
        and 0 < factor < math.inf
    )


PARTS: dict[str, Callable[[Any, Any, Any], bool]] = {
    "widths": lambda data, name, width: _whole(width, 1) and name in data["keep"],
    "keep": lambda data, name, kept: _rising(kept, data["widths"][name] - 1) and bool(kept or data["gone"]),
    "indices": lambda data, number, index: _rising(index),
    "shapes": lambda data, name, shape: isinstance(shape, list) and all(map(_whole, shape)) and len(shape) <= 16,
    "slices": _slices,
    "reads": lambda data, name, dims: _rising(dims) and all(str(d) in data["slices"][name] for d in dims),
    "attributes": _attributes,
    "biases": lambda data, module, size: _whole(size),
    "forms": lambda data, module, form: isinstance(form, str),
    "scales": _scale,
    "gone": lambda data, module, how: how.split(" ")[0] in (BLANK, THIN, IDENTITY, ONLY, PAIR),
}
EXPECTED: dict[str, Any] = {
    "widths": f"a width in 1..{WIDEST} of a group that keep names",
    "keep": lambda data, name: f"kept dimensions in 0..{_last(data, name)}, sorted and each once",
    "indices": "positions, sorted and each once",
    "shapes": "a shape",
    "slices": "for each dimension the number of positions within the dense shape",
    "reads": "dimensions that are sliced",
    "attributes": "names, and a number, numbers, zeros or constant for each",
    "biases": "a size",
    "forms": "the name of a class",
    "scales": "tensor, dimension, the number of positions, and a factor",
    "gone": "what becomes of the module",
}


def _last(data: Any, name: str) -> str:
    width: Any = data["widths"].get(name)
    return str(width - 1) if _whole(width) else "its width - 1"


def misfits(plan: Plan, modules: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """What in the modules that a plan names is not as it was where the plan was made."""
    for path, values in plan.attributes.items():
        for name, value in values.items() if path in modules else ():
            if not hasattr(modules[path], name):
                within = any(path == form or path.startswith(f"{form}.") or not form for form in plan.forms)
                if not within:  # a compact form may keep more
                    yield f"{path}: expected an attribute {name}; {type(modules[path]).__name__} has none"
            elif not _fits(old := getattr(modules[path], name), value):
                yield f"{path}.{name}: expected what can become {value}; the model has {str(old)[:60]}"
    for path, size in plan.biases.items():
        weight = tensors.get(f"{path}.weight")
        rows = plan.shape_of(f"{path}.weight", weight.shape)[0] if weight is not None and weight.ndim else None
        if path in modules and rows != size:
            yield f"{path}: expected a layer with {size} rows left, which get a bias; the model has {rows}"
    for path, how in plan.gone.items():
        word, _, inside = how.partition(" ")
        module = modules.get(f"{path}.{inside}" if inside else path)
        layer = isinstance(module, nn.modules.batchnorm._NormBase if word == IDENTITY else (nn.Linear, *CONVS))
        nested = any(path.startswith(f"{other}.") for other in plan.gone)
        if not path or (path in modules and not layer) or nested or bool(inside) != (word in (ONLY, PAIR)):
            yield f"{path}: expected a module that can become {how}; the model has {type(modules.get(path)).__name__}"


def _fits(old: Any, new: Any) -> bool:
    """Whether a cut may turn one value of an attribute into the other: numbers fall."""
    if isinstance(new, list):
        numbers = isinstance(old, (list, tuple)) and len(old) == len(new)
        return numbers and all(type(a) is int and b <= a for a, b in zip(old, new, strict=True))
    return isinstance(old, str) if isinstance(new, str) else type(old) is int and new <= old
