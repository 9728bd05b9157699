"""Report the result of a pruning run: an object and JSON, a terminal table, an HTML page with charts.

A new chart goes into charts.py, a new column of the group table into group_table.py.
"""

from .page import render_page
from .report import Report
from .run_info import describe_machine, run_origin

__all__ = ["Report", "describe_machine", "render_page", "run_origin"]
