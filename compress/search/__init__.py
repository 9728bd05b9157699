"""Search algorithms, which find the importance of each dimension; one paper per file.

`base` has the interface and the registry, `score_training` what the searches with trained scores share.
"""

from . import darts, magnitude, milenas, netslim, random, rarts, taylor  # noqa: F401
from .base import Job, Search, data_free_importance, register_search, search_class
from .bayes import bayes_compress, bayesnas  # noqa: F401
from .result_warnings import describe_zero_weights, warn_about_zero_scores
from .score_history import LARGEST_GROUPS, record_scores

__all__ = [
    "LARGEST_GROUPS",
    "Job",
    "Search",
    "data_free_importance",
    "describe_zero_weights",
    "record_scores",
    "register_search",
    "search_class",
    "warn_about_zero_scores",
]
