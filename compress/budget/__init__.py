"""From importance and a budget to the dimensions to keep.

Holds the budget's units, the bounds and the ranking of dimensions, the measurement of latency, and the schedule by
which a search approaches its budget.
"""

from .bounds import WidthBounds
from .choose import choose_widths, smallest_fractions
from .importance import Importance
from .latency import CandidateDoesNotRun, check_latency_reachable, choose_by_latency
from .limits import check_asks_for_less, dense_costs, describe_use, remaining_fractions
from .operation_choice import OperationChoice, choose_operations, smallest_operations
from .operation_costs import Operations, count_macs
from .pruning_schedule import PruningSchedule
from .ranking import RankedDimensions
from .timing import (
    LatencyMeasurement,
    LatencyRatio,
    compare_latency,
    compare_latency_in_batches,
    latency_ratio,
    repeat_to_batch,
)
from .units import UNITS

__all__ = [
    "UNITS",
    "CandidateDoesNotRun",
    "Importance",
    "LatencyMeasurement",
    "LatencyRatio",
    "OperationChoice",
    "Operations",
    "PruningSchedule",
    "RankedDimensions",
    "WidthBounds",
    "check_asks_for_less",
    "check_latency_reachable",
    "choose_by_latency",
    "choose_operations",
    "choose_widths",
    "compare_latency",
    "compare_latency_in_batches",
    "count_macs",
    "dense_costs",
    "describe_use",
    "latency_ratio",
    "remaining_fractions",
    "repeat_to_batch",
    "smallest_fractions",
    "smallest_operations",
]
