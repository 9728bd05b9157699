"""Each point of a trade-off is the network that an independent `prune` gives; what is shared is done once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import compress
from compress.pipeline import Run
from compress.recipe import Finetune
from compress.tradeoffs import Curve
from compress.tradeoffs.tradeoff_run import _load_recipe
from helpers.digits import dense, loaders

BUDGETS = ["80%", "60%", "40%"]
TIMING = {"repeats": 3, "batch_size": 4}
ONE_SEARCH: dict[str, dict[str, Any]] = {
    "magnitude": {"budget": {"macs": "50%"}, "search": "magnitude", "timing": TIMING},
    "repaired": {"budget": {"macs": "50%"}, "search": "magnitude", "compensate": "least_squares", "timing": TIMING},
    "taylor": {"budget": {"params": "50%"}, "search": {"method": "taylor", "epochs": "2 steps"}, "timing": TIMING},
    "netslim": {
        "budget": {"macs": "50%"},
        "search": {"method": "netslim", "epochs": "4 steps", "gamma": 1e-3},
        "finetune": {"epochs": "3 steps", "distill": {}},
        "timing": TIMING,
    },
}
OWN_SEARCHES: dict[str, dict[str, Any]] = {
    "gamma auto": {
        "budget": {"macs": "50%"},
        "search": {"method": "netslim", "epochs": "4 steps", "gamma": "auto"},
        "timing": TIMING,
    },
    "rounds": {"budget": {"macs": "50%"}, "search": "magnitude", "steps": 2, "timing": TIMING},
}


def data() -> dict[str, Any]:
    torch.manual_seed(0)
    train, val = loaders(count=256)
    return {"train": list(train), "val": val}


def same_networks(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and x.shape == y.shape and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("recipe", [*ONE_SEARCH.values(), *OWN_SEARCHES.values()], ids=[*ONE_SEARCH, *OWN_SEARCHES])
def test_points_are_the_networks_of_independent_runs(recipe: dict[str, Any]) -> None:
    given, unit = data(), next(iter(recipe["budget"]))
    curve = compress.tradeoff(dense(), recipe, BUDGETS, quiet=True, **given)
    assert len(curve) == 3
    for budget in BUDGETS:
        alone = compress.prune(dense(), {**recipe, "budget": {unit: budget}}, quiet=True, **given)
        point = curve[budget]
        assert point.plan.keep == alone.plan.keep
        assert same_networks(point.model, alone.model)
        assert point.report.pruned.metrics == alone.report.pruned.metrics
        assert point.report.sliced == alone.report.sliced
        assert point.report.dense.metrics == alone.report.dense.metrics


@pytest.mark.parametrize(("recipe", "searches"), [(ONE_SEARCH["netslim"], 1), (OWN_SEARCHES["gamma auto"], 3)])
def test_search_is_shared_where_it_does_not_aim_at_a_budget(
    recipe: dict[str, Any], searches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def count(name: str) -> None:
        original = getattr(Run, name)

        def counted(self: Run, *args: Any, **options: Any) -> Any:
            calls.append(name)
            return original(self, *args, **options)

        monkeypatch.setattr(Run, name, counted)

    count("find_groups")
    count("search")
    curve = compress.tradeoff(dense(), recipe, BUDGETS, finetune=False, quiet=True, **data())
    assert calls.count("search") == searches
    assert calls.count("find_groups") == 1
    assert any(("one search served all" in note) == (searches == 1) for note in curve.notes)


def test_fine_tuning_can_be_left_out_or_given_a_length() -> None:
    given = data()
    bare = compress.tradeoff(dense(), ONE_SEARCH["netslim"], ["50%"], finetune=False, quiet=True, **given)["50%"]
    assert bare.report.pruned.metrics == bare.report.sliced
    tuned = compress.tradeoff(dense(), ONE_SEARCH["magnitude"], ["50%"], finetune="2 steps", quiet=True, **given)["50%"]
    assert [r["step"] for r in tuned.report.history if r["stage"] == "finetune"][-1] == 2
    assert _load_recipe(ONE_SEARCH["magnitude"], None).finetune is None
    assert _load_recipe(ONE_SEARCH["magnitude"], True).finetune == Finetune()


def test_search_that_follows_from_the_data_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "finetune", lambda self: None)
    monkeypatch.setattr("compress.pipeline.run.train_search", lambda run, search: None)
    recipe, given = {"timing": TIMING}, data()  # no search and no fine-tuning
    images = [x for x, _ in given["train"]]
    alone = compress.tradeoff(dense(), recipe, ["70%"], train=images, quiet=True)
    assert alone.notes[0] == "magnitude: one search served all budgets"
    labelled = compress.tradeoff(dense(), recipe, ["70%"], quiet=True, **given)
    assert labelled.notes[0] == "netslim: every budget had its own search"
    assert labelled.points[0].report.recipe["search"]["method"] == "netslim"


def test_points_have_metrics_on_test_data() -> None:
    given = data()
    held_out = list(given.pop("val"))
    curve = compress.tradeoff(dense(), ONE_SEARCH["magnitude"], ["80%"], test=held_out, quiet=True, **given)
    with torch.no_grad():
        hits = [curve["80%"].model(x).argmax(1) == y for x, y in held_out]
    assert curve["80%"].numbers.test["accuracy"] == pytest.approx(float(torch.cat(hits).double().mean()))
    assert curve.dense.test["accuracy"] > 0.9


def test_agreement_is_measured_without_validation_data() -> None:
    images = next(iter(loaders()[0]))[0]
    recipe = {"search": "magnitude", "timing": TIMING}
    curve = compress.tradeoff(dense(), recipe, ["99%", "20%"], example_inputs=images, calibration=images, quiet=True)
    assert curve.metric == "agreement"
    with torch.no_grad():
        expected = [
            float((p.model(images).argmax(1) == dense()(images).argmax(1)).double().mean()) for p in curve.points
        ]
    assert [curve.value(p.numbers) for p in curve] == expected
    assert curve.value(curve.dense) == 1


def test_killed_trade_off_keeps_its_points_and_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, given = ONE_SEARCH["netslim"], data()
    whole = compress.tradeoff(dense(), recipe, BUDGETS, quiet=True, **given)

    class Killed(Exception):
        pass

    calls, original = [], Run.finetune

    def killed_at_second(self: Run) -> None:
        calls.append(None)
        if len(calls) == 2:
            raise Killed
        original(self)

    monkeypatch.setattr(Run, "finetune", killed_at_second)
    with pytest.raises(Killed):
        compress.tradeoff(dense(), recipe, BUDGETS, workdir=tmp_path, quiet=True, **given)
    (tmp_path / ".tradeoff.json.a1b2_c3d").write_text("half of a fi")
    monkeypatch.setattr(Run, "search", lambda *_: pytest.fail("searched again"))
    resumed = compress.tradeoff(dense(), recipe, [*BUDGETS, "30%"], workdir=tmp_path, resume=True, quiet=True, **given)
    assert len(calls) == 5  # the second again, the third and the new one
    for budget in BUDGETS:
        assert same_networks(resumed[budget].model, whole[budget].model)
    assert same_networks(compress.load(dense(), tmp_path / "macs_60"), whole["60%"].model)
    written = json.loads((tmp_path / "tradeoff.json").read_text())
    assert [point["budget"] for point in written["points"]] == [{"macs": b} for b in (0.8, 0.6, 0.4, 0.3)]
    assert "<svg" in (tmp_path / "tradeoff.html").read_text()
    assert not list(tmp_path.glob(".tradeoff*"))  # unfinished writes
    with pytest.raises(FileExistsError, match="holds a trade-off: continue with resume=True"):
        compress.tradeoff(dense(), recipe, BUDGETS, workdir=tmp_path, quiet=True, **given)


def test_budgets_out_of_reach_are_named_before_the_search() -> None:
    recipe = {**ONE_SEARCH["netslim"], "target": {"min_keep": 8}}
    with pytest.raises(compress.BudgetError) as caught:
        compress.tradeoff(dense(), recipe, ["90%", "2%", "1%"], quiet=True, **data())
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("budgets", "message"),
    [
        ([], "budgets: expected at least one"),
        ([50], 'Did you mean "50%"'),
        (50, 'Did you mean "50%"'),
        (None, "budgets: expected at least one"),
        ([{"mac": "50%"}], r"budget\.mac: expected one of macs, .* Did you mean macs"),
        ("x", "got 'x'$"),
        ([{"macs": 0.5, "auto": True}], "auto"),
    ],
)
def test_wrong_budgets_are_explained(budgets: Any, message: str) -> None:
    with pytest.raises(compress.NotReady, match=message):
        compress.tradeoff(dense(), {}, budgets, example_inputs=torch.randn(1, 1, 8, 8), quiet=True)


def test_learned_size_is_refused() -> None:
    recipe = {"budget": "auto", "search": {"method": "netslim", "epochs": 1, "penalty": "l0_split", "gamma": 1e-3}}
    with pytest.raises(compress.NotReady, match="auto lets the search learn one size"):
        compress.tradeoff(dense(), recipe, BUDGETS, **data())


def test_foreign_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match=r"expected an empty or missing directory; it holds thesis\.tex"):
        compress.tradeoff(dense(), {}, ["50%"], example_inputs=torch.randn(1, 1, 8, 8), workdir=tmp_path)
    assert issubclass(compress.Curve, Curve)


@pytest.mark.parametrize(("count", "metric"), [(15, None), (16, "agreement")])
def test_few_example_inputs_are_not_compared(count: int, metric: str | None) -> None:
    images = next(iter(loaders()[0]))[0][:count]
    curve = compress.tradeoff(dense(), {"search": "magnitude", "timing": TIMING}, ["80%"], example_inputs=images)
    assert curve.metric == metric
    assert ("no metric: there are no validation data" in curve.notes[-1]) == (metric is None)


def test_what_all_budgets_have_in_common_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    compress.tradeoff(dense(), {"timing": TIMING}, ["80%", "60%"], example_inputs=torch.randn(1, 1, 8, 8))
    assert capsys.readouterr().err.count("no training data") == 1
