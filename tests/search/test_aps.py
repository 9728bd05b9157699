"""APS: nested widths are sliced networks, what is handed over is what was trained, and useless channels rank last."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import compress
from cases import CASES, build, distance, example, groups_of, run
from compress.search.aps.aps_search import Aps, ApsConfig
from compress.search.aps.candidates import magnitude_ranks
from compress.search.aps.gradient_coupling import measure_coupling
from compress.search.aps.weight_training import frozen_statistics
from compress.search.base import Job
from compress.search.magnitude import squared_norms
from compress.surgery import Plan, fold_, slice_
from helpers.digits import TIMING, dense, loaders
from helpers.regression import RegressionTask, with_useless_features
from helpers.weights import same_weights

SHARINGS = ["ordinal", "independent", "transitionary"]
NESTED_CASES = [name for name in CASES if len(groups_of(name))][::4]


def started(model: nn.Module, groups: Any, steps: int = 10, task: Any = None, **settings: Any) -> Aps:
    config = ApsConfig.model_validate({"epochs": f"{steps} steps", "lr": 0.05, **settings})
    return Aps(config, Job(model, groups, task or RegressionTask(), steps))


def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)).double()


def pair(seed: int = 1) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((5, 3, 9, 9), (5, 4))
    return tuple(  # type: ignore[return-value]
        tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes) for _ in range(2)
    )


@pytest.mark.parametrize("name", NESTED_CASES)
def test_a_nested_width_is_the_network_sliced_to_its_largest_dimensions(name: str) -> None:
    """On every kind of group: attention, MLP, residual streams, convolutions."""
    case, groups = CASES[name], groups_of(name)
    model, x = build(case), example(case)
    plain = copy.deepcopy(model)
    norms = squared_norms(plain, groups)
    search = started(model, groups, sharing="ordinal")
    rng = np.random.default_rng(0)
    choices = torch.tensor([rng.integers(len(widths)) for widths in search.candidates])
    search._set_widths_(choices)
    keep = {}
    for group, widths, k in zip(groups, search.candidates, choices.tolist(), strict=True):
        order = norms[group.name].view(group.num_heads, -1).argsort(dim=1, descending=True, stable=True).numpy()
        per_head = order[:, : widths[k] // group.num_heads] + np.arange(group.num_heads)[:, None] * order.shape[1]
        keep[group.name] = np.sort(per_head.ravel())
    sliced = slice_(plain, Plan.build(plain, groups, keep))
    assert distance(run(model, x), run(sliced, x)) < 1e-9


@pytest.mark.parametrize("sharing", SHARINGS)
def test_what_is_cut_is_what_was_trained(sharing: str) -> None:
    """In double precision: the network at the end of the search and the compact one have the same outputs."""
    torch.manual_seed(0)
    recipe = {
        "budget": {"macs": "55%"},
        "search": {"method": "aps", "epochs": "20 steps", "lr": 0.02, "sharing": sharing, "settle": 0.2},
        "timing": {"repeats": 3},
    }
    model = network()
    batches = [pair(seed) for seed in range(20)]
    session = compress.search_session(
        model, recipe, steps=20, task=RegressionTask(), example_inputs=batches[0][0][0], device="cpu"
    )
    for batch in batches:
        session.step(batch)
    x = pair(99)[0][0]
    with torch.no_grad():
        trained = session.model.eval()(x)
        pruned = session.finish()
        assert float((trained - pruned.model(x)).abs().max()) < 1e-12
    assert pruned.report.pruned.macs <= 0.55 * pruned.report.dense.macs
    assert any(
        len(kept) not in (0, group.width) for kept, group in zip(pruned.plan.keep.values(), session.groups, strict=True)
    )


@pytest.mark.parametrize("sharing", ["independent", "transitionary"])
def test_settled_weights_are_the_projection_of_the_next_larger_candidate(sharing: str) -> None:
    model = network()
    groups = compress.find_groups(model.eval(), pair()[0][0])
    search = started(model.train(), groups, sharing=sharing, settle=0, candidates=[2, 4, 6, 8])
    for seed in range(10):
        search.step(pair(seed))
    search.job.schedule = lambda importance, progress: {
        name: np.sort(np.argsort(-value.numpy(), kind="stable")[: {"0": 5, "3": 4}[name]])
        for name, value in importance.items()
    }
    layers = {layer.name: layer for layer in search.layers}
    first, second = search.candidates[0].index(6), search.candidates[1].index(4)
    expected = {name: layer.projection.project(torch.tensor([first, second])) for name, layer in layers.items()}
    search.finish()
    for name, layer in layers.items():
        inside = torch.ones_like(layer.weight, dtype=torch.bool)
        for dim, side in layer.projection.sides():
            shape = [-1 if d == dim else 1 for d in range(layer.weight.ndim)]
            inside &= (side.ranks < (6, 4)[side.group_index]).view(shape)
        assert torch.equal(layer.weight[inside], expected[name][inside])
    assert [int(gate.sum()) for gate in search.gates.values()] == [5, 4]
    out = model.eval()(pair()[0][0])
    fold_(model)
    assert not any("parametrizations" in name for name, _ in model.named_parameters())
    assert torch.equal(model(pair()[0][0]), out)


def test_order_of_parameters_survives_projections() -> None:
    model = network()
    names = [name for name, _ in model.named_parameters()]
    groups = compress.find_groups(model.eval(), pair()[0][0])
    weights = dict(model.named_parameters())
    search = started(model.train(), groups, sharing="transitionary")
    search.finish()
    fold_(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert all(p is weights[name] for name, p in model.named_parameters())


def test_weights_step_on_the_loss_of_the_drawn_widths_and_on_one_half_of_the_data() -> None:
    model = network().train()
    groups = compress.find_groups(model.eval(), pair()[0][0])
    search = started(
        model.train(),
        groups,
        sharing="ordinal",
        momentum=0,
        weight_decay=0,
        schedule="constant",
        first_stage=0.9,
        settle=0,
    )
    validation, train = pair()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    copied = copy.deepcopy(model)
    search._set_widths_(search.table.uniform_choices(search._numbers(1)[0]))
    for gate, mine in zip(dict(search.gates).values(), search.gates.values(), strict=True):
        assert gate is mine
    copied.load_state_dict(model.state_dict())  # with the gates of the drawn widths
    loss = (copied(train[0]) - train[1]).square().mean()
    wanted = [(name, p) for name, p in copied.named_parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, [p for _, p in wanted])
    terms = search.step((validation, train))
    assert float(terms["loss"].detach()) == pytest.approx(float(loss.detach()), abs=1e-12)
    now = dict(model.named_parameters())
    for (name, _), g in zip(wanted, gradients, strict=True):
        assert torch.allclose(now[name], before[name] - 0.05 * g, rtol=0, atol=1e-12), name


def test_controller_trains_in_the_second_stage_only_and_weights_settle_on_both_halves() -> None:
    model = network()
    groups = compress.find_groups(model.eval(), pair()[0][0])
    search = started(model.train(), groups, steps=10, sharing="ordinal", first_stage=0.3, settle=0.3)
    changed = []
    for seed in range(10):
        before = [p.detach().clone() for p in search.controller.parameters()]
        search.step(pair(seed))
        changed.append(not all(torch.equal(a, b) for a, b in zip(before, search.controller.parameters(), strict=True)))
    assert changed == [False] * 3 + [True] * 4 + [False] * 3
    assert float(search.reward_count) == 4


def test_dimensions_are_sorted_again_when_the_second_stage_starts() -> None:
    model = network()
    groups = compress.find_groups(model.eval(), pair()[0][0])
    search = started(model.train(), groups, steps=10, sharing="ordinal", first_stage=0.3)
    with torch.no_grad():
        search.job.model[3].parametrizations.weight.original[:, 5] *= 100
    for seed in range(4):
        search.step(pair(seed))
    assert int(search.table.ranks_by_group()[0][5]) == 0
    assert torch.equal(search.table.ranks, torch.cat(magnitude_ranks(model, groups))) or search.done > 3


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("sharing", ["ordinal", "transitionary"])
def test_planted_useless_channels_are_dropped(sharing: str, seed: int) -> None:
    model, data, useless = with_useless_features(False, seed)
    search = {"method": "aps", "epochs": 12, "lr": 0.1, "sharing": sharing, "controller": {"lr": 0.01}}
    recipe = {"budget": {"dims": "75%"}, "search": search, "timing": {"repeats": 3}, "seed": seed}
    pruned = compress.prune(model, recipe, train=data, quiet=True)
    assert set(range(12)) - set(pruned.plan.keep["0"]) == useless


@pytest.mark.parametrize("after", [1, 5, 7, 9, 13, 17])
@pytest.mark.parametrize("sharing", ["independent", "transitionary"])
def test_interrupted_search_resumes_to_the_same_bits(
    sharing: str, after: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 9 steps, 3 draw uniformly, 4 train the controller and 2 settle; a step reads two batches."""
    from helpers.interruption import Interrupted, InterruptedLoader, save_at_every_step

    save_at_every_step(monkeypatch)
    search = {"method": "aps", "epochs": "9 steps", "sharing": sharing, "settle": 0.25, "diagnostics": 4}
    search |= {"controller": {"lr": 0.05, "draws": 2}}
    recipe = {"budget": {"macs": "50%"}, "search": search, "timing": TIMING}
    train = loaders(count=512)[0]
    whole = compress.prune(dense(), recipe, train=InterruptedLoader(train, -1), quiet=True)
    with pytest.raises(Interrupted):
        compress.prune(dense(), recipe, train=InterruptedLoader(train, after), workdir=tmp_path, quiet=True)
    again = compress.prune(
        dense(), recipe, train=InterruptedLoader(train, -1), workdir=tmp_path, resume=True, quiet=True
    )
    assert again.plan.keep == whole.plan.keep
    assert same_weights(again.model, whole.model)
    assert again.report.scores == whole.report.scores != []
    assert again.report.importance == whole.report.importance


