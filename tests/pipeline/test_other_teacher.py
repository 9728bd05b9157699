"""A teacher that is not the network being pruned: it teaches, and nothing else; all its problems are found early."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compress
from helpers.digits import FOUR_STEPS, dense, loaders
from helpers.refusals import refused

DISTILLED: dict[str, Any] = {
    "budget": {"macs": "70%"},
    "search": {"method": "netslim", "epochs": "4 steps", "distill": {"temperature": 1, "weight": 5}},
    "finetune": {"epochs": "16 steps", "lr": 0.02, "distill": {"temperature": 1, "weight": 5}, "best": False},
    "timing": {"repeats": 3},
}


class Constant(nn.Module):
    """A teacher that gives every class the same score, whatever the image."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.logits.expand(len(x), -1)


def pruned_with(teacher: nn.Module | None, recipe: dict[str, Any] = DISTILLED, **given: Any) -> compress.Pruned:
    torch.manual_seed(0)
    train, val = loaders(count=256)
    return compress.prune(dense(), recipe, train=list(train), val=val, teacher=teacher, quiet=True, **given)


def entropy(model: nn.Module) -> float:
    with torch.no_grad():
        probabilities = model(next(iter(loaders()[1]))[0]).softmax(-1)
    return float(-(probabilities * probabilities.clamp_min(1e-12).log()).sum(-1).mean())


def test_the_model_is_its_own_teacher_by_default() -> None:
    default, copied = pruned_with(None), pruned_with(copy.deepcopy(dense()))
    for one, other in zip(default.model.parameters(), copied.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_network_learns_from_the_teacher_that_is_given() -> None:
    """A teacher without an opinion, weighted 5 times as much as the labels, takes the opinions of the network away."""
    own, constant = pruned_with(None), pruned_with(Constant())
    assert entropy(own.model) < 0.5
    assert entropy(constant.model) > 1.5  # the maximum is log 10 = 2.30


def test_search_alone_learns_from_the_teacher() -> None:
    recipe = {key: value for key, value in DISTILLED.items() if key != "finetune"}
    recipe["search"] = recipe["search"] | {"epochs": "12 steps", "lr": 0.01}
    assert entropy(pruned_with(Constant(), recipe).model) > entropy(pruned_with(None, recipe).model) + 0.5


def test_report_compares_with_the_dense_model_and_names_the_teacher() -> None:
    own, constant = pruned_with(None).report, pruned_with(Constant()).report
    assert constant.dense.metrics == own.dense.metrics
    assert constant.dense.params == own.dense.params
    assert "the teacher was another network: Constant, 10 parameters" in constant.notes
    assert not any("teacher" in note for note in own.notes)


def test_teacher_is_not_changed() -> None:
    teacher = dense().train()
    before = copy.deepcopy(teacher.state_dict())
    pruned_with(teacher)
    assert teacher.training
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())


def test_session_learns_from_the_teacher() -> None:
    train, val = loaders(count=256)
    recipe = {**DISTILLED, "search": DISTILLED["search"] | {"lr": 0.01}}
    entropies = []
    for teacher in (None, Constant()):
        session = compress.search_session(dense(), recipe, steps=12, train=train, val=val, teacher=teacher)
        for _ in range(3):
            for batch in train:
                session.step(batch)
        entropies.append(entropy(session.finish().model))
    assert entropies[1] > entropies[0] + 0.5


def test_run_is_not_resumed_with_another_teacher(tmp_path: Path) -> None:
    teacher = Constant()
    pruned_with(teacher, FOUR_STEPS, workdir=tmp_path)
    again = pruned_with(teacher, FOUR_STEPS, workdir=tmp_path, resume=True)
    assert "the teacher was another network: Constant, 10 parameters" in again.report.notes
    with pytest.raises(FileExistsError, match="teacher: was another model, is the model itself"):
        pruned_with(None, FOUR_STEPS, workdir=tmp_path, resume=True)
    with torch.no_grad():
        teacher.logits += 1
    with pytest.raises(FileExistsError, match="the teacher: has the same shapes but other values, first in logits"):
        pruned_with(teacher, FOUR_STEPS, workdir=tmp_path, resume=True)


def test_problems_of_the_teacher_are_found_before_the_run() -> None:
    train, val = loaders(count=256)
    refused("teacher: expected a torch.nn.Module; got str", train=train, val=val, teacher="resnet50")
    refused(
        "teacher: does not run on the first training batch: .*mat1 and mat2",
        train=train,
        val=val,
        teacher=nn.Linear(3, 10),
    )
    refused(
        r"teacher: its outputs cannot be compared with the model's: distillation: expected logits of the same shape; "
        r"got .*\[64, 10\].* of the student and .*\[64, 7\].* of the teacher",
        train=train,
        val=val,
        teacher=Constant(7),
    )
    hopeless = Constant()
    with torch.no_grad():
        hopeless.logits.fill_(torch.nan)
    refused("teacher: expected a finite distance .* got nan", train=train, val=val, teacher=hopeless)
    lazy = nn.Sequential(nn.Flatten(), nn.LazyLinear(10))
    refused(r"teacher: 1\.weight has no shape yet", train=train, val=val, teacher=lazy)


def test_teacher_that_nobody_learns_from_is_refused() -> None:
    recipe = {"budget": {"macs": "60%"}}
    refused(
        r"teacher: no part of the recipe learns from a teacher; add finetune\.distill or search\.distill",
        recipe,
        example_inputs=torch.randn(1, 1, 8, 8),
        teacher=Constant(),
    )


def test_features_need_a_teacher_of_the_same_architecture() -> None:
    train, val = loaders(count=256)
    name = next(name for name, module in dense().named_modules() if isinstance(module, nn.Conv2d))
    recipe = {**FOUR_STEPS, "finetune": {"epochs": "2 steps", "distill": {"features": [name]}}}
    refused("so the teacher needs the model's architecture", recipe, train=train, val=val, teacher=Constant())
    same = dense()
    with torch.no_grad():
        for parameter in same.parameters():
            parameter.mul_(1.01)
    pruned_with(same, recipe)


def test_session_without_data_tries_the_teacher_on_the_example_inputs() -> None:
    x = next(iter(loaders()[0]))[0]

    def start(teacher: nn.Module) -> None:
        compress.search_session(dense(), DISTILLED, steps=2, example_inputs=x, teacher=teacher)

    start(Constant())
    with pytest.raises(compress.NotReady, match=r"teacher: does not run on the example inputs: .*mat1 and mat2"):
        start(nn.Linear(3, 10))
    with pytest.raises(compress.NotReady, match=r"teacher: expected logits of shape \[64, 10\].* got \[64, 7\]"):
        start(Constant(7))
