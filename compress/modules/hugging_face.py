"""Recognize models of Hugging Face's transformers without importing that library."""

from __future__ import annotations

from typing import Any


def is_hugging_face_model(model: Any) -> bool:
    """Return whether a model is a `transformers.PreTrainedModel`."""
    return any(
        base.__name__ == "PreTrainedModel" and base.__module__ == "transformers.modeling_utils"
        for base in type(model).__mro__
    )
