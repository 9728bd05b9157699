"""Structured pruning that is exact: score, fold, slice, reload."""

from .api import Pruned, load, preview, prune
from .budget import BudgetError
from .discover import find_groups
from .plan import Plan, PlanError
from .recipe import Recipe, RecipeError
from .report import Report
from .tracing import TraceError

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "Plan",
    "PlanError",
    "Pruned",
    "Recipe",
    "RecipeError",
    "Report",
    "TraceError",
    "find_groups",
    "load",
    "preview",
    "prune",
]
