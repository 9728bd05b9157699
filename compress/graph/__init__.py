"""Find the groups of dimensions that must be removed together, by tracing the operators of a model.

Rules by operator (rules/) join positions of tensors; joined positions become groups with the tensors that hold them,
their costs, and the attributes that follow their widths.
"""

from .activation_groups import Activations, ModuleCall
from .atoms import BatchNormOutput, TracedTensor
from .costs import Cost
from .group import BranchRemoval, Group, Index, Slot, TracedPart
from .grouping import build_groups
from .model_groups import Groups
from .per_head import split_by_head_
from .selection import AttentionMode, attention_modes, included_modules, select_groups_
from .tracing import trace_model

__all__ = [
    "Activations",
    "AttentionMode",
    "BatchNormOutput",
    "BranchRemoval",
    "Cost",
    "Group",
    "Groups",
    "Index",
    "ModuleCall",
    "Slot",
    "TracedPart",
    "TracedTensor",
    "attention_modes",
    "build_groups",
    "included_modules",
    "select_groups_",
    "split_by_head_",
    "trace_model",
]
