"""Hashes that tie files of one result together and reveal damage."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def hash_tensors(tensors: Mapping[str, Tensor], text: str = "") -> str:
    """Return a hash of a text and of the names, types, shapes and values of tensors, in any order.

    >>> one = hash_tensors({"a": torch.zeros(2), "b": torch.ones(3)}, "text")
    >>> one == hash_tensors({"b": torch.ones(3), "a": torch.zeros(2)}, "text")
    True
    >>> one == hash_tensors({"a": torch.zeros(2)}, "text")
    False
    """
    sha256 = hashlib.sha256(f"{len(text)} {text}".encode("utf-8", "surrogatepass"))
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu()
        sha256.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode("utf-8", "surrogatepass"))
        sha256.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return sha256.hexdigest()