def test_report_shows_the_policy_and_which_groups_are_projected() -> None:
    search = {"method": "aps", "epochs": "12 steps", "diagnostics": 3, "controller": {"lr": 0.05}}
    recipe = {"target": {"residual": True}, "budget": {"macs": "50%"}, "search": search, "timing": TIMING}
    report = compress.prune(dense(), recipe, train=loaders(count=512)[0], quiet=True).report
    projected, masked = (note.partition("): ")[2] or note.partition("masks: ")[2] for note in report.notes[:2])
    assert "stage1.0.conv1" in projected and "stem" in masked
    assert {*projected.split(", "), *masked.split(", ")} == {row.name for row in report.groups}
    first, last = report.scores[0]["policy"], report.scores[-1]["policy"]
    for row in report.groups:
        group = last["groups"][row.name]
        assert sum(group["probabilities"]) == pytest.approx(1, abs=1e-3)
        assert group["widths"][-1] == row.width and len(group["widths"]) == len(group["probabilities"])
    assert first["reward"] is None and 0 <= last["reward"] <= 1
    assert first["phi"] == first["phi_range"][1] > last["phi"] > last["phi_range"][0]
    assert last["entropy"] > 0 and last["cosine"] <= 1 and last["coupled_gradient"] >= 0


def test_report_says_if_there_was_nothing_to_choose() -> None:
    search = {"method": "aps", "epochs": "2 steps", "candidates": [1000]}
    recipe = {"budget": {"macs": "50%"}, "search": search, "timing": TIMING}
    report = compress.prune(dense(), recipe, train=loaders(count=256)[0], quiet=True).report
    assert any("one candidate width only" in note for note in report.notes)


