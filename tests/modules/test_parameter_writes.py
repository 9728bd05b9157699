"""Code that writes to its parameters is noticed, and the writes are undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases import Net
from compress.modules import guarded_parameters, has_written_parameters, shared_copy


def renorm(m: Any, x: Tensor) -> Tensor:
    return m.fc(m.embedding(x.long().clamp(0, 3)))  # type: ignore[no-any-return]


def clamp_data(m: Any, x: Tensor) -> Tensor:
    m.fc.weight.data.clamp_(-0.1, 0.1)
    return m.fc(x)  # type: ignore[no-any-return]


def replace_data(m: Any, x: Tensor) -> Tensor:
    m.fc.weight.data = m.fc.weight.data.clamp(-0.1, 0.1)
    return m.fc(x)  # type: ignore[no-any-return]


def write_to_a_view(m: Any, x: Tensor) -> Tensor:
    m.fc.weight.detach()[0].fill_(7)
    return m.fc(x)  # type: ignore[no-any-return]


def write_to_an_output_argument(m: Any, x: Tensor) -> Tensor:
    torch.mul(m.fc.weight.detach(), 2, out=m.fc.weight.data)
    return m.fc(x)  # type: ignore[no-any-return]


def write_to_a_list(m: Any, x: Tensor) -> Tensor:
    torch._foreach_mul_([m.fc.weight.data, m.fc.bias.data], 2)
    return m.fc(x)  # type: ignore[no-any-return]


def replace_and_write(m: Any, x: Tensor) -> Tensor:
    m.fc.weight.data.mul_(2)
    m.fc.weight.data = m.fc.weight.data.clone()
    m.fc.weight.data.mul_(2)
    return m.fc(x)  # type: ignore[no-any-return]


def only_read(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, m.fc.weight.clamp(-0.1, 0.1), m.fc.bias)


WRITERS = [
    renorm,
    clamp_data,
    replace_data,
    write_to_a_view,
    write_to_an_output_argument,
    write_to_a_list,
    replace_and_write,
]


def network(code: Callable[[Any, Tensor], Tensor]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Net(code, fc=nn.Linear(4, 4), embedding=nn.Embedding(4, 4, max_norm=0.5)), torch.randn(3, 4)


@pytest.mark.parametrize("code", WRITERS)
def test_writes_are_undone_and_later_copies_have_the_parameter_for_themselves(code: Any) -> None:
    model, x = network(code)
    before = {name: (p, p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}

    def check_unchanged() -> None:
        for name, p in model.named_parameters():
            original, memory, value = before[name]
            assert p is original and p.data_ptr() == memory and torch.equal(p, value), name

    copied = shared_copy(model)
    with torch.no_grad(), guarded_parameters(copied):
        output = copied(x)
    check_unchanged()
    assert has_written_parameters(model)
    later = shared_copy(model)
    with torch.no_grad():
        assert torch.equal(later(x), output)
        later(x)
    check_unchanged()
    with torch.no_grad():
        model(x)
    assert any(not torch.equal(p, before[name][2]) for name, p in model.named_parameters()), "the code does write"


def test_parameters_that_are_only_read_stay_shared() -> None:
    model, x = network(only_read)
    copied = shared_copy(model)
    with guarded_parameters(copied):
        copied(x)
    assert not has_written_parameters(model)
    assert all(a is b for a, b in zip(model.parameters(), shared_copy(model).parameters(), strict=True))


def test_writes_are_undone_if_the_code_fails() -> None:
    def fail(m: Any, x: Tensor) -> Tensor:
        m.fc.weight.data.zero_()
        raise ValueError("of the model's own")

    model, x = network(fail)
    weight = model.fc.weight.detach().clone()
    with pytest.raises(ValueError, match="of the model's own"), guarded_parameters(model):
        model(x)
    assert torch.equal(model.fc.weight, weight)
