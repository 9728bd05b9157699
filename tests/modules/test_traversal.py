"""Modules and tensors by the names that torch gives them."""

from __future__ import annotations

import pytest

from cases import CASES, build
from compress.modules.traversal import modules_of, tensors_of


@pytest.mark.parametrize("name", CASES)
def test_traversal_gives_the_names_that_torch_gives(name: str) -> None:
    model = build(CASES[name])
    for aliases in (False, True):
        assert modules_of(model, aliases) == dict(model.named_modules(remove_duplicate=not aliases))
        named = [model.named_parameters, model.named_buffers]
        assert list(tensors_of(model, aliases)) == [n for f in named for n, _ in f(remove_duplicate=not aliases)]