def test_candidates_that_share_nothing_have_no_common_gradient() -> None:
    model = network()
    groups = compress.find_groups(model.eval(), pair()[0][0])
    nested = started(model.train(), groups, sharing="ordinal", diagnostics=10)
    nested.step(pair())
    apart = started(network().train(), groups, sharing="independent", diagnostics=10)
    apart.step(pair())
    assert float(nested.cosine) > 0.1 and float(nested.coupling) > 0
    assert float(apart.cosine) == 0 == float(apart.coupling)


def test_coupling_is_that_of_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [[torch.randn(3, 2, generator=generator), torch.randn(4, generator=generator)] for _ in range(3)]
    masks = [torch.tensor([1.0, 0, 0]), torch.tensor([1.0, 1, 0]), torch.tensor([1.0, 1, 1])]
    coupling = measure_coupling(gradients, lambda k, tensors: [masks[k][:, None] * tensors[0], tensors[1]])
    cosines, norms = [], []
    for k in range(3):
        for j in range(k):
            a, b = (torch.cat([t.flatten() for t in gradients[i]]) for i in (j, k))
            cosines.append(float(a @ b / a.norm() / b.norm()))
        others = [sum(gradients[j][t] for j in range(3) if j != k) for t in range(2)]
        norms.append(float((masks[k][:, None] * others[0]).square().sum() + others[1].square().sum()) ** 0.5)
    assert float(coupling.cosine) == pytest.approx(np.mean(cosines), rel=1e-5)
    assert float(coupling.norm) == pytest.approx(np.mean(norms), rel=1e-5)


