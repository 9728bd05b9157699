"""Groups at fault are found in few forward passes, however many there are, and no others are refused."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import compress
from cases import distance, randomise_, run
from compress.surgery import verify_plan
from compress.surgery.verify import random_widths


class Block(nn.Module):
    """A residual block whose code may reshape to a fixed width, or compute something that depends on the width."""

    def __init__(self, width: int, hidden: int, wrong: str, activation: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.wrong = nn.Linear(width, hidden), nn.Linear(hidden, width), wrong
        self.activation = activation
        self.shape = f"-1 {hidden}"  # as text: nothing follows it

    def forward(self, x: Tensor) -> Tensor:
        h = self.activation(self.first(x))
        if self.wrong == "shape":
            h = h.reshape([int(size) for size in self.shape.split()])
        elif self.wrong == "value":
            h = h / h.shape[1]
        out: Tensor = self.second(h)
        return out


class Blocks(nn.Module):
    def __init__(self, wrong: list[str], activation: type[nn.Module] = nn.Tanh) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList([Block(8, 12, w, activation()) for w in wrong])

    def forward(self, x: Tensor) -> Tensor:
        Blocks.passes += 1
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out

    passes = 0


def passes_of(model: Blocks) -> tuple[list[str], int]:
    Blocks.passes = 0
    groups = compress.find_groups(randomise_(model.double()), torch.randn(2, 5).double())
    return sorted(g.name for g in groups), Blocks.passes


def test_exact_blocks_take_five_passes() -> None:
    names, passes = passes_of(Blocks([""] * 4))
    assert len(names) == 5 and passes <= 6


def test_blocks_at_fault_are_refused_and_no_others() -> None:
    names, passes = passes_of(Blocks(["", "shape", "", "value", "", "shape"]))
    assert names == ["blocks.0.first", "blocks.2.first", "blocks.4.first", "stem"]
    assert passes <= 10


def test_three_hundred_groups_at_fault_take_ten_passes_at_most() -> None:
    names, passes = passes_of(Blocks(["shape", "value", ""] * 150))
    assert len(names) == 151 and passes <= 10


def test_an_error_that_does_not_show_in_every_block_is_refused_in_all_of_them() -> None:
    """With two of twelve units kept, all of them may be silent behind a ReLU, and the error with them."""
    names, passes = passes_of(Blocks(["shape", "value"] * 150, nn.ReLU))
    assert names == ["stem"] and passes <= 10


def test_what_is_left_is_verified_together() -> None:
    model = randomise_(Blocks(["", "shape", "value", ""]).double())
    x = torch.randn(2, 5).double()
    groups = compress.find_groups(model, x)
    for seed in range(6):
        keep = random_widths(list(groups), seed)
        plan = compress.Plan.build(model, groups, keep)
        zeroed = run(plan.zero_(randomise_(Blocks(["", "shape", "value", ""]).double())), x)
        assert distance(zeroed, run(plan.apply_(randomise_(Blocks(["", "shape", "value", ""]).double())), x)) < 1e-10


def test_reason_names_the_module_and_its_error() -> None:
    groups = compress.find_groups(Blocks(["shape"]), torch.randn(2, 5))
    reason = next(r.reason for r in groups.refused if r.name == "blocks.0.first")
    assert "the code of blocks.0 does not run at another width" in reason and "shape" in reason


class FixedAttribute(nn.Module):
    """Its code reshapes by an attribute that cannot be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 8
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 3)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "width" and name in vars(self):
            raise ValueError("the width is fixed")
        super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x)).view(-1, self.width))
        return out


def test_model_that_cannot_be_sliced_is_refused() -> None:
    groups = compress.find_groups(FixedAttribute(), torch.randn(2, 5))
    assert not len(groups)
    assert any("cannot be sliced: ValueError: the width is fixed" in r.reason for r in groups.refused)


class BranchOnOneWidth(nn.Module):
    """Its own code calls no operator at the dense width, nor at the small ones that find_groups tries."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Linear(5, 32), nn.Linear(32, 24), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        out: Tensor = self.last(self.b(1.7 * h if 12 <= h.shape[-1] < 32 else h))
        return out


def test_group_at_fault_is_found_where_the_trace_saw_no_operator() -> None:
    model = BranchOnOneWidth()
    groups = compress.find_groups(model, torch.randn(2, 5))
    plan = compress.Plan.build(model, groups, {"a": range(20), "b": range(10)})
    assert [*verify_plan(model, groups, plan)] == ["a"]
