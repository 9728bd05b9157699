"""Code that asks for a lower precision gets double precision, inside of the context only."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compress.surgery.double_precision import double_precision

LOWERING: dict[str, Callable[[Tensor], Tensor]] = {
    "float": lambda x: x.float(),
    "half": lambda x: x.half(),
    "to": lambda x: x.to(torch.bfloat16),
    "to with a keyword": lambda x: x.to(dtype=torch.float16),
    "type": lambda x: x.type(torch.float32),
    "softmax": lambda x: F.softmax(x, -1, dtype=torch.float32),
    "new tensor": lambda x: torch.zeros(3),
    "new tensor of a type": lambda x: torch.ones(3, dtype=torch.float32) * x,
    "integers": lambda x: torch.arange(3) / 2,
}


@pytest.mark.parametrize("name", LOWERING)
def test_lower_precision_becomes_double(name: str) -> None:
    x = torch.randn(3, dtype=torch.float64)
    with double_precision():
        assert LOWERING[name](x).dtype is torch.float64
    assert torch.get_default_dtype() is torch.float32 and x.float().dtype is torch.float32


def test_integers_and_masks_stay() -> None:
    with double_precision():
        x = torch.arange(3)
        assert x.dtype is torch.int64 and x.bool().dtype is torch.bool and x.to(torch.int32).dtype is torch.int32


def test_default_type_is_restored_after_an_error() -> None:
    with pytest.raises(RuntimeError), double_precision():
        torch.zeros(2).view(3)
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize("by_name", [False, True])
def test_convolutions_in_channels_last_give_the_same_numbers_and_strides(groups: int, by_name: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 8, 7, 5, dtype=torch.float64).to(memory_format=torch.channels_last)
    weight = torch.randn(8, 8 // groups, 3, 3, dtype=torch.float64)

    def run() -> Tensor:
        if by_name:
            return F.conv2d(input=x, weight=weight, stride=2, padding=1, groups=groups)
        return F.conv2d(x, weight, None, 2, 1, 1, groups)

    expected = run()
    with double_precision():
        result = run()
    assert torch.allclose(result, expected, rtol=1e-13, atol=1e-13)
    assert result.stride() == expected.stride()