def test_reward_pass_leaves_statistics_and_dropout_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2)).train()
    before, x = copy.deepcopy(model.state_dict()), torch.randn(8, 4)
    with frozen_statistics(model), torch.no_grad():
        outputs = [model(x), model(x)]
    assert torch.equal(*outputs)
    normalized = nn.functional.batch_norm(model[0](x), None, None, model[1].weight, model[1].bias, training=True)
    assert torch.allclose(outputs[0], model[3](normalized), atol=1e-6)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(m.training for m in model.modules()) and model[1].track_running_stats


def test_reward_is_accuracy_or_falls_with_the_loss() -> None:
    logits, target = torch.tensor([[2.0, 1.0], [0.0, 1.0], [3.0, 0.0]]), torch.tensor([0, 0, -100])
    assert float(compress.Classification().reward(logits, (logits, target))) == 0.5
    soft = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.1, 0.9]])
    assert float(compress.Classification().reward(logits, (logits, soft))) == pytest.approx(1 / 3)
    outputs, batch = torch.zeros(2), (None, torch.tensor([1.0, 2.0]))
    assert float(RegressionTask().reward(outputs, batch)) == pytest.approx(float(torch.tensor(-2.5).exp()))


@pytest.mark.parametrize("sharing", SHARINGS)
def test_steps_of_both_stages_run_on_the_meta_device(sharing: str) -> None:
    """Which refuses tensors of the CPU, and every wait for a value."""
    model = network().float()
    groups = compress.find_groups(model.eval(), torch.zeros(1, 3, 9, 9))
    search = started(model.to("meta").train(), groups, task=compress.Classification(), sharing=sharing, first_stage=0.2)
    batch = torch.zeros(4, 3, 9, 9, device="meta"), torch.zeros(4, dtype=torch.long, device="meta")
    for _ in range(6):
        terms = search.step((batch, batch))
    assert terms["loss"].device.type == "meta"


def test_distillation_from_the_dense_network_is_part_of_the_loss() -> None:
    search = {"method": "aps", "epochs": "3 steps", "distill": {"temperature": 2, "weight": 3}, "clip": 1.0}
    recipe = {"budget": {"macs": "50%"}, "search": search, "timing": TIMING}
    history = compress.prune(dense(), recipe, train=loaders(count=256)[0], quiet=True).report.history
    assert all(record["loss"] == pytest.approx(record["task"] + record["distil"], rel=1e-5) for record in history)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"first_stage": 0.6, "settle": "40%"}, r"first_stage, settle: expected a sum below 1.*got 0\.6 and 0\.4"),
        ({"sharing": "nested"}, r"search\.sharing: expected one of ordinal, independent, transitionary; got 'nested'"),
        ({"candidates": []}, r"search\.candidates: "),
        ({"candidates": [0]}, r"search\.candidates.*expected a number of dimensions such as 8"),
        ({"beta": 0.1}, r"search\.beta: input should be less than or equal to 0"),
        ({"controller": {"baseline": 1}}, r"search\.controller\.baseline: input should be less than 1"),
        ({"controller": {"draws": 0}}, r"search\.controller\.draws: "),
        ({"gamma": 1}, r"search\.gamma: expected one of "),
    ],
)
def test_impossible_settings_are_named(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(compress.RecipeError, match=match):
        compress.Recipe.load({"budget": {"macs": 0.5}, "search": {"method": "aps", "epochs": 1, **settings}})


def test_learned_budget_is_refused() -> None:
    with pytest.raises(compress.RecipeError, match="budget"):
        compress.Recipe.load({"budget": "auto", "search": {"method": "aps", "epochs": 1}})


def test_recipe_goes_round_through_plain_data() -> None:
    search = {"method": "aps", "epochs": 3, "candidates": [4, "50%", 1.0], "controller": {"lr": 0.1}, "beta": -0.06}
    recipe = compress.Recipe.load({"budget": {"macs": 0.5}, "search": search})
    assert compress.Recipe.load(recipe.model_dump(mode="json", exclude_none=True)) == recipe
