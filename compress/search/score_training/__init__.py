"""Training of scores, shared by the searches that train them: settings, steps, regularizers and cheap gradients."""

from .scored_config import OptimizerOverrides, ScoredConfig
from .scored_search import ScoredSearch, attach_gates

__all__ = ["OptimizerOverrides", "ScoredConfig", "ScoredSearch", "attach_gates"]
