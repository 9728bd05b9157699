"""prune works on a copy: its argument is not changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compress
from cases import CASES, Case, Net, build, example
from cases.networks_plain import cbr, head
from compress.budget.timing import compare_latency
from helpers.snapshots import same_snapshot, snapshot

every_case = pytest.mark.parametrize("case", CASES.values(), ids=str)
RECIPE = {"budget": {"dims": "80%"}, "target": {"residual": True, "min_keep": 1}, "search": {"method": "random"}}


@every_case
@pytest.mark.parametrize("training", [False, True])
def test_model_is_not_changed(case: Case, training: bool) -> None:
    model = build(case).train(training)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    before = snapshot(model)
    if case.groups:
        compress.prune(model, RECIPE, example_inputs=example(case))
    else:
        compress.find_groups(model, example(case))
    assert same_snapshot(before, snapshot(model))


def test_mixed_modes_are_put_back() -> None:
    model = nn.Sequential(cbr(3, 6), cbr(6, 5), head(5)).double().train()
    model[0].eval()
    modes = [m.training for m in model.modules()]
    compress.find_groups(model, torch.randn(1, 3, 8, 8).double())
    assert [m.training for m in model.modules()] == modes


def test_buffers_that_the_model_itself_changes_are_not_changed() -> None:
    def count(m: Any, x: Tensor) -> Tensor:
        m.calls.add_(1)
        m.trace.mul_(0.9).add_(0.1 * x.mean())
        return m.head(m.conv(x))

    model = Net(count, conv=cbr(3, 6), head=head(6)).double().eval()
    model.register_buffer("calls", torch.zeros((), dtype=torch.long))
    model.register_buffer("trace", torch.ones(3).double())
    compress.find_groups(model, torch.randn(1, 3, 8, 8).double())
    assert int(model.calls) == 0
    assert model.trace.tolist() == [1, 1, 1]


def test_statistics_are_not_changed_where_training_mode_is_run() -> None:
    """An auxiliary head makes the tracer look at training mode; norms written with functions update there too."""

    def run(m: Any, x: Tensor) -> Any:
        x = torch.nn.functional.batch_norm(m.conv(x), m.mean, m.var, training=m.training)
        return (m.head(x), m.aux(x)) if m.training else m.head(x)

    model = Net(run, conv=nn.Conv2d(3, 6, 3), head=head(6), aux=head(6)).double().eval()
    model.register_buffer("mean", torch.zeros(6).double())
    model.register_buffer("var", torch.ones(6).double())
    groups = compress.find_groups(model, torch.randn(2, 3, 8, 8).double())
    assert model.mean.tolist() == [0] * 6
    assert model.var.tolist() == [1] * 6
    assert len(groups) == 1


def test_preview_changes_nothing() -> None:
    case = CASES["auxiliary_head_in_training"]
    model = build(case).train()
    before = snapshot(model)
    compress.preview(model, RECIPE, example_inputs=example(case))
    assert same_snapshot(before, snapshot(model))


def test_random_state_is_not_changed() -> None:
    model = nn.Sequential(cbr(3, 6), nn.Dropout(), cbr(6, 5), head(5))
    x = torch.randn(1, 3, 8, 8)
    state = torch.random.get_rng_state()
    compress.prune(model, RECIPE, example_inputs=x)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_hooks_of_the_user_stay_and_see_their_own_model_only() -> None:
    model = nn.Sequential(cbr(3, 6), cbr(6, 5), head(5)).eval()
    handle = model[0].register_forward_hook(lambda module, inputs, output: None)
    pruned = compress.prune(model, RECIPE, example_inputs=torch.randn(1, 3, 8, 8))
    assert list(model[0]._forward_hooks) == [handle.id]
    assert pruned.model[0] is not model[0]


def test_weights_stay_single_where_the_proof_takes_a_second_look_in_double() -> None:
    def scaled(m: Any, x: Tensor) -> Tensor:
        y = m.conv1(x)
        return m.conv2(y * y.shape[1] ** -0.5)  # a width that no operator shows

    torch.manual_seed(0)
    model = Net(scaled, conv1=nn.Conv2d(3, 6, 3), conv2=nn.Conv2d(6, 4, 3)).eval()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    groups = compress.find_groups(model, torch.randn(1, 3, 8, 8))
    assert any("zeroed and sliced outputs differ" in r.reason for r in groups.refused)
    assert all(p.dtype == torch.float32 and torch.equal(p, before[name]) for name, p in model.named_parameters())


def clip_weights(m: Any, x: Tensor) -> Tensor:
    """Clip weights in the forward pass, as critics of GANs do, and look up rows that are rescaled as they are read."""
    m.conv.weight.data.clamp_(-0.01, 0.01)
    m.linear.weight.data = m.linear.weight.data * 0.5
    y = m.norm(m.conv(x)).relu() + m.table(torch.zeros(len(x), dtype=torch.long))[:, :, None, None]
    return m.linear(m.last(y).mean((2, 3)))  # type: ignore[no-any-return]


def branch_on_values(m: Any, x: Tensor) -> Tensor:
    """The same in a model whose children are traced one by one."""
    return m.inner(x) if x.mean() < 100 else m.inner(-x)  # type: ignore[no-any-return]


def writing_network(nested: bool) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = Net(
        clip_weights,
        conv=nn.Conv2d(3, 12, 3),
        norm=nn.BatchNorm2d(12),
        table=nn.Embedding(2, 12, max_norm=0.5),
        last=cbr(12, 16),
        linear=nn.Linear(16, 5),
    )
    return Net(branch_on_values, inner=model) if nested else model


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_parameters_that_the_model_itself_changes_are_not_changed(training: bool, nested: bool) -> None:
    model = writing_network(nested).train(training)
    before = snapshot(model)
    memory = [p.data_ptr() for p in model.parameters()]
    x, y = torch.randn(4, 3, 12, 12), torch.arange(4)
    search = {"method": "taylor", "epochs": "2 steps"}
    timing = {"repeats": 3}

    def check(what: str) -> None:
        assert same_snapshot(before, snapshot(model)), what
        assert [p.data_ptr() for p in model.parameters()] == memory, what

    assert len(compress.find_groups(model, x)) or nested
    check("find_groups")
    compress.preview(model, RECIPE, example_inputs=x)
    check("preview")
    data_free = {"budget": {"dims": "80%"}, "target": {"one_path": nested}, "timing": timing}
    compress.prune(model, data_free, example_inputs=x, quiet=True)
    check("prune without data")
    recipe = data_free | {"search": search, "finetune": {"epochs": "2 steps", "distill": {}}}
    compress.prune(model, recipe, train=[(x, y)] * 2, val=[(x, y)], quiet=True)
    check("prune with data")
    session = compress.search_session(model, data_free | {"search": search}, steps=1, example_inputs=x)
    session.step((x, y))
    session.finish()
    check("session")


def test_first_run_of_a_model_that_changes_its_parameters_is_undone() -> None:
    """Each call on a model that nothing is known about yet."""
    x, y = torch.randn(4, 3, 12, 12), torch.arange(4)
    recipe = {"budget": {"dims": "80%"}, "timing": {"repeats": 3}}
    latency = {"budget": {"latency": "99%"}, "timing": {"repeats": 3}}
    calls: dict[str, Callable[[nn.Module], object]] = {
        "without data": lambda m: compress.prune(m, recipe, example_inputs=x, quiet=True),
        "with validation data": lambda m: compress.prune(m, recipe, example_inputs=x, val=[(x, y)], quiet=True),
        "with training data": lambda m: compress.prune(
            m, recipe | {"finetune": {"epochs": "1 steps", "distill": {}}}, train=[(x, y)], quiet=True
        ),
        "preview of a latency": lambda m: compress.preview(m, latency, example_inputs=x),
        "timing": lambda m: compare_latency([m], x, 3),
    }
    for name, call in calls.items():
        model = writing_network(nested=False)
        before = snapshot(model)
        call(model)
        assert same_snapshot(before, snapshot(model)), name
