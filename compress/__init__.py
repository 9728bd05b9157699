"""Exact structured pruning of PyTorch networks: search scores, fold, slice, fine-tune, save and reload."""

import importlib
from typing import Any

from . import source_tree as source_tree
from . import startup as startup  # before the imports that take seconds
from .api import Pruned, preview, prune
from .diagnostics import Sensitivity, landscape, sensitivity
from .errors import BatchError, BudgetError, Diverged, NotReady, PlanError, RecipeError, TraceError
from .modules import Choice, register_form_provider
from .recipe import Recipe, SearchConfig
from .report import Landscape, Report
from .search import Job, Search, register_search
from .session import Session, search_session
from .surgery import Plan, find_groups, load
from .tradeoffs import Curve, tradeoff
from .training import Classification, Detection, Regression, Segmentation, Task, distillation
from .version import __version__ as __version__

__all__ = [
    "BatchError",
    "BudgetError",
    "Choice",
    "Classification",
    "Curve",
    "Detection",
    "Diverged",
    "Job",
    "Landscape",
    "NotReady",
    "Plan",
    "PlanError",
    "Pruned",
    "Recipe",
    "RecipeError",
    "Regression",
    "Report",
    "Search",
    "SearchConfig",
    "Segmentation",
    "Sensitivity",
    "Session",
    "Task",
    "TraceError",
    "distillation",
    "find_groups",
    "landscape",
    "load",
    "preview",
    "prune",
    "register_search",
    "search_session",
    "sensitivity",
    "tradeoff",
]


def _load_mmdet_forms() -> None:
    from .mmdet import compact_forms  # noqa: F401


register_form_provider("mmdet", _load_mmdet_forms)


def __getattr__(name: str) -> Any:
    """Import the exporters and the integrations of other libraries at their first use."""
    if name in ("exporters", "hf", "mmdet", "yolo"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
