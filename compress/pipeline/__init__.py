"""A pruning run from checked inputs to exported files.

`Run` has a method for every stage: groups, search, choice of widths, cut, fine-tuning, measurement, export. The other
files hold what the stages need: checks before the start, the working directory, the budget of a round.
"""

from .agreement import AGREEMENT, FEWEST_EXAMPLES, add_agreement_
from .exact_plan import choose_exact_plan
from .export import check_export, export_network
from .from_scratch import start_from_scratch_
from .operation_stage import OperationSearch, choose_operations_, preview_operations
from .preflight import UserInputs, check_groups
from .report_updates import note_tight_limit
from .run import Run
from .search_stage import SearchResult, finish_search, start_search
from .shared_search import SharedSearch, can_share_search, cut_to_budget
from .workdir import IDENTITY_FILE, RunIdentity, check_workdir, export_differences

__all__ = [
    "AGREEMENT",
    "FEWEST_EXAMPLES",
    "IDENTITY_FILE",
    "OperationSearch",
    "Run",
    "RunIdentity",
    "SearchResult",
    "SharedSearch",
    "UserInputs",
    "add_agreement_",
    "can_share_search",
    "check_export",
    "check_groups",
    "check_workdir",
    "choose_exact_plan",
    "choose_operations_",
    "cut_to_budget",
    "export_differences",
    "export_network",
    "finish_search",
    "note_tight_limit",
    "preview_operations",
    "start_from_scratch_",
    "start_search",
]
