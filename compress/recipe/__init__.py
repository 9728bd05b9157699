"""Recipes: the settings of a pruning run as validated data, from YAML files, dicts or objects.

Errors list every problem of a recipe with file, line and column. `SearchConfig` is the base of the settings of every
search method; a method is added with `register_config`.
"""

from .budget_section import Budget, BudgetUnit, Quantity, format_limit
from .completion import DataKind, complete_recipe, describe_defaults
from .engine_config import EngineConfig, Precision
from .fields import (
    Fraction,
    Length,
    LogitDistillation,
    NonNegative,
    Number,
    Positive,
    StrictModel,
    TrainingConfig,
    Width,
    parse_allowed_loss,
    parse_fraction,
    parse_number,
)
from .name_patterns import NamePattern
from .reader import read_budget
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
from .sections import Bound, Data, Distill, Export, ExportFormat, Finetune, Target, Timing
from .sources import packaged_recipes

__all__ = [
    "RANKING_DESCRIPTION",
    "Bound",
    "Budget",
    "BudgetUnit",
    "Data",
    "DataKind",
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
    "Number",
    "Positive",
    "Precision",
    "Quantity",
    "Ranking",
    "Recipe",
    "SearchConfig",
    "StrictModel",
    "Target",
    "Timing",
    "TrainingConfig",
    "Width",
    "complete_recipe",
    "config_class",
    "describe_defaults",
    "format_limit",
    "only_inner_channels",
    "packaged_recipes",
    "parse_allowed_loss",
    "parse_fraction",
    "parse_number",
    "read_budget",
    "register_config",
    "search_names",
]
