"""Training from scratch: the chosen network with new weights, and for a network of cells with other depth and width."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from compress.budget import count_macs
from compress.data import derive_seed
from compress.distributed import broadcast_module_, on_rank_zero
from compress.modules import SearchSpace
from compress.storage import TrainingState, seed_all
from compress.training import set_memory_format_

from .context import RunContext
from .scratch_checks import can_reset, is_rebuilt


def start_from_scratch_(run: RunContext) -> None:
    """Give the network new weights, if the recipe trains from scratch; rebuild a network of cells in its full form.

    A resumed run that is in fine-tuning already is left as it is.
    """
    config, state = run.recipe.finetune, run.engine.run_state
    if config is None or config.from_ != "scratch" or state.stage == "finetune" or run.plan.network:
        return
    report = run.report
    assert report is not None
    seed_all(derive_seed(run.recipe.seed, "scratch"))
    with run.engine.stage("slice"):
        if is_rebuilt(run.compact, run.recipe):
            assert isinstance(run.compact, SearchSpace) and report.genotype is not None
            sizes: dict[str, Any] = {"cells": config.cells, "channels": config.channels}
            chosen_sizes = {name: value for name, value in sizes.items() if value is not None}
            description = run.compact.describe(report.genotype, **chosen_sizes)
            run.compact.rebuild_(description)
            run.plan = replace(run.plan, network=description)
            report.notes.append(
                "trained from scratch at "
                + ", ".join(f"{value} {name}" for name, value in description.items() if isinstance(value, int))
            )
        else:
            for module in run.compact.modules():
                if can_reset(module):
                    module.reset_parameters()  # type: ignore[operator]
            report.notes.append("trained from scratch")
        set_memory_format_(run.compact, run.engine)
        broadcast_module_(run.compact)
        report.pruned.params = sum(p.numel() for p in run.compact.parameters())
        report.pruned.macs = on_rank_zero(lambda: count_macs(run.compact, run.example_inputs)[id(run.compact)])
    state.plan, state.report = run.plan.to_dict(), asdict(report)
    run.engine.save(TrainingState({"student": run.compact}))
