"""Accuracy against cost: one model cut to several budgets, as a table, a chart and JSON."""

from .curve import Curve, Point
from .tradeoff_run import DEFAULT_BUDGETS, folder_name, tradeoff

__all__ = ["DEFAULT_BUDGETS", "Curve", "Point", "folder_name", "tradeoff"]
