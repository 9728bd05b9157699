"""Hashes by which files that belong together know each other, and damage is seen."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def digest(tensors: Mapping[str, Tensor], text: str = "") -> str:
    """A hash of a text and of every tensor's name, type, shape and numbers, in whatever order they come.

    >>> one = digest({"a": torch.zeros(2), "b": torch.ones(3)}, "text")
    >>> one == digest({"b": torch.ones(3), "a": torch.zeros(2)}, "text"), one == digest({"a": torch.zeros(2)}, "text")
    (True, False)
    """
    total = hashlib.sha256(f"{len(text)} {text}".encode("utf-8", "surrogatepass"))
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu()
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode("utf-8", "surrogatepass"))
        total.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
