"""Extra state of modules goes through tensors and comes back as it was, or is refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from compress.storage.extra_state import (
    decode_extra_states,
    encode_extra_states,
    extra_state_problems,
    extra_states,
    is_extra_state,
    set_extra_states_,
)


class Stateful(nn.Module):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


STATES: list[Any] = [
    None,
    True,
    3,
    -0.1,
    math.inf,
    "naïve ☃",
    [],
    {"steps": 3, 7: ["tensor", 0], None: (1, [2, ()])},
    ["dict", ["list", {"a": {}}]],
]


@pytest.mark.parametrize("state", STATES)
def test_json_data_come_back_as_they_were(state: Any) -> None:
    encoded = encode_extra_states({"_extra_state": state})
    assert all(isinstance(tensor, torch.Tensor) for tensor in encoded.values())
    assert decode_extra_states(encoded) == {"_extra_state": state}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
def test_tensors_come_back_with_their_bits(dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 4).to(dtype)
    for state in (tensor, {"a": [tensor.T, {"b": tensor[0]}], "empty": tensor[:0], "number": tensor[0, 0]}):
        found = decode_extra_states(encode_extra_states({"a.b._extra_state": state}))["a.b._extra_state"]
        flat, exact = torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(state)
        assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(flat, exact, strict=True))
        assert torch.utils._pytree.tree_structure(found) == torch.utils._pytree.tree_structure(state)


def test_states_of_all_submodules_are_found_and_set() -> None:
    module = nn.Sequential(Stateful(1), nn.Linear(2, 2), nn.Sequential(Stateful([2.0])))
    assert extra_states(module) == {"0._extra_state": 1, "2.0._extra_state": [2.0]}
    set_extra_states_(module, {"2.0._extra_state": "new"})
    assert extra_states(module) == {"0._extra_state": 1, "2.0._extra_state": "new"}
    assert [is_extra_state(name) for name in ("_extra_state", "a._extra_state/3", "my_extra_state", "a.weight")] == [
        *(True, True, False, False)
    ]


@pytest.mark.parametrize("state", [{1, 2}, object(), b"bytes", {(1, 2): 3}, [torch.eye(2).to_sparse()]])
def test_other_types_are_refused_with_the_module(state: Any) -> None:
    (problem,) = extra_state_problems(nn.Sequential(nn.ReLU(), Stateful({"ok": 1, "bad": state})))
    assert problem.startswith("model.1 (Stateful): get_extra_state: expected numbers, text, tensors, and lists")
    assert "Return these, and build the rest in set_extra_state" in problem


def test_state_that_cannot_be_restored_is_refused() -> None:
    class OneWay(nn.Module):
        def get_extra_state(self) -> Any:
            return 1

    assert extra_state_problems(OneWay()) == [
        "model (OneWay): has get_extra_state and no set_extra_state to restore it with; write both"
    ]
    set_extra_states_(OneWay(), {"_extra_state": 2})


@pytest.mark.parametrize("text", ["no json", '["tensor", [5, false]]', '["tensor", 5]', '["list"]', "[" * 100000])
def test_damaged_states_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="_extra_state: not an extra state"):
        decode_extra_states({"_extra_state": torch.tensor(list(text.encode()), dtype=torch.uint8)})
