"""Plan: a cut of a model, as data that can be built, applied, combined, saved and loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from compress.errors import PlanError
from compress.graph import Groups, Index
from compress.modules import SELECTION_INDEX, compact_form_of, dense_class_name, enclosing_modules, tensors_of
from compress.storage import read_json, write_atomic

from .branches import constant_layers
from .crop_kernels import KernelSpans, smaller_kernel_attributes
from .operations import with_operations
from .plan_data import PlanData, Rescaling
from .plan_validation import check_plan, validate_plan_dict
from .slicing import slice_

VERSION = 1  # of the file format


class Plan(PlanData):
    """A cut of a model: the kept dimensions of every group, and the changes to every tensor and module.

    Applying a plan needs no tracing, no data and no example input.
    """

    def __repr__(self) -> str:
        kept = sum(map(len, self.keep.values()))
        operations = f"{len(self.choices)} operations chosen, " if self.choices else ""
        return f"Plan({operations}{len(self.keep)} groups, {kept} of {sum(self.widths.values())} dimensions kept)"

    @classmethod
    def build(
        cls,
        model: nn.Module,
        groups: Groups,
        keep: Mapping[str, ArrayLike],
        kernels: Mapping[str, KernelSpans] | None = None,
    ) -> Plan:
        """Return the plan that keeps the given dimensions.

        Args:
            model: the dense model.
            groups: its groups.
            keep: kept dimensions by group, as indices or a boolean mask; other groups stay whole.
            kernels: the part of a kernel to keep, by the name of the convolution's weight.

        Raises:
            PlanError: a group is unknown, an index is out of range, a group keeps nothing, its heads keep different
                numbers of dimensions, or a kernel cannot be cut like this.
        """
        kept = _validated_keep(groups, keep)
        plan = cls({n: k.tolist() for n, k in kept.items()}, {g.name: g.width for g in groups})
        tensors = tensors_of(model)
        masks: dict[tuple[str, int], np.ndarray] = {}  # (tensor, dim) -> whether each position is kept
        for group in groups:
            kept_dims = kept[group.name]
            dropped_dims = np.setdiff1d(np.arange(group.width), kept_dims)
            if not dropped_dims.size:
                continue
            for slot in group.slots:
                place, shape = (slot.tensor, slot.dim), tuple(tensors[slot.tensor].shape)
                if place not in masks:
                    masks[place] = np.ones(shape[slot.dim], dtype=bool)
                masks[place][slot.index[dropped_dims].ravel()] = False
                plan.shapes[slot.tensor] = shape
                if slot.rescale_power and len(kept_dims):
                    factor = (len(kept_dims) / group.width) ** slot.rescale_power
                    positions = np.sort(slot.index[kept_dims].ravel())
                    plan.scales.append(Rescaling(slot.tensor, slot.dim, positions, factor))
                if slot.gated and slot.dim not in plan.gated_dims.setdefault(slot.tensor, []):
                    plan.gated_dims[slot.tensor].append(slot.dim)
        for name, branch in groups.branches.items():
            if not len(kept[name]):
                plan.removed_modules |= branch.modules
        plan.gated_dims = {name: sorted(dims) for name, dims in plan.gated_dims.items() if dims}
        for (name, dim), mask in masks.items():
            plan.slices.setdefault(name, {})[dim] = np.flatnonzero(mask)
        for path, tensor in groups.selections.items():
            if tensor in plan.slices and path not in plan.removed_modules:
                plan.selections[path] = plan.slices[tensor][0]
        cut_modules = enclosing_modules(plan.slices) if groups.compact_modules else set()
        for path in sorted(groups.compact_modules & cut_modules):
            form = compact_form_of(model.get_submodule(path))
            assert form is not None
            plan.compact_forms[path] = dense_class_name(form)
        sizes = groups.cost.axis_sizes([len(kept[name]) for name in groups.cost.names])
        for a in groups.attributes:
            if sizes[a.axis] != groups.cost.dense_sizes[a.axis]:
                value = int(sizes[a.axis]) * a.multiplier // a.divisor
                values = plan.attributes.setdefault(a.module, {})
                if a.item is None:
                    values[a.name] = value
                else:
                    items = values.setdefault(a.name, list(getattr(model.get_submodule(a.module), a.name)))
                    assert isinstance(items, list)
                    items[a.item] = value
        for name, spans in (kernels or {}).items():
            path = name.rpartition(".")[0]
            new_values = smaller_kernel_attributes(name, model.get_submodule(path), spans)
            plan.attributes.setdefault(path, {}).update(new_values)
            plan.shapes[name] = tuple(tensors[name].shape)
            plan.slices.setdefault(name, {}).update({dim: np.arange(*span) for dim, span in spans.items()})
            plan.gated_dims[name] = sorted({*plan.gated_dims.get(name, []), *spans})
        return plan

    def apply_(self, model: nn.Module) -> nn.Module:
        """Slice a dense model in place; see `slice_`.

        Raises:
            PlanError: the plan was made for another model, or the model has gates; the model is unchanged.
        """
        return slice_(model, self)

    @torch.no_grad()
    def zero_(self, model: nn.Module) -> nn.Module:
        """Set the weights that scores multiply to zero at dropped positions; slicing preserves this function.

        These are the input columns of the layers that read a group. Exceptions are queries, keys, values that share
        their scores, and residual streams with layer norms: there they are the rows that write the group.

        Raises:
            PlanError: the plan was made for another model, or chooses operations.
        """
        if self.choices or self.network:
            raise PlanError("zero_: the plan chooses operations: apply it with apply_ instead")
        tensors = self.check(model)
        for name, dims in self.gated_dims.items():
            for dim in dims:
                dropped = torch.as_tensor(self.dropped_positions(name, dim), device=tensors[name].device)
                tensors[name].index_fill_(dim, dropped, 0)
        return model

    def check(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the model's tensors by name if the plan fits the model; see `check_plan`.

        Raises:
            PlanError: the plan was made for another model; the message lists the differences.
        """
        return check_plan(self, with_operations(model, self))

    def then(self, second: Plan) -> Plan:
        """Return one plan for the dense model that does this cut, then `second`, which was made for its result.

        Raises:
            PlanError: `second` was made for another model.
        """
        if second.choices or second.network:
            if self.slices or self.removed_modules or self.network:
                raise PlanError("the second plan chooses operations: choose them before widths are cut")
            return replace(second, choices=self.choices | second.choices)
        second = second._for_dense_layers(constant_layers(self.removed_modules))
        selections, second = self._selections_before(second)
        result = Plan(dict(self.keep), dict(self.widths), choices=dict(self.choices), network=dict(self.network))
        for name, kept in second.keep.items():
            first_kept = self.keep.get(name)
            if first_kept is not None and len(first_kept) != second.widths[name]:  # the groups differ after the cut
                name, first_kept = f"{name}+", None
            result.keep[name] = [first_kept[i] for i in kept] if first_kept is not None else list(kept)
            result.widths.setdefault(name, second.widths[name.removesuffix("+")])
        result.shapes = {**second.shapes, **self.shapes}
        result.attributes = {
            n: {**self.attributes.get(n, {}), **second.attributes.get(n, {})}
            for n in {**self.attributes, **second.attributes}
        }
        result.biases = {**self.biases, **second.biases}
        result.compact_forms = {**self.compact_forms, **second.compact_forms}
        result.removed_modules = {**self.removed_modules, **second.removed_modules}
        result.selections = {n: index for n, index in selections.items() if n not in result.removed_modules}
        result.scales = [*self.scales]
        for scale in second.scales:
            first_positions = self.slices.get(scale.tensor, {}).get(scale.dim)
            if first_positions is not None:
                scale = scale._replace(positions=first_positions[scale.positions])
            result.scales.append(scale)
        for name in {**self.slices, **second.slices}:
            first_slices, second_slices = self.slices.get(name, {}), second.slices.get(name, {})
            for dim, positions in first_slices.items():
                if name in second.shapes and second.shapes[name][dim] != len(positions):
                    raise PlanError(
                        f"{name}: the second plan expects {second.shapes[name][dim]} positions along dimension {dim}, "
                        f"the first leaves {len(positions)}"
                    )
            result.slices[name] = {
                **first_slices,
                **{d: first_slices[d][k] if d in first_slices else k for d, k in second_slices.items()},
            }
        for name in {**self.gated_dims, **second.gated_dims}:
            result.gated_dims[name] = sorted({*self.gated_dims.get(name, []), *second.gated_dims.get(name, [])})
        # The dense model lacks the biases that the first cut adds: record their final size instead of slicing them.
        for module in self.biases:
            bias = f"{module}.bias"
            if bias not in self.shapes:
                if bias in result.slices:
                    result.biases[module] = len(second.slices[bias][0])
                for table in (result.slices, result.shapes, result.gated_dims):
                    table.pop(bias, None)
        return result

    def _for_dense_layers(self, paths: Iterable[str]) -> Plan:
        """Return this plan for a model in which these layers have not been replaced by constants yet.

        An earlier cut replaced each of the layers by a constant tensor `zeros`. What this plan cuts of that tensor, the
        new plan cuts of the rows of the layer's weight.
        """
        names = {f"{path}.zeros": f"{path}.weight" for path in paths}
        if not any(name in self.slices for name in names):
            return self
        return replace(
            self,
            slices={names.get(name, name): dims for name, dims in self.slices.items()},
            gated_dims={names.get(name, name): dims for name, dims in self.gated_dims.items()},
            shapes={name: shape for name, shape in self.shapes.items() if name not in names},
        )

    def _selections_before(self, second: Plan) -> tuple[dict[str, Index], Plan]:
        """Return the channels that norms select after both cuts, and `second` for norms that do not select yet.

        The first cut gave the norms an index, which the dense model lacks. What `second` cuts of it is cut of the
        selection.
        """
        selections = {**second.selections, **self.selections}
        indices = {f"{path}.{SELECTION_INDEX}": path for path in self.selections}
        for name, path in indices.items():
            if name in second.slices:
                selections[path] = self.selections[path][second.slices[name][0]]
        tables = [
            {name: entry for name, entry in table.items() if name not in indices}
            for table in (second.slices, second.shapes, second.gated_dims)
        ]
        return selections, replace(second, slices=tables[0], shapes=tables[1], gated_dims=tables[2])  # type: ignore[arg-type]

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, atomically."""
        write_atomic(Path(path), json.dumps(self.to_dict(), indent=1).encode())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            PlanError: the file is not a plan, or one of another version.
        """
        try:
            return cls.from_dict(read_json(Path(path)))
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None
        except ValueError as error:
            raise PlanError(f"{path}: not a plan ({error})") from error

    def digest(self) -> str:
        """Return the SHA-256 of the plan's content; equal plans have equal digests."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON data; equal arrays of positions are stored once, in `indices`."""
        indices: dict[tuple[int, ...], int] = {}
        slices = {
            name: {str(d): indices.setdefault(tuple(k.tolist()), len(indices)) for d, k in sorted(dims.items())}
            for name, dims in self.slices.items()
        }
        scales = [
            [name, dim, indices.setdefault(tuple(positions.tolist()), len(indices)), factor]
            for name, dim, positions, factor in self.scales
        ]
        selections = {
            path: indices.setdefault(tuple(channels.tolist()), len(indices))
            for path, channels in self.selections.items()
        }
        optional = {"selections": selections, "choices": self.choices, "network": self.network}
        return {
            "version": VERSION,
            **{key: table for key, table in optional.items() if table},
            "keep": self.keep,
            "widths": self.widths,
            "attributes": self.attributes,
            "biases": self.biases,
            "forms": self.compact_forms,
            "reads": self.gated_dims,
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "slices": slices,
            "scales": scales,
            "gone": self.removed_modules,
            "indices": [list(index) for index in indices],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Build a plan from the data that `to_dict` returns.

        Raises:
            PlanError: this is not a plan, it has another version, or it is inconsistent.
        """
        validate_plan_dict(data, VERSION)
        indices = [np.array(index, dtype=np.int64) for index in data["indices"]]
        return cls(
            keep={name: list(kept) for name, kept in data["keep"].items()},
            widths=dict(data["widths"]),
            slices={name: {int(d): indices[i] for d, i in dims.items()} for name, dims in data["slices"].items()},
            shapes={name: tuple(shape) for name, shape in data["shapes"].items()},
            gated_dims={name: list(dims) for name, dims in data["reads"].items()},
            attributes={name: dict(values) for name, values in data["attributes"].items()},
            biases=dict(data["biases"]),
            compact_forms=dict(data["forms"]),
            selections={path: indices[i] for path, i in data.get("selections", {}).items()},
            scales=[Rescaling(name, dim, indices[i], factor) for name, dim, i, factor in data["scales"]],
            removed_modules=dict(data["gone"]),
            choices=dict(data.get("choices", {})),
            network=dict(data.get("network", {})),
        )


def _validated_keep(groups: Groups, keep: Mapping[str, ArrayLike]) -> dict[str, Index]:
    """Return the kept dimensions of every group, sorted; a group that `keep` does not name stays whole.

    Raises:
        PlanError: a group is unknown, keeps nothing, or its kept dimensions are out of range or uneven among heads.
    """
    by_name = {g.name: g for g in groups}
    if unknown := [name for name in keep if name not in by_name]:
        raise PlanError(f"no group named {unknown[0]!r}; the model has {', '.join(by_name) or 'none'}")
    emptied = {name for name in groups.branches if name in keep and not np.asarray(keep[name]).size}
    emptied |= {other for name in emptied for other in groups.branches[name].unread_groups}
    result: dict[str, Index] = {}
    for name, group in by_name.items():
        if name in emptied:
            result[name] = np.zeros(0, dtype=np.int64)
            continue
        dims = np.asarray(keep.get(name, np.arange(group.width)))
        if dims.dtype == bool:
            if dims.shape != (group.width,):
                raise PlanError(f"group {name}: expected a mask of {group.width} flags, got shape {list(dims.shape)}")
            dims = np.flatnonzero(dims)
        kept = np.unique(dims.astype(np.int64))
        if not kept.size:
            raise PlanError(f"group {name}: expected at least one of its {group.width} dimensions to be kept, got none")
        if kept[0] < 0 or kept[-1] >= group.width:
            raise PlanError(f"group {name}: expected indices in 0..{group.width - 1}, got {kept[0]}..{kept[-1]}")
        per_head = np.bincount(kept // (group.width // group.num_heads), minlength=group.num_heads).tolist()
        if len(set(per_head)) > 1:
            raise PlanError(
                f"group {name}: expected as many kept dimensions in each of its {group.num_heads} heads, got {per_head}"
            )
        result[name] = kept
    return result
