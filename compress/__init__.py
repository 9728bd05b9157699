"""Exact structured pruning of PyTorch networks: search scores, fold, slice, fine-tune, save and reload."""

import importlib
from typing import Any

from . import startup as startup  # first: the other imports take seconds
from .api import Pruned, preview, prune
from .errors import BatchError, BudgetError, Diverged, NotReady, PlanError, RecipeError, TraceError
from .modules import register_form_provider
from .recipe import Recipe, SearchConfig
from .report import Report
from .search import Job, Search, register_search
from .session import Session, search_session
from .surgery import Plan, find_groups, load
from .training import Classification, Task, distillation
from .version import __version__ as __version__

__all__ = [
    "BatchError",
    "BudgetError",
    "Classification",
    "Diverged",
    "Job",
    "NotReady",
    "Plan",
    "PlanError",
    "Pruned",
    "Recipe",
    "RecipeError",
    "Report",
    "Search",
    "SearchConfig",
    "Session",
    "Task",
    "TraceError",
    "distillation",
    "find_groups",
    "load",
    "preview",
    "prune",
    "register_search",
    "search_session",
]


def _load_mmdet_forms() -> None:
    from .mmdet import compact_forms  # noqa: F401


register_form_provider("mmdet", _load_mmdet_forms)


def __getattr__(name: str) -> Any:
    """Import `compress.exporters` at its first use."""
    if name == "exporters":
        return importlib.import_module(".exporters", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
