"""Validate plans: the data of a plan file by itself, and a plan against the model it is applied to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import lt
from typing import Any, NamedTuple

from torch import Tensor, nn

from compress.errors import PlanError
from compress.modules import CONVOLUTIONS, can_select, compact_form_of, dense_class_name, modules_of, tensors_of

from .branches import Removal, RemovalKind
from .gates import scores_of
from .plan_data import AttributeValue, PlanData

MAX_SIZE = 2**31 - 1  # along any dimension
MAX_LISTED = 8  # problems named in one error


def validate_plan_dict(data: Any, version: int) -> None:
    """Check the data of a plan file before a plan is built from it.

    Raises:
        PlanError: this is not a plan of this version, or it is inconsistent.
    """
    if not isinstance(data, Mapping) or "version" not in data:
        raise PlanError(f"not a plan: expected keys such as version, keep and slices; got {str(data)[:40]}")
    if data["version"] != version or not _is_int(data["version"]):
        raise PlanError(f"plan of version {str(data['version'])[:20]}: this library reads version {version}")
    data = {key: {} for key in OPTIONAL_TABLES} | dict(data)
    for key in ENTRY_RULES:
        if key not in data:
            raise PlanError(f"not a plan: {key} is missing")
        if not isinstance(data[key], list if key in ("scales", "indices") else dict):
            raise PlanError(f"not a plan: {key}: expected a table; got {str(data[key])[:40]}")
    for key, rule in ENTRY_RULES.items():
        for name in data[key] if isinstance(data[key], dict) else ():
            if name.startswith("/") or ".." in name or "\\" in name or not name.isprintable():
                raise PlanError(f"{key}: expected names of modules and tensors; got {name[:80]!r}")
        for name, value in data[key].items() if isinstance(data[key], dict) else enumerate(data[key]):
            try:
                valid = rule.is_valid(data, name, value)
            except (TypeError, KeyError, IndexError, ValueError, AttributeError):
                valid = False  # of another type than the check assumes
            if not valid:
                expected = rule.expected.format(last=_last_dimension(data, str(name)) if key == "keep" else "")
                label = "group" if key == "keep" else key
                raise PlanError(f"{label} {name}: expected {expected}; got {str(value)[:60]}")
    if unknown := [key for key in data if key != "version" and key not in ENTRY_RULES]:
        raise PlanError(f"not a plan: unknown key {unknown[0][:40]!r}")


def _is_int(value: Any, least: int = 0, most: int = MAX_SIZE) -> bool:
    return type(value) is int and least <= value <= most


def _is_plain(value: Any, depth: int = 8) -> bool:
    """Return whether a value consists of numbers, texts, lists and tables only."""
    if isinstance(value, (list, dict)):
        parts = [*value, *(value.values() if isinstance(value, dict) else ())]
        return depth > 0 and all(_is_plain(part, depth - 1) for part in parts)
    return value is None or isinstance(value, (bool, str)) or _is_int(value) or isinstance(value, float)


def _is_strictly_increasing(values: Any, most: int = MAX_SIZE) -> bool:
    """Return whether `values` is a list of increasing integers in 0..most."""
    return isinstance(values, list) and all(_is_int(v, 0, most) for v in values) and all(map(lt, values, values[1:]))


def _positions_fit(data: Any, number: Any, tensor: str, dim: int) -> bool:
    """Return whether entry `number` of `indices` exists and lies within the tensor; entries are sorted."""
    return _is_int(number) and all(last < data["shapes"][tensor][dim] for last in data["indices"][number][-1:])


def _valid_slices(data: Any, name: str, dims: Any) -> bool:
    return isinstance(dims, dict) and all(
        str(int(dim)) == dim
        and _is_int(int(dim), 0, len(data["shapes"][name]) - 1)
        and _positions_fit(data, number, name, int(dim))
        for dim, number in dims.items()
    )


def _valid_attributes(data: Any, module: str, values: Any) -> bool:
    return isinstance(values, dict) and all(
        name.isidentifier()
        and not name.startswith("__")
        and (
            _is_int(value)
            or value in ("zeros", "constant")
            or (isinstance(value, list) and all(_is_int(v, -MAX_SIZE) for v in value))
        )
        for name, value in values.items()
    )


def _valid_scale(data: Any, _: int, value: Any) -> bool:
    name, dim, number, factor = value
    return (
        isinstance(name, str)
        and _is_int(dim)
        and _positions_fit(data, number, name, dim)
        and str(dim) in data["slices"][name]
        and isinstance(factor, (int, float))
        and 0 < factor < math.inf
    )


class EntryRule(NamedTuple):
    """The check of one entry of a table of the plan file."""

    is_valid: Callable[[Any, Any, Any], bool]  # (whole plan, key of the entry, entry)
    expected: str  # for the error message


OPTIONAL_TABLES = ("choices", "network", "selections")  # only some plans have them
ENTRY_RULES = {
    "widths": EntryRule(
        lambda data, name, width: _is_int(width, 1) and name in data["keep"],
        f"a width in 1..{MAX_SIZE} of a group in `keep`",
    ),
    "keep": EntryRule(
        lambda data, name, kept: _is_strictly_increasing(kept, data["widths"][name] - 1) and bool(kept or data["gone"]),
        "kept dimensions in 0..{last}, sorted, without duplicates",
    ),
    "indices": EntryRule(
        lambda data, number, index: _is_strictly_increasing(index), "positions, sorted, without duplicates"
    ),
    "shapes": EntryRule(
        lambda data, name, shape: isinstance(shape, list) and all(map(_is_int, shape)) and len(shape) <= 16, "a shape"
    ),
    "slices": EntryRule(
        _valid_slices, "for each dimension an index into `indices`, with positions within the dense shape"
    ),
    "reads": EntryRule(
        lambda data, name, dims: _is_strictly_increasing(dims) and all(str(d) in data["slices"][name] for d in dims),
        "dimensions that are sliced",
    ),
    "attributes": EntryRule(
        _valid_attributes, "attribute names, each with an integer, a list of integers, zeros or constant"
    ),
    "biases": EntryRule(lambda data, module, size: _is_int(size), "a size"),
    "forms": EntryRule(lambda data, module, form: isinstance(form, str), "the name of a class"),
    "selections": EntryRule(
        lambda data, module, number: _is_int(number) and bool(data["indices"][number]), "an index into `indices`"
    ),
    "scales": EntryRule(_valid_scale, "tensor, dimension, an index into `indices`, and a factor"),
    "choices": EntryRule(
        lambda data, path, name: isinstance(name, str) and name.isprintable() and "." not in name,
        "the name of a candidate",
    ),
    "network": EntryRule(lambda data, key, value: key.isidentifier() and _is_plain(value), "numbers, texts and lists"),
    "gone": EntryRule(
        lambda data, module, removal: bool(Removal.parse(removal)),
        "one of blank, thin, identity, `only` or `pair` with a layer name",
    ),
}


def _last_dimension(data: Any, name: str) -> str:
    width: Any = data["widths"].get(name)
    return str(width - 1) if _is_int(width) else "its width - 1"


def check_plan(plan: PlanData, model: nn.Module) -> dict[str, Tensor]:
    """Return the model's tensors by name if every tensor and module of the plan exists as in the dense model.

    Raises:
        PlanError: the plan was made for another model; the message lists the differences.
    """
    tensors = tensors_of(model, aliases=True)
    modules = modules_of(model)
    problems = _missing_parts(plan, modules, tensors) or find_mismatches(plan, modules, tensors)
    if problems:
        if scores_of(model):
            problems.append("the model has gates: call compress.surgery.fold_(model) first")
        elif any(".parametrizations." in name for name in tensors):
            problems.append(
                "the model has parametrizations: call torch.nn.utils.parametrize.remove_parametrizations first"
            )
        raise PlanError(
            "this plan was made for another model (apply it to the dense model it was made from)"
            f"{_count_mismatches(plan, tensors)}:\n  {list_problems(problems)}"
        )
    return tensors


def list_problems(problems: Sequence[str]) -> str:
    """Return the first problems one per line, with the number of those left out."""
    more = [f"... and {len(problems) - MAX_LISTED} more"] if len(problems) > MAX_LISTED else []
    return "\n  ".join([*problems[:MAX_LISTED], *more])


def _missing_parts(plan: PlanData, modules: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> list[str]:
    """Describe the plan's tensors and modules that the model lacks, or has in another shape or of another class."""
    problems = []
    for name, shape in plan.shapes.items():
        if name not in tensors:
            problems.append(f"{name}: expected a tensor of shape {list(shape)}, the model has none of that name")
        elif tuple(tensors[name].shape) != tuple(shape):
            problems.append(f"{name}: expected shape {list(shape)}, the model has {list(tensors[name].shape)}")
    problems += [
        f"{name}: the model has no module of that name"
        for name in [*plan.attributes, *plan.biases, *plan.compact_forms, *plan.selections, *plan.removed_modules]
        if name not in modules
    ]
    for name, expected in plan.compact_forms.items():
        if name in modules:
            form = compact_form_of(modules[name])
            if form is None or dense_class_name(form) != expected:
                kind = type(modules[name]).__name__
                problems.append(f"{name}: expected {expected}, which has a compact form; got {kind}")
    return problems


