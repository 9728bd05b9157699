"""Slicing against networks that were built by hand, and against networks masked by hooks."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cases import CASES, Case, build, distance, example, groups_of, random_keep, run, same_bits
from cases.networks_plain import Block, cbr, head
from compress import Plan

State = dict[str, Tensor]


def cut(case: str, keep: dict[str, list[int]]) -> tuple[nn.Module, nn.Module, Tensor]:
    """The dense network of a case, the network that the library cuts, and an input."""
    dense = build(CASES[case])
    sliced = Plan.build(dense, groups_of(case), keep).apply_(copy.deepcopy(dense))
    return dense, sliced, example(CASES[case])


def taken(state: State, **choices: dict[int, list[int]]) -> State:
    """A state with the chosen positions of some tensors; in names, two underscores stand for a dot."""
    result = dict(state)
    for name, dims in choices.items():
        key = name.strip("_").replace("__", ".")
        for dim, positions in dims.items():
            result[key] = result[key].index_select(dim, torch.tensor(positions))
    return result


def norm(path: str, positions: list[int]) -> dict[str, dict[int, list[int]]]:
    return {f"_{path}__{leaf}": {0: positions} for leaf in ("weight", "bias", "running_mean", "running_var")}


def test_chain_is_the_chain_built_by_hand() -> None:
    a, b, c = [0, 3, 4, 7], [1, 2, 5], [0, 6]
    dense, sliced, x = cut("chain", {"0.0": a, "1.0": b, "3.0": c})
    hand = nn.Sequential(cbr(3, 4), cbr(4, 3), nn.MaxPool2d(2), cbr(3, 2), head(2)).double().eval()
    convolutions = {"_0__0__weight": {0: a}, "_1__0__weight": {0: b, 1: a}, "_3__0__weight": {0: c, 1: b}}
    norms = norm("0__1", a) | norm("1__1", b) | norm("3__1", c)
    hand.load_state_dict(taken(dense.state_dict(), **convolutions, **norms, _4__2__weight={1: c}))
    assert same_bits(run(hand, x), run(sliced, x))


def test_residual_stream_is_the_one_built_by_hand() -> None:
    stream, inner1, inner2 = [1, 2, 4, 5], [0, 1, 3], [2, 5]
    dense, sliced, x = cut("residual_stream", {"0.0": stream, "1.conv1": inner1, "2.conv1": inner2})
    hand = nn.Sequential(cbr(3, 4), Block(4, 4), Block(4, 4), head(4))
    for block, inner in ((hand[1], inner1), (hand[2], inner2)):
        width = len(inner)
        block.conv1, block.bn1 = nn.Conv2d(4, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        block.conv2 = nn.Conv2d(width, 4, 3, 1, 1, bias=False)
    choices = {"_0__0__weight": {0: stream}, "_3__2__weight": {1: stream}} | norm("0__1", stream)
    for i, inner in ((1, inner1), (2, inner2)):
        choices |= {f"_{i}__conv1__weight": {0: inner, 1: stream}, f"_{i}__conv2__weight": {0: stream, 1: inner}}
        choices |= norm(f"{i}__bn1", inner) | norm(f"{i}__bn2", stream)
    hand.double().eval().load_state_dict(taken(dense.state_dict(), **choices))
    assert same_bits(run(hand, x), run(sliced, x))


def test_whole_groups_are_cut_where_groups_are_many() -> None:
    groups, last = [1, 2, 6], [0, 4, 5]  # of eight groups with two channels each
    pairs = [c for g in groups for c in (2 * g, 2 * g + 1)]
    dense, sliced, x = cut("many_small_groups", {"0.0": groups, "2.0": last})
    hand = nn.Sequential(cbr(3, 6), cbr(6, 6, groups=3), cbr(6, 3, 1), head(3)).double().eval()
    convolutions = {"_0__0__weight": {0: pairs}, "_1__0__weight": {0: pairs}, "_2__0__weight": {0: last, 1: pairs}}
    norms = norm("0__1", pairs) | norm("1__1", pairs) | norm("2__1", last)
    hand.load_state_dict(taken(dense.state_dict(), **convolutions, **norms, _3__2__weight={1: last}))
    assert same_bits(run(hand, x), run(sliced, x))


def test_the_same_positions_are_cut_in_each_of_few_groups() -> None:
    inputs, outputs, last = [0, 2, 3], [1, 5], [0, 1, 2, 3, 4, 5]
    both_in, both_out = inputs + [6 + i for i in inputs], outputs + [8 + i for i in outputs]
    dense, sliced, x = cut("few_large_groups", {"0.0": inputs, "1.0": outputs})
    hand = nn.Sequential(cbr(3, 6), cbr(6, 4, groups=2), cbr(4, 6, 1), head(6)).double().eval()
    convolutions = {"_0__0__weight": {0: both_in}, "_1__0__weight": {0: both_out, 1: inputs}}
    norms = norm("0__1", both_in) | norm("1__1", both_out)
    choices = taken(dense.state_dict(), **convolutions, **norms, _2__0__weight={0: last, 1: both_out})
    hand.load_state_dict(choices)
    assert same_bits(run(hand, x), run(sliced, x))


def test_flattened_channels_are_cut_with_all_their_pixels() -> None:
    channels, hidden = [0, 2, 5], [1, 3, 4, 6]
    pixels = [4 * c + p for c in channels for p in range(4)]
    dense, sliced, x = cut("flatten_before_a_linear_layer", {"0.0": channels, "3": hidden})
    hand = nn.Sequential(cbr(3, 3), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 3))
    linear = {"_3__weight": {0: hidden, 1: pixels}, "_3__bias": {0: hidden}, "_5__weight": {1: hidden}}
    choices = {"_0__0__weight": {0: channels}} | norm("0__1", channels) | linear
    hand.double().eval().load_state_dict(taken(dense.state_dict(), **choices))
    assert same_bits(run(hand, x), run(sliced, x))


def silence(module: nn.Module, dim: int, positions: Tensor) -> None:
    """A hook that empties some channels of what a module is given."""

    def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0].index_fill(dim, positions, 0), *inputs[1:])

    module.register_forward_pre_hook(hook)


def readable(case: Case) -> bool:
    """Whether all readers are layers whose input channels are the columns of their weight."""
    modules = dict(build(case).named_modules())
    if case.name == "functional_calls":
        return False
    readers = [modules.get(slot.tensor.removesuffix(".weight")) for g in groups_of(case.name) for slot in g.gated_slots]
    plain = [
        isinstance(m, nn.Linear) or (isinstance(m, nn.modules.conv._ConvNd) and not m.transposed and m.groups == 1)
        for m in readers
    ]
    return bool(plain) and all(plain)


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_sliced_network_is_the_one_with_dropped_inputs_masked_by_hooks(case: Case) -> None:
    if not readable(case):
        pytest.skip("a weight is grouped, or used by a function: there is no layer to hang a hook on")
    groups, model, x = groups_of(case.name), build(case), example(case)
    keep = random_keep(groups, 0.5, seed=3)
    sliced = Plan.build(model, groups, keep).apply_(copy.deepcopy(model))
    modules: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
            modules.setdefault(id(module.weight), []).append(module)
    tensors = dict(model.named_parameters())
    for group in groups:
        dropped = np.setdiff1d(np.arange(group.width), keep[group.name])
        for slot in group.gated_slots:
            for module in modules[id(tensors[slot.tensor])]:
                dim = -1 if isinstance(module, nn.Linear) else 1
                silence(module, dim, torch.as_tensor(slot.index[dropped].ravel()))
    assert distance(run(model, x), run(sliced, x)) <= 1e-10


def test_most_cases_have_hooks_as_a_witness() -> None:
    assert sum(map(readable, CASES.values())) >= 40
