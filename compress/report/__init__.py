"""Report the result of a pruning run: an object and JSON, a terminal table, an HTML page with charts.

A new chart goes into charts.py, a new column of the group table into group_table.py.
"""

from .landscape import Landscape, Surface
from .operation_table import OperationRow
from .page import render_page
from .report import NetworkNumbers, Report
from .run_info import describe_machine, run_origin
from .sensitivity_page import CurveOfGroup, SensitivityPage
from .tradeoff_page import TradeoffPage

__all__ = [
    "CurveOfGroup",
    "Landscape",
    "NetworkNumbers",
    "OperationRow",
    "Report",
    "SensitivityPage",
    "Surface",
    "TradeoffPage",
    "describe_machine",
    "render_page",
    "run_origin",
]
