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
