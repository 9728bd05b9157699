"""Change a model's structure: gates with scores, plans, slicing, verification, compensation, saved models.

`find_groups` returns the verified groups of a model; a `Plan` says what to keep of them; `slice_` cuts the model.
"""

from .compensation import compensate_
from .crop_kernels import nonzero_spans
from .discovery import find_groups
from .gates import Gate, attach_, fold_
from .plan import Plan
from .saved_model import load, save_model
from .slicing import slice_
from .verify import verify_plan

__all__ = [
    "Gate",
    "Plan",
    "attach_",
    "compensate_",
    "find_groups",
    "fold_",
    "load",
    "nonzero_spans",
    "save_model",
    "slice_",
    "verify_plan",
]
