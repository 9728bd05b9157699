"""Modules and tensors by the names that torch gives them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cases import CASES, build
from compress.modules.traversal import modules_of, scripted_modules, tensors_of


@pytest.mark.parametrize("name", CASES)
def test_traversal_gives_the_names_that_torch_gives(name: str) -> None:
    model = build(CASES[name])
    for aliases in (False, True):
        assert modules_of(model, aliases) == dict(model.named_modules(remove_duplicate=not aliases))
        named = [model.named_parameters, model.named_buffers]
        assert list(tensors_of(model, aliases)) == [n for f in named for n, _ in f(remove_duplicate=not aliases)]


def test_scripted_modules_are_apart() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(scripted))
    assert list(modules_of(model)) == ["", "0", "1"]
    assert list(scripted_modules(model)) == ["1.0"]
    assert list(tensors_of(model)) == ["0.weight", "0.bias"]
