"""A search inside the user's own training loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.utils import parametrize

import compress
from helpers.digits import SEARCH, dense, loaders
from helpers.snapshots import same_snapshot, snapshot
from helpers.weights import same_weights

RECIPE: dict[str, Any] = {
    "budget": {"macs": "50%"},
    "search": {**SEARCH, "epochs": "8 steps"},
    "timing": {"repeats": 3},
}


def batches(count: int = 8) -> list[Any]:
    torch.manual_seed(3)
    return [(x, y) for x, y in loaders(count=64 * count)[0]]


def test_session_makes_the_same_network_as_the_call() -> None:
    """The call on a list of batches makes the same steps in the same order."""
    data = batches()
    whole = compress.prune(dense(), RECIPE, train=data, quiet=True)
    session = compress.search_session(dense(), RECIPE, example_inputs=data[0][0])
    for batch in data:
        session.step(batch)
    pruned = session.finish()
    assert pruned.plan.keep == whole.plan.keep
    assert same_weights(pruned.model, whole.model)
    assert pruned.report.pruned.macs == whole.report.pruned.macs
    assert pruned.report.scores == whole.report.scores != []


def test_session_leaves_the_model_and_the_random_numbers_alone() -> None:
    model, data = dense(), batches(2)
    before, numbers = snapshot(model), torch.get_rng_state()
    session = compress.search_session(model, RECIPE, steps=2, example_inputs=data[0][0])
    for batch in data:
        terms = session.step(batch)
        assert set(terms) == {"loss", "task", "penalty"}
    pruned = session.finish()
    assert same_snapshot(before, snapshot(model))
    assert torch.equal(numbers, torch.get_rng_state())
    assert not any(parametrize.is_parametrized(m) for m in pruned.model.modules())


def test_session_with_validation_data_reports_accuracy() -> None:
    train, val = loaders(count=256)
    session = compress.search_session(dense(), {**RECIPE, "search": {**SEARCH, "epochs": 1}}, train=train, val=val)
    assert session.steps == len(train)
    for batch in train:
        session.step(batch)
    report = session.finish().report
    assert report.dense.metrics["accuracy"] > 0.9
    assert "accuracy" in report.pruned.metrics


def test_steps_beyond_the_end_are_refused() -> None:
    data = batches(2)
    session = compress.search_session(dense(), RECIPE, steps=1, example_inputs=data[0][0])
    session.step(data[0])
    with pytest.raises(RuntimeError, match=r"has made all of its 1 steps: call finish\(\)"):
        session.step(data[1])


@pytest.mark.parametrize("method", ["rarts", "darts1", "darts2", "milenas"])
def test_bilevel_session_says_that_it_is_fed_pairs(method: str) -> None:
    data = batches(2)
    recipe = {**RECIPE, "search": {**SEARCH, "method": method, "epochs": "1 steps"}}
    session = compress.search_session(dense(), recipe, example_inputs=data[0][0])
    wanted = rf"search {method}: expected a pair of batches, from two halves of the data; got {{}}.*step\(\(a, b\)\)"
    with pytest.raises(compress.BatchError, match=wanted.format(r"a tuple of tensor\[64, 1, 8, 8\], tensor\[64\]")):
        session.step(data[0])
    with pytest.raises(compress.BatchError, match=wanted.format("a dict of 'image'")):
        session.step({"image": data[0][0], "label": data[0][1]})
    assert session.step((data[0], data[1]))["loss"] > 0
    assert session.done == 1


@pytest.mark.parametrize(
    ("recipe", "given", "match"),
    [
        ({"budget": 0.5, "search": "magnitude"}, {}, r"search.method: magnitude needs no data; use compress.prune"),
        ({**RECIPE, "steps": 2}, {}, "steps: a session makes one round"),
        (
            {**RECIPE, "search": {**SEARCH, "epochs": 3}},
            {},
            "steps: the length is 3 epochs, and the session has no data",
        ),
        *(
            (RECIPE, {"steps": n}, f"steps: expected the number of steps that the loop will make, 1 or more; got {n}")
            for n in (0, -1, 2.5)
        ),
        (RECIPE, {}, "example_inputs: expected the arguments of the model"),
    ],
)
def test_what_a_session_cannot_do_is_an_error(recipe: Any, given: Any, match: str) -> None:
    with pytest.raises(compress.NotReady, match=match):
        compress.search_session(dense(), recipe, **given)


def test_loss_that_is_not_a_number_stops_the_session() -> None:
    data = batches(1)
    session = compress.search_session(dense(), RECIPE, example_inputs=data[0][0])
    with pytest.raises(compress.Diverged, match="search, step 1 of 8: the loss is not finite"):
        session.step((torch.full_like(data[0][0], float("nan")), data[0][1]))


def test_finished_session_is_finished() -> None:
    data = batches(2)
    session = compress.search_session(dense(), RECIPE, steps=2, example_inputs=data[0][0])
    session.step(data[0])
    session.finish()
    with pytest.raises(RuntimeError, match="the session is finished; start another"):
        session.step(data[1])


def test_budget_that_is_none_leaves_the_session_open() -> None:
    data = batches(2)
    session = compress.search_session(dense(), RECIPE, steps=2, example_inputs=data[0][0])
    session.step(data[0])
    for budget, wanted in (
        (40, 'Did you mean "40%"'),
        ({"mac": 0.4}, r"budget\.mac: expected one of macs, .* mean macs"),
    ):
        with pytest.raises(ValueError, match=wanted):
            session.finish(budget=budget)
    session.step(data[1])
    assert session.done == 2


def test_session_is_finished_for_several_budgets() -> None:
    """Each is the network that a session with that budget gives."""
    train, val = loaders(count=128)
    recipe = {"search": {"method": "netslim", "epochs": 1, "gamma": 1e-3}, "timing": {"repeats": 3}}
    batches = list(train)

    def searched(budget: str) -> compress.Session:
        session = compress.search_session(
            dense(), {**recipe, "budget": {"macs": budget}}, steps=2, train=batches, val=val
        )
        for batch in batches:
            session.step(batch)
        return session

    session = searched("50%")
    own = session.finish()
    for budget in ("80%", "30%", "50%"):
        again, alone = session.finish(budget=budget), searched(budget).finish()
        assert again.plan.keep == alone.plan.keep
        assert all(map(torch.equal, again.model.state_dict().values(), alone.model.state_dict().values()))
        assert again.report.pruned.metrics == alone.report.pruned.metrics
    assert all(map(torch.equal, again.model.state_dict().values(), own.model.state_dict().values()))
    with pytest.raises(RuntimeError, match="the session is finished"):
        session.step(batches[0])
    with pytest.raises(compress.BudgetError, match="budget"):
        session.finish(budget="0.1%")
