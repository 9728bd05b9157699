"""From importance and a budget to the dimensions to keep.

Holds the budget's units, the bounds and the ranking of dimensions, the measurement of latency, and the schedule by
which a search approaches its budget.
"""

from .bounds import WidthBounds
from .choose import choose_widths, smallest_fraction
from .importance import Importance
from .latency import CandidateDoesNotRun, check_latency_reachable, choose_by_latency
from .pruning_schedule import PruningSchedule
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
    "PruningSchedule",
    "WidthBounds",
    "check_latency_reachable",
    "choose_by_latency",
    "choose_widths",
    "compare_latency",
    "compare_latency_in_batches",
    "latency_ratio",
    "repeat_to_batch",
    "smallest_fraction",
]
