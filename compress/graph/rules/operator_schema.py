"""The parts of the schemas of ATen operators that tracing needs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

VALUE_DEPENDENT_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@dataclass(frozen=True)
class OperatorSchema:
    """The parts of an ATen operator's schema that tracing needs."""

    namespace: str
    op: str
    argument_names: tuple[str, ...]
    defaults: dict[str, Any]
    written_arguments: tuple[int, ...]
    depends_on_values: bool  # its output, or the shape of it, leads values of tensors to Python
    is_convolution: bool


@cache
def schema_of(func: Any) -> OperatorSchema:
    """Return the schema of an ATen operator."""
    namespace, _, op = func._schema.name.partition("::")
    op = op.rstrip("_") if not op.startswith("__") else op
    arguments = func._schema.arguments
    return OperatorSchema(
        namespace,
        op,
        tuple(a.name for a in arguments),
        {a.name: a.default_value for a in arguments if a.has_default_value()},
        tuple(i for i, a in enumerate(arguments) if a.is_write),
        bool(VALUE_DEPENDENT_TAGS & set(func.tags)),
        "conv" in op,
    )
