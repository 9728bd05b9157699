"""The hash of tensors changes with each of: text, name, type, shape, value; and with nothing else."""

from __future__ import annotations

import torch

from compress.storage.hashes import hash_tensors


def test_hash_does_not_depend_on_order_memory_format_or_gradients() -> None:
    x = torch.randn(2, 3, 4, 4)
    a = {"x": x, "y": torch.arange(3)}
    b = {"y": torch.arange(3), "x": x.to(memory_format=torch.channels_last).requires_grad_()}
    assert hash_tensors(a, "text") == hash_tensors(b, "text")


def test_hash_depends_on_everything_else() -> None:
    changes = [
        ({"x": torch.zeros(2, 3)}, "text"),
        ({"x": torch.zeros(2, 3)}, "texts"),
        ({"y": torch.zeros(2, 3)}, "text"),
        ({"x": torch.zeros(3, 2)}, "text"),
        ({"x": torch.zeros(2, 3, dtype=torch.float16)}, "text"),
        ({"x": torch.zeros(2, 3, dtype=torch.int32)}, "text"),
        ({"x": torch.zeros(2, 3).index_fill(0, torch.tensor(1), -0.0)}, "text"),
        ({}, "text"),
    ]
    assert len({hash_tensors(*change) for change in changes}) == len(changes)
