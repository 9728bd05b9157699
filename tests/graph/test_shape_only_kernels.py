"""Tracing without arithmetic: results have the right shape and type, and groups are those of a real run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import CASES, Net, build, example
from compress import find_groups
from compress.graph import operator_trace
from compress.graph.atoms import Atoms
from compress.graph.shape_only_kernels import SHAPE_ONLY
from compress.modules import as_call_inputs, module_mode, shared_copy

A, B = torch.randn(4, 6), torch.randn(6, 5)
IMAGE, KERNEL = torch.randn(2, 6, 9, 8), torch.randn(4, 3, 3, 2)
LAST = IMAGE.to(memory_format=torch.channels_last)
CALLS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "mm": ("mm", (A, B)),
    "addmm": ("addmm", (torch.randn(5), A, B)),
    "bmm": ("bmm", (A[None], B[None])),
    "grouped convolution": (
        "convolution",
        (IMAGE, KERNEL, torch.randn(4), [2, 1], [1, 0], [1, 2], False, [0, 0], 2),
    ),
    "channels last": ("convolution", (LAST, torch.randn(4, 6, 1, 1), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)),
    "one dimension": ("convolution", (IMAGE[0], torch.randn(4, 9, 3), None, [1], [1], [1], False, [0], 1)),
    "max_pool": ("max_pool2d_with_indices", (IMAGE, [3, 3], [2, 2], [1, 1])),
    "max_pool, stride left out": ("max_pool2d_with_indices", (IMAGE, [2, 2])),
}
OTHERS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "widths that do not fit": ("mm", (A, A)),
    "two types": ("mm", (A, B.double())),
    "transposed": ("convolution", (IMAGE, KERNEL, None, [1, 1], [0, 0], [1, 1], True, [0, 0], 1)),
    "too few channels": ("convolution", (IMAGE, KERNEL, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)),
    "kernel larger than image": (
        "convolution",
        (IMAGE[..., :1], KERNEL, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 2),
    ),
    "pooling that rounds up": ("max_pool2d_with_indices", (IMAGE, [3, 3], [2, 2], [1, 1], [1, 1], True)),
}


@pytest.mark.parametrize("name", CALLS)
def test_shape_only_result_has_the_shape_and_type_of_the_real_one(name: str) -> None:
    op, args = CALLS[name]
    zeros, real = SHAPE_ONLY[op](*args), getattr(torch.ops.aten, op)(*args)
    pairs = zip(zeros, real, strict=True) if isinstance(real, tuple) else [(zeros, real)]
    for a, b in pairs:
        assert (a.shape, a.dtype, a.stride(), a.device) == (b.shape, b.dtype, b.stride(), b.device)
        assert not a.any()


@pytest.mark.parametrize("name", OTHERS)
def test_unusual_arguments_are_left_to_the_operator(name: str) -> None:
    op, args = OTHERS[name]
    assert SHAPE_ONLY[op](*args) is None


@pytest.mark.parametrize("name", CASES)
def test_shape_only_and_real_runs_give_the_same_atoms(name: str) -> None:
    model, call = build(CASES[name]), as_call_inputs(example(CASES[name]))
    results: list[Any] = []
    for shapes_only in (True, False):
        atoms, copied = Atoms(), shared_copy(model)
        try:
            with module_mode(copied, training=False):
                operator_trace._trace_run(atoms, copied, *call, prefix="", shapes_only=shapes_only)
        except (operator_trace.Untraceable, operator_trace._ValuesNeeded) as error:
            results.append(type(error))
            continue
        roots = atoms.class_roots()
        results.append((atoms.count, roots.tolist(), atoms.freeze_reasons(roots)[0].tolist(), list(atoms.axes)))
    assert results[0] == results[1] or results[0] is operator_trace._ValuesNeeded


class Remembers(nn.Module):
    """Keeps the mean of what it saw in a buffer, which it writes to through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.register_buffer("seen", torch.zeros(2))
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.seen[:1].copy_(x.mean()[None])
        return self.head(self.conv(x).relu())


def test_run_that_writes_to_a_buffer_is_repeated_with_real_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[bool] = []
    trace_run = operator_trace._trace_run

    def recorded(*args: Any, shapes_only: bool, **rest: Any) -> set[str]:
        runs.append(shapes_only)
        return trace_run(*args, shapes_only=shapes_only, **rest)

    monkeypatch.setattr(operator_trace, "_trace_run", recorded)
    model = Remembers().eval()
    assert [g.name for g in find_groups(model, torch.randn(1, 3, 8, 8))] == ["conv"]
    assert runs == [True, False] and not model.seen.any()


def test_values_that_code_computes_from_weights_alone_are_real() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        factor = float((model.square @ model.square).sum())
        assert factor == 3
        return model.head(factor * model.conv(x).relu())

    model = Net(forward, conv=nn.Conv2d(3, 8, 3), head=nn.Conv2d(8, 2, 1)).eval()
    model.square = nn.Parameter(torch.eye(3))
    assert [g.name for g in find_groups(model, torch.randn(1, 3, 8, 8))] == ["conv"]
