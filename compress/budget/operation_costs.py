"""Cost of operations: multiply-adds, parameters and measured time of every candidate of every choice."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compress.graph import weights_file_bytes
from compress.modules import (
    Choice,
    as_call_inputs,
    choice_groups,
    choices_of,
    choose_,
    first_examples,
    module_mode,
    shared_copy,
)
from compress.recipe import Timing

from .timing import Clock, RunTimes, compare_latency, repeat_to_batch

OperationUnit = Literal["macs", "params", "size", "latency"]
CandidateCosts = dict[str, dict[str, float]]  # group of choices -> candidate -> cost


@dataclass
class Operations:
    """The choices of a network by group, and the cost of their candidates; each unit is counted or measured once.

    Attributes:
        model: the network with its choices.
        example_inputs: what the network is called with.
        timing: batch size and repeats of measured times.
        measured: candidate costs by unit, as far as they are known.
    """

    model: nn.Module
    example_inputs: Any
    timing: Timing
    clock: Clock = time.perf_counter
    measured: dict[str, CandidateCosts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        choices = choices_of(self.model)
        self.groups: dict[str, list[Choice]] = {
            group: [choices[path] for path in paths] for group, paths in choice_groups(self.model).items()
        }

    @property
    def scores(self) -> dict[str, nn.Parameter]:
        """Return the scores by group."""
        return {group: copies[0].scores for group, copies in self.groups.items()}

    @property
    def candidates(self) -> dict[str, list[str]]:
        """Return the names of the candidates by group."""
        return {group: copies[0].names for group, copies in self.groups.items()}

    def costs(self, unit: OperationUnit) -> CandidateCosts:
        """Return the cost of each candidate in all places of its group: MACs, parameters, bytes or milliseconds."""
        if unit not in self.measured:
            counts = {"macs": self._count_macs, "params": self._count_params, "size": self._count_bytes}
            self.measured[unit] = counts[unit]() if unit in counts else self._measure_times()
        return self.measured[unit]

    def costliest(self, unit: OperationUnit) -> dict[str, str]:
        """Return the costliest candidate of each group."""
        return {group: max(table, key=lambda name: table[name]) for group, table in self.costs(unit).items()}

    def network(self, chosen: Mapping[str, str]) -> nn.Module:
        """Return a shared copy of the network with these candidates, by group."""
        copied = shared_copy(self.model)
        return choose_(copied, {p: chosen[group] for group, paths in choice_groups(copied).items() for p in paths})

    def time_networks(self, networks: Sequence[nn.Module]) -> list[RunTimes]:
        """Time networks in turn on batches of the recipe's size."""
        batch = repeat_to_batch(self.example_inputs, self.timing.batch_size)
        return compare_latency(networks, batch, self.timing.repeats, clock=self.clock)

    def _count_params(self) -> CandidateCosts:
        return {
            group: {
                name: float(sum(p.numel() for choice in copies for p in choice.candidates[name].parameters()))
                for name in copies[0].names
            }
            for group, copies in self.groups.items()
        }

    def _count_bytes(self) -> CandidateCosts:
        """Count the bytes of a file with the candidate alone, which is a little more than it adds to another."""
        return {
            group: {
                name: float(sum(weights_file_bytes(choice.candidates[name]) for choice in copies))
                for name in copies[0].names
            }
            for group, copies in self.groups.items()
        }

    def _count_macs(self) -> CandidateCosts:
        macs = count_macs(self.model, self.example_inputs)
        return {
            group: {name: float(sum(macs[id(c.candidates[name])] for c in copies)) for name in copies[0].names}
            for group, copies in self.groups.items()
        }

    def _measure_times(self) -> CandidateCosts:
        """Time the candidates of each choice, in turn, on the inputs that they get in the network."""
        model = shared_copy(self.model)
        inputs = _inputs_of_choices(model, repeat_to_batch(self.example_inputs, self.timing.batch_size))
        choices = choices_of(model)
        times: CandidateCosts = {}
        for group, paths in choice_groups(model).items():
            times[group] = dict.fromkeys(choices[paths[0]].names, 0.0)
            for path in paths:
                candidates = choices[path].candidates
                for call in inputs.get(path, []):
                    modules = [_WithKeywords(module, call[1]) for module in candidates.values()]
                    measured = compare_latency(modules, call[0], self.timing.repeats, clock=self.clock)
                    for name, run_times in zip(candidates, measured, strict=True):
                        times[group][name] += run_times.median
        return times


class _WithKeywords(nn.Module):
    """A module that is called with the keyword arguments of its place."""

    def __init__(self, module: nn.Module, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.module, self.kwargs = module, kwargs

    def forward(self, *args: Any) -> Any:
        return self.module(*args, **self.kwargs)


@torch.no_grad()
def count_macs(model: nn.Module, example_inputs: Any) -> dict[int, int]:
    """Return the multiply-adds of every module by its id, on a single example; those of the model include all.

    Modules that are not run have none.
    """
    from torch.utils.flop_counter import FlopCounterMode

    args, kwargs = pytree.tree_map(_detached, first_examples(as_call_inputs(example_inputs)))
    macs: dict[int, int] = {id(module): 0 for module in model.modules()}
    counter = FlopCounterMode(display=False)
    started: dict[int, int] = {}

    def start(module: nn.Module, *_: Any) -> None:
        started[id(module)] = counter.get_total_flops()

    def stop(module: nn.Module, *_: Any) -> None:
        macs[id(module)] += (counter.get_total_flops() - started[id(module)]) // 2

    observed = [model, *(c for choice in choices_of(model).values() for c in choice.candidates.values())]
    with module_mode(model, training=False), _hooks(observed, start, stop), counter:
        model(*args, **kwargs)
    return macs


@contextmanager
def _hooks(modules: list[nn.Module], start: Any, stop: Any) -> Iterator[None]:
    handles = [m.register_forward_pre_hook(start, prepend=True) for m in modules]
    handles += [m.register_forward_hook(stop) for m in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _inputs_of_choices(model: nn.Module, inputs: Any) -> dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Return the arguments that each choice gets in a forward pass, by its path."""
    calls: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}
    handles = []
    for path, choice in choices_of(model).items():

        def record(_: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            calls.setdefault(path, []).append(pytree.tree_map(_detached, (args, kwargs)))

        handles.append(choice.register_forward_pre_hook(record, with_kwargs=True))
    args, kwargs = as_call_inputs(inputs)
    try:
        with module_mode(model, training=False):
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _detached(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