def _count_mismatches(plan: PlanData, tensors: Mapping[str, Tensor]) -> str:
    """Say how many of the plan's tensors the model lacks, or has in another shape."""
    missing = sum(name not in tensors for name in plan.shapes)
    reshaped = sum(tuple(tensors[n].shape) != tuple(s) for n, s in plan.shapes.items() if n in tensors)
    counts = [f"lacks {missing}"] * bool(missing) + [f"has {reshaped} in another shape"] * bool(reshaped)
    return f"; of the {len(plan.shapes)} tensors that are cut, the model {' and '.join(counts)}" if counts else ""


def find_mismatches(plan: PlanData, modules: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> list[str]:
    """Describe the attributes, biases and removed modules of the plan that do not fit the model's modules."""
    problems = []
    for path, values in plan.attributes.items():
        for name, value in values.items() if path in modules else ():
            if not hasattr(modules[path], name):
                in_form = any(path == form or path.startswith(f"{form}.") or not form for form in plan.compact_forms)
                if not in_form:  # a compact form may add attributes
                    problems.append(f"{path}: expected an attribute {name}; {type(modules[path]).__name__} has none")
            elif not _can_become(old := getattr(modules[path], name), value):
                problems.append(
                    f"{path}.{name}: expected a value that can become {value}; the model has {str(old)[:60]}"
                )
    for path, size in plan.biases.items():
        weight = tensors.get(f"{path}.weight")
        rows = plan.shape_of(f"{path}.weight", weight.shape)[0] if weight is not None and weight.ndim else None
        if path in modules and rows != size:
            problems.append(f"{path}: expected a layer with {size} rows left for its new bias; the model has {rows}")
    for path, channels in plan.selections.items():
        module = modules.get(path)
        width = getattr(module, "num_features", 0)
        kept = plan.attributes.get(path, {}).get("num_features", width)
        if module is not None and (not can_select(module) or int(channels[-1]) >= width or len(channels) != kept):
            problems.append(
                f"{path}: expected a batch norm that selects {len(channels)} channels up to number {channels[-1]} and "
                f"keeps as many; got {type(module).__name__} of {width}, which keeps {kept}"
            )
    for path, text in plan.removed_modules.items():
        removal = Removal.parse(text)
        module = modules.get(f"{path}.{removal.output_layer}" if removal.output_layer else path)
        is_norm = removal.kind is RemovalKind.IDENTITY
        fits = isinstance(module, nn.modules.batchnorm._NormBase if is_norm else (nn.Linear, *CONVOLUTIONS))
        nested = any(path.startswith(f"{other}.") for other in plan.removed_modules)
        if not path or (path in modules and not fits) or nested or bool(removal.output_layer) != removal.is_attention:
            kind = type(modules.get(path)).__name__
            problems.append(f"{path}: expected a module that can become {text}; the model has {kind}")
    return problems


def _can_become(old: Any, new: AttributeValue) -> bool:
    """Return whether slicing may change an attribute from `old` to `new`: numbers only decrease."""
    if isinstance(new, list):
        numbers = isinstance(old, (list, tuple)) and len(old) == len(new)
        return numbers and all(type(a) is int and b <= a for a, b in zip(old, new, strict=True))
    return isinstance(old, str) if isinstance(new, str) else type(old) is int and new <= old
