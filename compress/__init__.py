"""Structured pruning that is exact: score, fold, slice, reload."""

import importlib
from typing import Any

from .api import Pruned, load, preview, prune
from .budget import BudgetError
from .discover import find_groups
from .engine import Diverged
from .plan import Plan, PlanError
from .preflight import NotReady
from .reading import RecipeError
from .recipe import Recipe
from .report import Report
from .search import Job, Search, SearchConfig, register_search
from .session import Session, search_session
from .task import BatchError, Classification, Task, distillation
from .tracing import TraceError

__version__ = "0.1.0"

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


def __getattr__(name: str) -> Any:
    """`compress.exporters`, when it is asked for."""
    if name == "exporters":
        return importlib.import_module(".exporters", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
