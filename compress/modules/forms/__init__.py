"""Compact forms of the attention and norms of torch and of libraries; those of a library load when it is used."""

from . import library_forms, norms, torch_attention  # noqa: F401  (they register compact forms)
from .attention_math import attend, attend_with_scores, join_heads, split_heads, split_qkv

__all__ = ["attend", "attend_with_scores", "join_heads", "split_heads", "split_qkv"]
