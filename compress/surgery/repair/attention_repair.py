"""Repair of cut queries and keys: those of smaller width that give the logits before the cut best, in closed form.

The maps A and B of `logit_fit` are linear, so they fold into the weights and biases that write queries and keys. They
are right only if nothing but a scale and terms of other origin lie between projections and logits, and nobody else
reads queries or keys. Both are tested on the first batch: if queries and keys of a head are turned by the same
orthogonal matrix, the outputs must stay the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from compress.distributed import all_reduce_sum, broadcast_object, rank, world_size
from compress.modules import (
    compact_form_of,
    enclosing_modules,
    modules_of,
    shared_copy,
    tensors_in,
    tensors_of,
    use_compact_form_,
)

from ..plan import Plan
from .attention_calls import AttentionCall, AttentionCalls, HeadRows
from .kept_positions import kept_index, kept_scales
from .logit_fit import LogitMoments, fit_logits, split_images

Forward = Callable[[nn.Module, Any], Any]
SAME_OUTPUTS = 1e-3  # relative difference of rounding, in single precision
SAME_OUTPUTS_HALF = 5e-2


@dataclass(frozen=True)
class AttentionRepair:
    """Result of one attention; the errors are those of its logits, relative to the logits, on held-out images."""

    name: str  # of the layer or module that writes the queries
    error_before: float | None = None
    error_after: float | None = None
    ridge: float | None = None
    reason: str = ""  # why it was left as it is

    @property
    def is_solved(self) -> bool:
        """Return whether its queries and keys have new weights."""
        return not self.reason


@dataclass(frozen=True)
class _Attention:
    """An attention whose queries and keys are cut: its place among the calls, the rows, the kept dimensions."""

    position: int
    queries: HeadRows
    keys: HeadRows
    kept: tuple[tuple[int, ...], ...]  # of each head

    @property
    def name(self) -> str:
        return self.queries.weight.rpartition(".")[0]

    @property
    def weights(self) -> set[str]:
        return {self.queries.weight, self.keys.weight}


@dataclass(frozen=True)
class RowMix:
    """Matrix that makes the rows of a cut weight (and its bias) from those before the cut: (kept rows, rows)."""

    matrix: Tensor
    bias: str | None


@torch.no_grad()
def repair_queries_and_keys_(
    model: nn.Module,
    reference: nn.Module,
    plan: Plan,
    batches: Sequence[Any],
    forward: Forward,
    is_within: Callable[[str], bool],
) -> tuple[list[AttentionRepair], dict[str, Tensor]]:
    """Give cut queries and keys new weights, in place.

    Args:
        model: the sliced model.
        reference: the model before it was sliced.
        plan: the cut.
        batches: inputs of this process.
        forward: runs a model on a batch.
        is_within: tells whether a layer may be changed.

    Returns:
        The results, and for each new weight the matrix that makes its rows from those before the cut.
    """
    reference = _with_compact_forms(reference, plan)
    tensors = tensors_of(reference)
    written = {name: t for name, t in tensors.items() if 0 in plan.slices.get(name, {}) and t.ndim <= 2}
    if not any(t.ndim == 2 for t in written.values()):
        return [], {}
    attentions: list[_Attention] = []
    failures: list[AttentionRepair] = []
    if rank() == 0 and batches:
        candidates, failures = _find(model, reference, plan, written, batches[0], forward)
        attentions = _invariant(reference, candidates, batches[0], forward)
        reason = "its queries and keys are changed before the logits, or read by others"
        failures += [AttentionRepair(a.name, reason=reason) for a in candidates if a not in attentions]
    attentions, failures = broadcast_object((attentions, failures))
    attentions = [a for a in attentions if is_within(a.name)]
    results = [a for a in failures if is_within(a.name)]
    if not attentions:
        return results, {}
    moments = _moments(reference, written, attentions, batches, forward)
    mixes: dict[str, RowMix] = {}
    for attention, (fit, held_out) in zip(attentions, moments, strict=True):
        if not (fit.is_finite and held_out.is_finite):
            results.append(AttentionRepair(attention.name, reason="its queries or keys are not finite"))
            continue
        kept = torch.tensor(attention.kept, device=fit.queries.device)
        exact = tensors[attention.queries.weight].dtype == torch.float64
        before, best = fit_logits(fit, held_out, kept, exact=exact)
        if best.ridge is None:
            reason = "no solution lowers the error of its logits"
            results.append(AttentionRepair(attention.name, before.error, before.error, reason=reason))
            continue
        for rows, maps in ((attention.queries, best.a), (attention.keys, best.b)):
            mix = mixes.setdefault(rows.weight, RowMix(_selection(plan, rows.weight, tensors[rows.weight]), rows.bias))
            _mix_rows_(mix.matrix, plan, rows, attention.kept, maps, tensors[rows.weight])
        results.append(AttentionRepair(attention.name, before.error, best.error, best.ridge))
    for name, mix in mixes.items():
        _write(model, name, _columns(plan, name, mix.matrix @ tensors[name].double(), tensors[name]))
        if mix.bias is not None:
            _write(model, mix.bias, mix.matrix @ tensors[mix.bias].double())
    return results, {name: mix.matrix for name, mix in mixes.items()}


def _find(
    model: nn.Module, reference: nn.Module, plan: Plan, written: Mapping[str, Tensor], batch: Any, forward: Forward
) -> tuple[list[_Attention], list[AttentionRepair]]:
    """Return the attentions whose queries and keys are cut, and those that cannot be repaired."""
    cut_widths: list[int] = []
    with AttentionCalls({}, lambda position, call: cut_widths.append(call.queries.shape[-1])):
        forward(model, batch)
    attentions: list[_Attention] = []
    unknown: dict[int, AttentionCall] = {}

    def examine(position: int, call: AttentionCall) -> None:
        rows = call.rows()
        if rows is None:
            unknown[position] = replace(call, linear_calls=call.linear_calls[-1:])
            return
        kept, kept_keys = (_kept_dimensions(plan, part) for part in rows)
        fewest, most = min(map(len, kept)), max(map(len, kept))
        if kept == kept_keys and 0 < fewest == most < rows[0].width:
            attentions.append(_Attention(position, *rows, kept))

    with AttentionCalls(written, examine) as calls:
        forward(reference, batch)
    failures: list[AttentionRepair] = []
    for position, call in unknown.items() if calls.count == len(cut_widths) else ():
        if call.linear_calls and cut_widths[position] < call.queries.shape[-1]:
            name = call.linear_calls[0].weight.rpartition(".")[0]
            failures.append(AttentionRepair(name, reason="its queries and keys are not plain outputs of linear layers"))
    reused = {weight for (weight, _), count in calls.uses.items() if count > 1}
    users = Counter(weight for attention in attentions for weight in attention.weights)
    reused |= {weight for weight, count in users.items() if count > 1}
    reason = "its projections are used more than once"
    failures += [AttentionRepair(a.name, reason=reason) for a in attentions if a.weights & reused]
    return [a for a in attentions if not a.weights & reused], failures


def _with_compact_forms(reference: nn.Module, plan: Plan) -> nn.Module:
    """Return a copy whose cut attentions run without the fused kernels that hide queries and keys."""
    copy = shared_copy(reference)
    for path in enclosing_modules(plan.slices):
        module = modules_of(copy).get(path)
        if module is not None and compact_form_of(module) is not None:
            use_compact_form_(module)
    return copy


def _kept_dimensions(plan: Plan, rows: HeadRows) -> tuple[tuple[int, ...], ...]:
    kept = plan.slices[rows.weight][0]
    return tuple(tuple((kept[(kept >= f) & (kept < f + rows.width)] - f).tolist()) for f in rows.first)


def _invariant(reference: nn.Module, attentions: list[_Attention], batch: Any, forward: Forward) -> list[_Attention]:
    """Return the attentions whose queries and keys can be turned without a change of the outputs."""
    if not attentions:
        return []
    expected = _floating(forward(reference, batch))

    def is_invariant(some: Sequence[_Attention]) -> bool:
        with _turned(reference, some):
            return _are_close(_floating(forward(reference, batch)), expected)

    return attentions if is_invariant(attentions) else [a for a in attentions if is_invariant([a])]


@contextmanager
def _turned(model: nn.Module, attentions: Iterable[_Attention]) -> Iterator[None]:
    """Turn the queries and keys of each head by one random orthogonal matrix while the context lasts."""
    tensors, generator = tensors_of(model), torch.Generator().manual_seed(0)
    turned: dict[str, Tensor] = {}
    for attention in attentions:
        for head in range(len(attention.kept)):
            width = attention.queries.width
            noise = torch.randn(width, width, generator=generator, dtype=torch.float64)
            rotation = torch.linalg.qr(noise).Q
            for rows in (attention.queries, attention.keys):
                part = slice(rows.first[head], rows.first[head] + width)
                for name in (rows.weight, rows.bias):
                    if name is not None:
                        value = turned.setdefault(name, tensors[name].to(torch.float64, copy=True))
                        value[part] = rotation.to(value.device) @ value[part].clone()
    old: dict[str, nn.Parameter | None] = {}
    try:
        for name, value in turned.items():
            old[name] = _parameters_of(model, name)[name.rpartition(".")[2]]
            _write(model, name, value)
        yield
    finally:
        for name, parameter in old.items():
            _parameters_of(model, name)[name.rpartition(".")[2]] = parameter


def _moments(
    reference: nn.Module,
    written: Mapping[str, Tensor],
    attentions: Sequence[_Attention],
    batches: Sequence[Any],
    forward: Forward,
) -> list[tuple[LogitMoments, LogitMoments]]:
    """Return the moments of each attention before the cut, over all processes: of fitted and of held-out images."""
    device = written[attentions[0].queries.weight].device
    shapes = [(len(a.kept), a.queries.width) for a in attentions]
    moments = [tuple(LogitMoments.zeros(*shape, device) for _ in range(2)) for shape in shapes]
    by_position = {a.position: (a, pair) for a, pair in zip(attentions, moments, strict=True)}
    for i, batch in enumerate(batches):

        def add(position: int, call: AttentionCall, number: int = i * world_size() + rank()) -> None:
            attention, pair = by_position.get(position, (None, ()))
            if attention is not None and attention.weights <= {c.weight for c in call.linear_calls}:
                for sums, part in zip(pair, split_images(call.queries, call.keys, number), strict=True):
                    sums.add_(*part)

        with AttentionCalls(written, add):
            forward(reference, batch)
    parts = [part for pair in moments for sums in pair for part in (sums.queries, sums.keys)]
    flat = all_reduce_sum(torch.cat([part.flatten() for part in parts]), sum(part.numel() for part in parts)).to(device)
    sums = iter(torch.split(flat, [part.numel() for part in parts]))
    result = []
    for heads, width in shapes:
        fit_queries, fit_keys, queries, keys = (next(sums).view(heads, width, width) for _ in range(4))
        result.append((LogitMoments(fit_queries, fit_keys), LogitMoments(queries, keys)))
    return result


def _selection(plan: Plan, name: str, dense: Tensor) -> Tensor:
    """Return the matrix of rows that are only selected, and scaled."""
    rows = kept_index(plan, name, 0, dense)
    matrix = torch.zeros(len(rows), len(dense), dtype=torch.float64, device=dense.device)
    matrix[torch.arange(len(rows), device=dense.device), rows] = kept_scales(plan, name, 0, dense).double()
    return matrix


def _mix_rows_(
    matrix: Tensor, plan: Plan, rows: HeadRows, kept: tuple[tuple[int, ...], ...], maps: Tensor, dense: Tensor
) -> None:
    """Replace the rows of all heads by the transposed maps of queries or keys; the plan's factors stay."""
    scales = kept_scales(plan, rows.weight, 0, dense).double()
    for first, dimensions, head_map in zip(rows.first, kept, maps, strict=True):
        positions = np.searchsorted(plan.slices[rows.weight][0], np.array(dimensions) + first)
        index = torch.as_tensor(positions, device=matrix.device)
        matrix[index] = 0
        matrix[index, first : first + rows.width] = scales[index, None] * head_map.mT


