"""Finding groups takes ten forward passes of the model at most, whatever fails, and refuses what is at fault only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

import compress
from cases import Net, randomise_
from cases.families import family
from compress.graph import Groups
from compress.recipe import Target

MOST = 10


@contextmanager
def counted_passes(model: nn.Module) -> Iterator[list[str]]:
    """Collect the outermost calls of modules of the model's class: on the model, its copies and its sliced copies."""
    calls: list[str] = []
    depth = 0

    def enter(module: nn.Module, _: Any) -> None:
        nonlocal depth
        if depth == 0 and type(module) is type(model):
            calls.append(type(module).__name__)
        depth += 1

    def leave(*_: Any) -> None:
        nonlocal depth
        depth -= 1

    handles = [module_hooks.register_module_forward_pre_hook(enter)]
    handles.append(module_hooks.register_module_forward_hook(leave, always_call=True))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def find(model: nn.Module, x: Any, target: Target | None = None) -> Groups:
    with counted_passes(model) as calls:
        groups = compress.find_groups(model, x, target)
    assert len(calls) <= MOST, len(calls)
    assert groups.num_passes >= len(calls)  # the count that finding groups goes by
    return groups


def names(groups: Groups) -> list[str]:
    return sorted(g.name for g in groups)


class Flat(nn.Module):
    """All code in one forward, as in many small networks; `faults` are steps that run or compute at one width only."""

    def __init__(self, *faults: str) -> None:
        super().__init__()
        self.faults = faults
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 10, 3)
        self.c, self.d, self.e = nn.Conv2d(10, 6, 3), nn.Linear(6 * 4, 14), nn.Linear(14, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        if "scale a" in self.faults:
            x = x * (8 / x.shape[1])
        x = torch.tanh(self.b(x))
        if "scale b" in self.faults:
            x = x + 0.1 * x.shape[1]
        if "parity of b" in self.faults:
            x = x if x.shape[1] % 2 == 0 else 1.5 * x
        x = F.relu(self.c(x))
        x = x.view(-1, int("24")) if "view" in self.faults else x.flatten(1)
        out: Tensor = self.e(torch.sigmoid(self.d(x)))
        return out


@pytest.mark.parametrize(
    ("faults", "left"),
    [
        ((), ["a", "b", "c", "d"]),
        (("view",), ["a", "b", "d"]),
        (("scale a",), ["b", "c", "d"]),
        (("scale b",), ["a", "c", "d"]),
        (("parity of b",), ["a", "c", "d"]),
        (("scale a", "view"), ["b", "d"]),
    ],
)
def test_code_of_the_whole_model_at_fault(faults: tuple[str, ...], left: list[str]) -> None:
    torch.manual_seed(0)
    assert names(find(randomise_(Flat(*faults)), torch.randn(1, 3, 8, 8))) == left


def test_faults_that_come_one_after_the_other_are_refused_with_all_others_if_passes_run_out() -> None:
    torch.manual_seed(0)
    groups = find(randomise_(Flat("scale a", "scale b", "view")), torch.randn(1, 3, 8, 8))
    assert set(names(groups)) <= {"d"}


class Auxiliary(nn.Module):
    """A network with a head that only training mode uses; `faults` names blocks whose code depends on their width."""

    def __init__(self, *faults: str) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 5)
        self.block, self.auxiliary = Block(8, 12, "block" in faults), Block(8, 10, "auxiliary" in faults)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = torch.tanh(self.stem(x))
        outputs = (self.auxiliary(x).mean((2, 3)),) if self.training else ()
        return (self.head((x + self.block(x)).mean((2, 3))), *outputs)


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, is_wrong: bool) -> None:
        super().__init__()
        self.first, self.second, self.is_wrong = nn.Conv2d(width, hidden, 1), nn.Conv2d(hidden, width, 1), is_wrong

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        out: Tensor = self.second(x / x.shape[1] if self.is_wrong else x)
        return out


@pytest.mark.parametrize(
    ("faults", "left"),
    [
        ((), ["auxiliary.first", "block.first", "stem"]),
        (("block",), ["auxiliary.first", "stem"]),
        (("auxiliary",), ["block.first", "stem"]),
    ],
)
def test_parameters_that_eval_mode_does_not_use(faults: tuple[str, ...], left: list[str]) -> None:
    torch.manual_seed(0)
    groups = find(randomise_(Auxiliary(*faults)), torch.randn(1, 3, 8, 8), Target(residual=True))
    assert names(groups) == left


def test_faults_in_both_modes() -> None:
    torch.manual_seed(0)
    groups = find(randomise_(Auxiliary("block", "auxiliary")), torch.randn(1, 3, 8, 8), Target(residual=True))
    assert {"block.first", "auxiliary.first"}.isdisjoint(names(groups))


class Unused(nn.Module):
    """A transformer with a parameter that no mode uses, such as a mask token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.mask_token = model, nn.Parameter(torch.zeros(1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)
        return out


@pytest.mark.parametrize(
    ("attention", "branches", "unused"),
    [
        ("per_head", False, False),
        (True, True, False),
        ("per_head", True, False),
        ("per_head", False, True),
        (True, True, True),
        ("per_head", True, True),
    ],
)
def test_options_that_need_passes_of_their_own(attention: Any, branches: bool, unused: bool) -> None:
    model, x = family("timm vit")
    target = Target(attention=attention, mlp=True, branches=branches)
    groups = find(Unused(model) if unused else model, x, target)
    assert sum(g.kind == "attention" for g in groups) == 2
    assert len(groups.branches) == (4 if branches else 0)


def _half_only(m: Any, x: Tensor) -> Tensor:
    x = torch.tanh(m.first(x))
    if x.dtype == torch.float64:
        raise RuntimeError("not in double precision")
    return m.second(x / x.shape[1] if m.is_wrong else x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_wrong", [False, True])
def test_model_that_does_not_run_in_double_precision(is_wrong: bool) -> None:
    torch.manual_seed(0)
    layers = {"first": nn.Conv2d(3, 8, 3), "second": nn.Conv2d(8, 4, 1)}
    model = randomise_(Net(_half_only, is_wrong=is_wrong, **layers), 0).float()
    assert names(find(model, torch.randn(2, 3, 8, 8))) == ([] if is_wrong else ["first"])


def _make_text_model() -> nn.Module:
    embed = nn.Embedding(20, 12)
    return nn.Sequential(embed, nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3))


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (_make_text_model, torch.randint(0, 20, (4, 7))),
        (lambda: Auxiliary("block"), torch.randn(3, 3, 8, 8)),
    ],
)
def test_inputs_of_several_examples(make: Callable[[], nn.Module], x: Tensor) -> None:
    torch.manual_seed(0)
    assert len(find(randomise_(make()), x, Target(residual=True)))
