"""Change a model's structure: gates with scores, plans, slicing, verification, compensation, saved models.

`find_groups` returns the verified groups of a model; a `Plan` says what to keep of them; `slice_` cuts the model.
"""

from .compensation import compensate_
from .crop_kernels import nonzero_spans
from .discovery import find_groups
from .gates import Gate, WeightTransform, attach_, fold_, register_transform_
from .operations import with_operations
from .plan import Plan
from .repair import AttentionRepair, LayerRepair, Repair, prefer_predictors, repair_
from .saved_model import load, save_model
from .slicing import slice_
from .verify import verify_plan

__all__ = [
    "AttentionRepair",
    "Gate",
    "LayerRepair",
    "Plan",
    "Repair",
    "WeightTransform",
    "attach_",
    "compensate_",
    "find_groups",
    "fold_",
    "load",
    "nonzero_spans",
    "prefer_predictors",
    "register_transform_",
    "repair_",
    "save_model",
    "slice_",
    "verify_plan",
    "with_operations",
]
