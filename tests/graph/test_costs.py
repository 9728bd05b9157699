"""Costs are those of the sliced network, to the last multiply-add; attributes match the weights."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from cases import CASES, Case, build, example, groups_of, random_keep, run
from compress import Plan

every_case = pytest.mark.parametrize("case", CASES.values(), ids=str)


def flops(model: nn.Module, case: Case) -> int:
    with FlopCounterMode(display=False) as counter:
        run(model, example(case, batch=1))
    return int(counter.get_total_flops())


@every_case
def test_parameters_are_counted_exactly(case: Case) -> None:
    groups = groups_of(case.name)
    for ratio in (0.3, 0.7, 1.0):
        keep = random_keep(groups, ratio)
        model = build(case)
        Plan.build(model, groups, keep).apply_(model)
        kept = [len(keep[name]) for name in groups.cost.names]
        assert int(groups.cost.params(kept)) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("case", [c for c in CASES.values() if c.flops], ids=str)
def test_multiply_adds_are_those_that_torch_counts(case: Case) -> None:
    groups = groups_of(case.name)
    for ratio in (0.3, 0.7, 1.0):
        keep = random_keep(groups, ratio)
        model = build(case)
        Plan.build(model, groups, keep).apply_(model)
        kept = [len(keep[name]) for name in groups.cost.names]
        assert 2 * int(groups.cost.macs(kept)) == flops(model, case)


@every_case
def test_costs_of_many_choices_are_those_of_each(case: Case) -> None:
    cost = groups_of(case.name).cost
    random = np.random.default_rng(0)
    rows = np.stack([random.integers(1, cost.widths + 1) for _ in range(5)])
    for measure in (cost.params, cost.macs, cost.dims):
        assert measure(rows).tolist() == [int(measure(row)) for row in rows]


def claims(module: nn.Module) -> Iterator[tuple[str, int, int]]:
    """What a module says about its shape, and what its tensors say."""
    if isinstance(module, nn.modules.conv._ConvNd):
        long, short = ("in_channels", "out_channels") if module.transposed else ("out_channels", "in_channels")
        yield long, getattr(module, long), module.weight.shape[0]
        yield short, getattr(module, short), module.weight.shape[1] * module.groups
        if module.bias is not None:
            yield "out_channels", module.out_channels, len(module.bias)
    elif isinstance(module, nn.Linear):
        yield "out_features", module.out_features, module.weight.shape[0]
        yield "in_features", module.in_features, module.weight.shape[1]
        if module.bias is not None:
            yield "out_features", module.out_features, len(module.bias)
    elif isinstance(module, nn.Embedding):
        yield "embedding_dim", module.embedding_dim, module.weight.shape[1]
        yield "num_embeddings", module.num_embeddings, module.weight.shape[0]
    elif isinstance(module, nn.PReLU):
        yield "num_parameters", module.num_parameters, module.weight.shape[0]
    elif isinstance(module, nn.GroupNorm):
        yield "num_channels", module.num_channels, module.weight.shape[0]
        yield "num_groups divides num_channels", module.num_channels % module.num_groups, 0
    elif isinstance(module, nn.modules.batchnorm._NormBase):
        for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
            if tensor is not None:
                yield "num_features", module.num_features, len(tensor)


@every_case
def test_attributes_agree_with_the_weights(case: Case) -> None:
    groups = groups_of(case.name)
    for ratio in (0.4, 0.8):
        model = build(case)
        Plan.build(model, groups, random_keep(groups, ratio)).apply_(model)
        for name, module in model.named_modules():
            if not nn.utils.parametrize.is_parametrized(module):
                for attribute, said, found in claims(module):
                    assert said == found, f"{name}.{attribute} is {said}, the tensor says {found}"


@pytest.mark.filterwarnings("error")
@every_case
def test_sliced_network_runs_without_warnings(case: Case) -> None:
    groups = groups_of(case.name)
    model = build(case)
    run(model, example(case))
    run(Plan.build(model, groups, random_keep(groups, 0.5)).apply_(model), example(case))
