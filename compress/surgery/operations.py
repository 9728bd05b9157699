"""The part of a plan that chooses operations: check it, and put the chosen candidates in their places."""

from __future__ import annotations

import torch
from torch import nn

from compress.errors import PlanError
from compress.modules import SearchSpace, choices_of, choose_, shared_copy

from .plan_data import PlanData


def with_operations(model: nn.Module, plan: PlanData) -> nn.Module:
    """Return the model after the plan's choice of operations, as a shared copy; the model itself if it makes none.

    Raises:
        PlanError: the plan was made for another model.
    """
    if not plan.choices and not plan.network:
        return model
    copied = shared_copy(model)
    apply_operations_(copied, plan)
    return copied


def apply_operations_(model: nn.Module, plan: PlanData) -> None:
    """Put the chosen candidates of a plan in their places, in place; rebuild a search space if the plan says so.

    Raises:
        PlanError: the plan was made for another model; the model is unchanged.
    """
    if problems := _operation_problems(model, plan):
        listed = "\n  ".join(problems[:8] + [f"... and {len(problems) - 8} more"] * (len(problems) > 8))
        raise PlanError(f"this plan chooses operations of another model:\n  {listed}")
    choose_(model, plan.choices)
    if plan.network:
        assert isinstance(model, SearchSpace)
        try:
            with torch.random.fork_rng(devices=[]):  # the weights are loaded afterwards
                model.rebuild_(plan.network)
        except (ValueError, KeyError, TypeError) as error:
            raise PlanError(f"network: the model cannot be rebuilt like this: {error}") from error


def _operation_problems(model: nn.Module, plan: PlanData) -> list[str]:
    """Describe the choices of a plan that the model does not have, and those of the model that the plan leaves open."""
    choices, problems = choices_of(model), []
    for path, name in plan.choices.items():
        if path not in choices:
            problems.append(f"{path or 'the model'}: expected a Choice with the candidate {name}; the model has none")
        elif name not in choices[path].candidates:
            names = ", ".join(choices[path].names)
            problems.append(f"{path}: expected a candidate {name}; its candidates are {names}")
    if plan.choices:
        problems += [f"{path}: the plan does not choose a candidate" for path in choices if path not in plan.choices]
    if "" in plan.choices:
        problems.append("a Choice that is the whole model cannot be replaced; wrap it: nn.Sequential(choice)")
    if plan.network and not isinstance(model, SearchSpace):
        problems.append(
            f"the plan rebuilds a network of cells, such as compress.cells.darts_network; got {type(model).__name__}"
        )
    return problems
