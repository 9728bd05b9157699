"""Find the dimensions of a model that can be removed, and their groups, by tracing its operators.

A dimension is a set of coupled positions in several tensors that must be removed together: a channel, for example, is a
row of one weight, an entry of a batch norm and a column of the next weight. A group holds the dimensions that live in
the same tensors; each of them can be removed on its own. Rules by operator (rules/) join positions to dimensions.
Groups know their tensors, their costs, and the attributes that follow their widths.
"""

from .activation_groups import Activations, ModuleCall, OwnOperator
from .atoms import BatchNormOutput, TracedTensor
from .costs import Cost, weights_file_bytes
from .group import BranchRemoval, Group, Index, Slot, TracedPart
from .grouping import build_groups
from .model_groups import Groups
from .per_head import split_by_head_
from .selection import (
    AttentionMode,
    attention_modes,
    explain_refused_gates_,
    gate_before_activation_,
    included_modules,
    select_groups_,
)
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
    "OwnOperator",
    "Slot",
    "TracedPart",
    "TracedTensor",
    "attention_modes",
    "build_groups",
    "explain_refused_gates_",
    "gate_before_activation_",
    "included_modules",
    "select_groups_",
    "split_by_head_",
    "trace_model",
    "weights_file_bytes",
]
