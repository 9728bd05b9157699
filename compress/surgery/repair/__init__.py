"""Repair of a cut network in closed form, from inputs without labels."""

from .attention_repair import AttentionRepair
from .layer_problem import LayerRepair
from .least_squares import Repair, repair_
from .predictors import prefer_predictors

__all__ = ["AttentionRepair", "LayerRepair", "Repair", "prefer_predictors", "repair_"]
