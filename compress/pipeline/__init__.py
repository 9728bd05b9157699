"""A pruning run from checked inputs to exported files.

`Run` has a method for every stage: groups, search, choice of widths, cut, fine-tuning, measurement, export. The other
files hold what the stages need: checks before the start, the working directory, the budget of a round.
"""

from .exact_plan import choose_exact_plan
from .export import check_export, export_network
from .preflight import UserInputs, check_groups
from .run import Run
from .search_stage import finish_search, start_search
from .workdir import IDENTITY_FILE, RunIdentity, check_workdir, export_differences

__all__ = [
    "IDENTITY_FILE",
    "Run",
    "RunIdentity",
    "UserInputs",
    "check_export",
    "check_groups",
    "check_workdir",
    "choose_exact_plan",
    "export_differences",
    "export_network",
    "finish_search",
    "start_search",
]
