"""Following a model without arithmetic: results of the right form, and the groups that real numbers give."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from case import Net, build, example
from cases import CASES
from torch import Tensor, nn

from compress import find_groups
from compress.discover import as_call
from compress.shell import shell
from compress.tracing import mode
from compress.tracing.atoms import Atoms
from compress.tracing.idle import IDLE
from compress.walk import modules_of, tensors_of

follow = importlib.import_module("compress.tracing.follow")  # the package has a function of that name
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
def test_idle_result_has_the_form_of_the_real_one(name: str) -> None:
    op, args = CALLS[name]
    idle, real = IDLE[op](*args), getattr(torch.ops.aten, op)(*args)
    pairs = zip(idle, real, strict=True) if isinstance(real, tuple) else [(idle, real)]
    for a, b in pairs:
        assert (a.shape, a.dtype, a.stride(), a.device) == (b.shape, b.dtype, b.stride(), b.device)
        assert not a.any()


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_plain_is_left_to_the_operator(name: str) -> None:
    op, args = OTHERS[name]
    assert IDLE[op](*args) is None


@pytest.mark.parametrize("name", CASES)
def test_idle_and_real_runs_say_the_same_of_every_atom(name: str) -> None:
    model, call = build(CASES[name]), as_call(example(CASES[name]))
    said = []
    for idle in (True, False):
        atoms, copied = Atoms(), shell(model)
        try:
            with mode(copied, training=False):
                follow._follow(atoms, copied, *call, prefix="", idle=idle)
        except (follow.Untraceable, follow._Needed) as error:
            said.append(type(error))
            continue
        said.append((atoms.count, atoms.roots().tolist(), atoms.reasons(atoms.roots())[0].tolist(), list(atoms.places)))
    assert said[0] == said[1] or said[0] is follow._Needed


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


def test_run_that_writes_to_a_buffer_is_made_on_real_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[bool] = []
    real = follow._follow

    def noted(*args: Any, idle: bool, **rest: Any) -> set[str]:
        runs.append(idle)
        return real(*args, idle=idle, **rest)

    monkeypatch.setattr(follow, "_follow", noted)
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


@pytest.mark.parametrize("name", CASES)
def test_walk_names_what_torch_names(name: str) -> None:
    model = build(CASES[name])
    for aliases in (False, True):
        assert modules_of(model, aliases) == dict(model.named_modules(remove_duplicate=not aliases))
        named = [model.named_parameters, model.named_buffers]
        assert list(tensors_of(model, aliases)) == [n for f in named for n, _ in f(remove_duplicate=not aliases)]