def _columns(plan: Plan, name: str, value: Tensor, dense: Tensor) -> Tensor:
    return value[:, kept_index(plan, name, 1, dense)] * kept_scales(plan, name, 1, dense).double()


def _parameters_of(model: nn.Module, name: str) -> dict[str, nn.Parameter | None]:
    return modules_of(model)[name.rpartition(".")[0]]._parameters


def _write(model: nn.Module, name: str, value: Tensor) -> None:
    """Replace a parameter; the network before the cut may share the old one."""
    table, leaf = _parameters_of(model, name), name.rpartition(".")[2]
    old = table[leaf]
    assert old is not None and (value.shape == old.shape)
    table[leaf] = nn.Parameter(value.to(old.dtype), requires_grad=old.requires_grad)


def _floating(values: Any) -> list[Tensor]:
    return [t for t in tensors_in(values) if t.is_floating_point()]


def _are_close(outputs: Collection[Tensor], expected: Collection[Tensor]) -> bool:
    """Return whether outputs are the same but for rounding."""
    if len(outputs) != len(expected) or any(a.shape != b.shape for a, b in zip(outputs, expected, strict=True)):
        return False
    for a, b in zip(outputs, expected, strict=True):
        limit = SAME_OUTPUTS if b.dtype in (torch.float32, torch.float64) else SAME_OUTPUTS_HALF
        if not bool((a.double() - b.double()).norm() <= limit * b.double().norm()):
            return False
    return True
