"""Search algorithms, which find the importance of each dimension; one paper per file.

`base` has the interface and the registry, `score_training` what the searches with trained scores share.
"""

from . import darts, magnitude, milenas, netslim, random, rarts, rvsm, taylor  # noqa: F401
from .aps import aps_search  # noqa: F401
from .base import Job, Search, data_free_importance, register_search, search_class
from .bayes import bayes_compress, bayesnas, bayesnas_operations  # noqa: F401
from .cost_history import CostHistory, sign_changes, smoothed
from .result_warnings import describe_zero_weights, warn_about_zero_scores
from .score_history import record_costs, record_scores, spread_over_kinds

__all__ = [
    "CostHistory",
    "Job",
    "Search",
    "data_free_importance",
    "describe_zero_weights",
    "record_costs",
    "record_scores",
    "register_search",
    "search_class",
    "sign_changes",
    "smoothed",
    "spread_over_kinds",
    "warn_about_zero_scores",
]
