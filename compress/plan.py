"""Plan: what is kept, and what that means for every tensor and every attribute of the dense model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from .attention import form_of, name_of
from .files import write_whole
from .validate import PlanError as PlanError
from .validate import check_form, misfits, read
from .walk import modules_of, tensors_of, within

if TYPE_CHECKING:
    from .groups import Groups, Index
    from .kernels import Kernel

VERSION = 1


@dataclass
class Plan:
    """A self-contained description of a cut: applying it needs no tracing, no data and no example input."""

    keep: dict[str, list[int]]  # group -> kept dimensions
    widths: dict[str, int]  # group -> dense width
    slices: dict[str, dict[int, Index]] = field(default_factory=dict)  # tensor -> dim -> kept positions
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # tensor -> dense shape
    reads: dict[str, list[int]] = field(default_factory=dict)  # tensor -> dims along which it reads a group
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)  # module -> attribute -> number, text or list
    biases: dict[str, int] = field(default_factory=dict)  # module -> size of the bias it gets (compensation)
    forms: dict[str, str] = field(default_factory=dict)  # module -> attention whose compact form it gets
    scales: list[tuple[str, int, Index, float]] = field(default_factory=list)  # tensor, dim, dense positions, factor
    gone: dict[str, str] = field(default_factory=dict)  # module -> what becomes of it where a branch is taken out

    def __repr__(self) -> str:
        kept = sum(map(len, self.keep.values()))
        return f"Plan({len(self.keep)} groups, {kept} of {sum(self.widths.values())} dimensions kept)"

    @classmethod
    def build(
        cls, model: nn.Module, groups: Groups, keep: Mapping[str, Any], kernels: Mapping[str, Kernel] | None = None
    ) -> Plan:
        """What `keep` means for each tensor; `kernels` says what is left of kernels, by the convolution's weight.

        Raises:
            PlanError: a group is unknown, an index out of range, nothing of a group is kept, or heads unevenly; or a
                kernel cannot be cut in that way.
        """
        from .kernels import smaller

        kept = _checked(groups, keep)
        plan = cls({n: k.tolist() for n, k in kept.items()}, {g.name: g.width for g in groups})
        tensors = tensors_of(model)
        masks: dict[tuple[str, int], np.ndarray] = {}
        for group in groups:
            left = kept[group.name]
            dropped = np.ones(group.width, dtype=bool)
            dropped[left] = False
            gone = np.flatnonzero(dropped)
            if not gone.size:
                continue
            for slot in group.slots:
                place, shape = (slot.tensor, slot.dim), tuple(tensors[slot.tensor].shape)
                if place not in masks:
                    masks[place] = np.ones(shape[slot.dim], dtype=bool)
                masks[place][slot.index[gone].ravel()] = False
                plan.shapes[slot.tensor] = shape
                if slot.power and len(left):
                    factor = (len(left) / group.width) ** slot.power
                    plan.scales.append((slot.tensor, slot.dim, np.sort(slot.index[left].ravel()), factor))
                if slot.reads and slot.dim not in plan.reads.setdefault(slot.tensor, []):
                    plan.reads[slot.tensor].append(slot.dim)
        for name, branch in groups.branches.items():
            if not len(kept[name]):
                plan.gone |= branch.modules
        plan.reads = {name: sorted(dims) for name, dims in plan.reads.items() if dims}
        for (name, dim), mask in masks.items():
            plan.slices.setdefault(name, {})[dim] = np.flatnonzero(mask)
        cut = within(plan.slices) if groups.forms else set()
        for path in sorted(groups.forms & cut):
            form = form_of(model.get_submodule(path))
            assert form is not None
            plan.forms[path] = name_of(form)
        sizes = groups.cost.at([len(kept[name]) for name in groups.cost.names])
        for a in groups.attributes:
            if sizes[a.place] != groups.cost.sizes[a.place]:
                plan.attributes.setdefault(a.module, {})[a.name] = int(sizes[a.place]) * a.times // a.per
        for name, spans in (kernels or {}).items():
            path = name.rpartition(".")[0]
            plan.attributes.setdefault(path, {}).update(smaller(name, model.get_submodule(path), spans))
            plan.shapes[name] = tuple(tensors[name].shape)
            plan.slices.setdefault(name, {}).update({dim: np.arange(*span) for dim, span in spans.items()})
            plan.reads[name] = sorted({*plan.reads.get(name, []), *spans})
        return plan

    def apply_(self, model: nn.Module) -> nn.Module:
        """Cut a fresh dense model; see `slice_`."""
        from .slicing import slice_

        return slice_(model, self)

    @torch.no_grad()
    def zero_(self, model: nn.Module) -> nn.Module:
        """Zero the dropped dimensions where scores stand, which is where they are read or, for products, written.

        That is the function which slicing preserves.

        Raises:
            PlanError: the plan was made for another model.
        """
        tensors = self.check(model)
        for name, dims in self.reads.items():
            for dim in dims:
                gone = np.setdiff1d(np.arange(self.shapes[name][dim]), self.slices[name][dim])
                tensors[name].index_fill_(dim, torch.as_tensor(gone, device=tensors[name].device), 0)
        return model

    def check(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The model's tensors by name, once every one that the plan names is there with the dense shape.

        Raises:
            PlanError: the plan was made for another model; all differences are named.
        """
        tensors = tensors_of(model, aliases=True)
        modules = modules_of(model)
        wrong = []
        for name, shape in self.shapes.items():
            if name not in tensors:
                wrong.append(f"{name}: expected a tensor of shape {list(shape)}, the model has none of that name")
            elif tuple(tensors[name].shape) != tuple(shape):
                wrong.append(f"{name}: expected shape {list(shape)}, the model has {list(tensors[name].shape)}")
        wrong += [
            f"{name}: the model has no module of that name"
            for name in [*self.attributes, *self.biases, *self.forms, *self.gone]
            if name not in modules
        ]
        for name, form in self.forms.items():
            here = form_of(modules[name]) if name in modules else None
            if name in modules and (here is None or name_of(here) != form):
                wrong.append(f"{name}: expected {form}, which has a compact form; got {type(modules[name]).__name__}")
        wrong += misfits(self, modules, tensors) if not wrong else []
        if any(".parametrizations." in name for name in tensors) and wrong:
            wrong.append("the model has parametrizations: call compress.gates.fold_(model) first")
        if wrong:
            more = [f"... and {len(wrong) - 8} more"] if len(wrong) > 8 else []
            raise PlanError(
                "this plan was made for another model (apply it to the dense model it was made from)"
                f"{self._unlike(tensors)}:\n  " + "\n  ".join(wrong[:8] + more)
            )
        return tensors

    def _unlike(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """How many of the plan's tensors a model has not, or in another shape."""
        lacks = sum(name not in tensors for name in self.shapes)
        other = sum(tuple(tensors[n].shape) != tuple(s) for n, s in self.shapes.items() if n in tensors)
        said = [f"lacks {lacks}"] * bool(lacks) + [f"has {other} in another shape"] * bool(other)
        return f"; of the {len(self.shapes)} tensors that are cut, the model {' and '.join(said)}" if said else ""

    def shape_of(self, name: str, dense: Sequence[int]) -> tuple[int, ...]:
        """The shape that a tensor of this dense shape is left with."""
        cut = self.slices.get(name, {})
        return tuple(len(cut[d]) if d in cut else size for d, size in enumerate(dense))

    def then(self, second: Plan) -> Plan:
        """One plan for the dense model that does this cut and then `second`, which was made on its result.

        Raises:
            PlanError: `second` was made for another model.
        """
        result = Plan(dict(self.keep), dict(self.widths))
        for name, kept in second.keep.items():
            mine = self.keep.get(name)
            if mine is not None and len(mine) != second.widths[name]:  # the cut network falls into other groups
                name, mine = f"{name}+", None
            result.keep[name] = [mine[i] for i in kept] if mine is not None else list(kept)
            result.widths.setdefault(name, second.widths[name.removesuffix("+")])
        result.shapes = {**second.shapes, **self.shapes}
        result.attributes = {
            n: {**self.attributes.get(n, {}), **second.attributes.get(n, {})}
            for n in {**self.attributes, **second.attributes}
        }
        result.biases = {**self.biases, **second.biases}
        result.forms = {**self.forms, **second.forms}
        result.gone = {**self.gone, **second.gone}
        result.scales = [*self.scales]
        for name, dim, index, factor in second.scales:
            before = self.slices.get(name, {}).get(dim)
            result.scales.append((name, dim, index if before is None else before[index], factor))
        for name in {**self.slices, **second.slices}:
            a, b = self.slices.get(name, {}), second.slices.get(name, {})
            for dim, left in a.items():
                if name in second.shapes and second.shapes[name][dim] != len(left):
                    raise PlanError(
                        f"{name}: the second plan expects {second.shapes[name][dim]} positions along dimension {dim}, "
                        f"the first leaves {len(left)}"
                    )
            result.slices[name] = {**a, **{d: a[d][k] if d in a else k for d, k in b.items()}}
        for name in {**self.reads, **second.reads}:
            result.reads[name] = sorted({*self.reads.get(name, []), *second.reads.get(name, [])})
        # A bias that the first cut created cannot be cut in a dense model that has none: its size says it all.
        for module in self.biases:
            for table in (result.slices, result.shapes, result.reads):
                if f"{module}.bias" in table and f"{module}.bias" not in self.shapes:
                    if table is result.slices:
                        result.biases[module] = len(second.slices[f"{module}.bias"][0])
                    table.pop(f"{module}.bias", None)
        return result

    def save(self, path: str | Path) -> None:
        """Write JSON, whole or not at all."""
        write_whole(Path(path), json.dumps(self.to_dict(), indent=1).encode())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """
        Raises:
            PlanError: not a plan, or one of a newer version.
        """
        try:
            return cls.from_dict(read(Path(path)))
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None
        except ValueError as error:
            raise PlanError(f"{path}: not a plan ({error})") from error

    def digest(self) -> str:
        """A hash of all that the plan says."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Plain data; arrays of positions that occur more than once are stored once."""
        indices: dict[tuple[int, ...], int] = {}
        slices = {
            name: {str(d): indices.setdefault(tuple(k.tolist()), len(indices)) for d, k in sorted(dims.items())}
            for name, dims in self.slices.items()
        }
        scales = [
            [name, dim, indices.setdefault(tuple(index.tolist()), len(indices)), factor]
            for name, dim, index, factor in self.scales
        ]
        return {
            "version": VERSION,
            "keep": self.keep,
            "widths": self.widths,
            "attributes": self.attributes,
            "biases": self.biases,
            "forms": self.forms,
            "reads": self.reads,
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "slices": slices,
            "scales": scales,
            "gone": self.gone,
            "indices": [list(index) for index in indices],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """
        Raises:
            PlanError: not a plan, one of another version, or one that contradicts itself.
        """
        check_form(data, VERSION)
        indices = [np.array(index, dtype=np.int64) for index in data["indices"]]
        return cls(
            keep={name: list(kept) for name, kept in data["keep"].items()},
            widths=dict(data["widths"]),
            slices={name: {int(d): indices[i] for d, i in dims.items()} for name, dims in data["slices"].items()},
            shapes={name: tuple(shape) for name, shape in data["shapes"].items()},
            reads={name: list(dims) for name, dims in data["reads"].items()},
            attributes={name: dict(values) for name, values in data["attributes"].items()},
            biases=dict(data["biases"]),
            forms=dict(data["forms"]),
            scales=[(name, dim, indices[i], factor) for name, dim, i, factor in data["scales"]],
            gone=dict(data["gone"]),
        )


def _checked(groups: Groups, keep: Mapping[str, Any]) -> dict[str, Index]:
    """Kept dimensions of every group, sorted; a group that is not mentioned stays whole."""
    known = {g.name: g for g in groups}
    if unknown := [name for name in keep if name not in known]:
        raise PlanError(f"no group named {unknown[0]!r}; the model has {', '.join(known) or 'none'}")
    result = {}
    empty: set[str] = {n for n in groups.branches if n in keep and not np.any(keep[n]) and not len(np.asarray(keep[n]))}
    empty |= {other for name in empty for other in groups.branches[name].unread}
    for name, group in known.items():
        if name in empty:
            result[name] = np.zeros(0, dtype=np.int64)
            continue
        given = np.asarray(keep.get(name, np.arange(group.width)))
        if given.dtype == bool:
            if given.shape != (group.width,):
                raise PlanError(f"group {name}: expected a mask of {group.width} flags, got shape {list(given.shape)}")
            given = np.flatnonzero(given)
        kept = np.unique(given.astype(np.int64))
        if not kept.size:
            raise PlanError(f"group {name}: expected at least one of its {group.width} dimensions to be kept, got none")
        if kept[0] < 0 or kept[-1] >= group.width:
            raise PlanError(f"group {name}: expected indices in 0..{group.width - 1}, got {kept[0]}..{kept[-1]}")
        run = group.width // group.ways
        if len(set(np.bincount(kept // run, minlength=group.ways))) > 1:
            each = np.bincount(kept // run, minlength=group.ways).tolist()
            raise PlanError(
                f"group {name}: expected as many kept dimensions in each of its {group.ways} heads, got {each}"
            )
        result[name] = kept
    return result
