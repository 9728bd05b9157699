"""Recipes: the settings of a pruning run as validated data, from YAML files, dicts or objects.

Errors list every problem of a recipe with file, line and column. `SearchConfig` is the base of the settings of every
search method; a method is added with `register_config`.
"""

from .engine_config import EngineConfig, Precision
from .fields import (
    Fraction,
    Length,
    LogitDistillation,
    NonNegative,
    Positive,
    StrictModel,
    TrainingConfig,
    parse_number,
)
from .name_patterns import NamePattern
from .schema import Recipe
from .search_config import (
    RANKING_DESCRIPTION,
    HasKind,
    Ranking,
    SearchConfig,
    config_class,
    only_inner_channels,
    register_config,
    search_names,
)
from .sections import Bound, Budget, Data, Distill, Export, ExportFormat, Finetune, Target, Timing
from .sources import packaged_recipes

__all__ = [
    "RANKING_DESCRIPTION",
    "Bound",
    "Budget",
    "Data",
    "Distill",
    "EngineConfig",
    "Export",
    "ExportFormat",
    "Finetune",
    "Fraction",
    "HasKind",
    "Length",
    "LogitDistillation",
    "NamePattern",
    "NonNegative",
    "Positive",
    "Precision",
    "Ranking",
    "Recipe",
    "SearchConfig",
    "StrictModel",
    "Target",
    "Timing",
    "TrainingConfig",
    "config_class",
    "only_inner_channels",
    "packaged_recipes",
    "parse_number",
    "register_config",
    "search_names",
]
