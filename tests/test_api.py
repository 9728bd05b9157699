"""compress.prune from a dense network to a compact one: the budget is met and the accuracy kept."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.nn.utils import parametrize

import compress
from compress.budget.choose import choose_widths
from compress.cli.quickstart import Network
from helpers.digits import FINETUNE, RECIPE, TIMING, dense, loaders
from helpers.snapshots import same_snapshot, snapshot
from helpers.virtual_clock import VirtualClock
from helpers.weights import same_weights


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One full run, looked at from all sides."""
    folder = tmp_path_factory.mktemp("run") / "out"
    model = dense()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = snapshot(model)
    train, val = loaders()
    state = torch.get_rng_state()
    pruned = compress.prune(model, RECIPE, train=train, val=val, workdir=folder, quiet=True)
    assert torch.equal(state, torch.get_rng_state()), "the caller's random numbers were drawn"
    return model, before, pruned, folder, val


class TimedByWidth(Network):
    """Takes as long as it is wide, on a clock of its own, whatever else the machine does."""

    clock = VirtualClock()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.passes(2e-4 * sum(m.out_channels for m in self.modules() if isinstance(m, nn.Conv2d)))
        return super().forward(x)


def timed_by_width() -> TimedByWidth:
    model = TimedByWidth(16)
    model.load_state_dict(dense().state_dict())
    return model.eval()


@pytest.mark.parametrize("unit", ["macs", "params", "dims", "latency"])
def test_every_budget_is_met_within_two_points_of_the_dense_accuracy(
    unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (train, val) = timed_by_width() if unit == "latency" else dense(), loaders()
    left = 0.8 if unit == "latency" else 0.5
    if unit == "latency":
        monkeypatch.setattr(time, "perf_counter", TimedByWidth.clock)
    pruned = compress.prune(model, {**RECIPE, "budget": {unit: left}}, train=train, val=val, quiet=True)
    report = pruned.report
    if unit in ("macs", "params"):
        assert getattr(report.pruned, unit) <= left * getattr(report.dense, unit)
    if unit == "dims":
        assert sum(row.kept for row in report.groups) <= left * sum(row.width for row in report.groups)
    if unit == "latency":
        width = sum(m.out_channels for m in pruned.model.modules() if isinstance(m, nn.Conv2d))
        assert 0.7 <= width / 240 <= 0.8
    assert report.dense.metrics["accuracy"] > 0.97
    assert report.pruned.metrics["accuracy"] >= report.dense.metrics["accuracy"] - 0.02
    assert report.pruned.latency_ms and report.dense.latency_ms


def test_argument_is_untouched(done: Any) -> None:
    model, before, *_ = done
    assert same_snapshot(before, snapshot(model))


def test_saved_directory_loads_bit_equal(done: Any) -> None:
    _, _, pruned, folder, val = done
    fresh = compress.load(Network(16), folder).eval()
    x = torch.cat([x for x, _ in val])
    with torch.no_grad():
        assert torch.equal(fresh(x), pruned.model(x))
    assert {p.name for p in folder.iterdir()} == {
        "plan.json",
        "model.safetensors",
        "report.json",
        "report.html",
        "run.json",
    }


def test_compact_model_is_plain(done: Any) -> None:
    model, _, pruned, *_ = done
    for module in pruned.model.modules():
        assert not parametrize.is_parametrized(module)
        assert not any(getattr(module, key) for key in vars(module) if key.endswith("_hooks"))
    theirs = {id(m) for m in model.modules()} | {id(p) for p in model.parameters()} | {id(b) for b in model.buffers()}
    reached, queue = set(), [pruned.model]
    while queue:  # everything that can be reached from the compact model, classes and modules aside
        here = queue.pop()
        if id(here) in reached or isinstance(here, type) or type(here).__name__ in ("module", "function"):
            continue
        reached.add(id(here))
        queue += gc.get_referents(here)
    assert not reached & theirs
    assert all(type(m) is type(n) for m, n in zip(pruned.model.modules(), model.modules(), strict=True))


def test_report_says_what_the_model_is(done: Any) -> None:
    model, _, pruned, _, val = done
    report = pruned.report
    assert report.pruned.params == sum(p.numel() for p in pruned.model.parameters())
    assert report.dense.params == sum(p.numel() for p in model.parameters())
    from torch.utils.flop_counter import FlopCounterMode

    for side, network in ((report.dense, model), (report.pruned, pruned.model)):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            network(torch.randn(1, 1, 8, 8))
        assert counter.get_total_flops() == 2 * side.macs
        hits = sum(int((network(x).argmax(1) == y).sum()) for x, y in val)
        assert side.metrics["accuracy"] == hits / sum(len(y) for _, y in val)
    assert [row.kept for row in report.groups] == [len(pruned.plan.keep[row.name]) for row in report.groups]
    assert set(report.seconds) == {"evaluate", "groups", "search", "choose", "slice", "finetune", "timing"}
    stages = {record["stage"] for record in report.history}
    assert stages == {"search", "finetune"}
    assert any("val_accuracy" in record for record in report.history)
    assert compress.Report.load(done[3] / "report.json") == report


def test_plan_keeps_the_most_important_dimensions(done: Any) -> None:
    model, _, pruned, *_ = done
    groups = compress.find_groups(model, torch.randn(1, 1, 8, 8), compress.Recipe.load(RECIPE).target)
    importance = {name: np.array(values) for name, values in pruned.report.importance.items()}
    recipe = compress.Recipe.load(RECIPE)
    keep = choose_widths(
        groups, importance, recipe.budget, recipe.target, ranking=recipe.search.ranking_for(groups, "macs")
    )
    assert {name: kept.tolist() for name, kept in keep.items()} == pruned.plan.keep


def test_yaml_dict_and_object_give_the_same_network(done: Any, tmp_path: Path) -> None:
    _, _, first, _, _ = done
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    for recipe in (path, str(path), compress.Recipe.load(RECIPE)):
        train, val = loaders()
        again = compress.prune(dense(), recipe, train=train, val=val, quiet=True)
        assert again.plan.keep == first.plan.keep
        assert same_weights(again.model, first.model)


def test_another_seed_is_another_run(done: Any) -> None:
    train, val = loaders()
    other = compress.prune(dense(), {**RECIPE, "seed": 1}, train=train, val=val, quiet=True)
    assert not same_weights(other.model, done[2].model) if other.plan.keep == done[2].plan.keep else True


def test_without_validation_data_the_last_weights_are_kept() -> None:
    train, _ = loaders()
    pruned = compress.prune(dense(), {**RECIPE, "finetune": {**FINETUNE, "epochs": 1}}, train=train, quiet=True)
    assert pruned.report.pruned.metrics == {}
    assert pruned.report.pruned.latency_ms


def test_recipe_that_names_its_data_needs_no_loaders() -> None:
    recipe = {**RECIPE, "data": {"source": "digits", "batch_size": 64}, "finetune": None}
    pruned = compress.prune(dense(), recipe, quiet=True)
    assert "accuracy" in pruned.report.pruned.metrics


def test_recipe_that_names_its_task_needs_no_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_task_of_digits.py").write_text(
        "import compress\nfrom helpers.digits import loaders\n"
        "def make():\n    return compress.Classification(*loaders())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    pruned = compress.prune(dense(), {**RECIPE, "finetune": None, "task": "my_task_of_digits:make"}, quiet=True)
    assert pruned.report.pruned.macs <= pruned.report.dense.macs / 2


def test_result_is_in_eval_mode_and_the_argument_in_its_own(tmp_path: Path) -> None:
    for training in (False, True):
        model, recipe = dense().train(training), {"budget": {"macs": 0.5}}
        given: dict[str, Any] = {"example_inputs": torch.randn(1, 1, 8, 8), "workdir": tmp_path / str(training)}
        for resume in (False, True):
            pruned = compress.prune(model, recipe, **given, resume=resume, quiet=True)
            assert not any(module.training for module in pruned.model.modules())
            assert all(module.training is training for module in model.modules())


def test_compensation_serves_the_whole_call() -> None:
    train, val = loaders()
    recipe = {"budget": {"macs": "60%"}, "compensate": "mean", "search": {"method": "magnitude"}, "timing": TIMING}
    pruned = compress.prune(dense(), recipe, train=train, val=val, quiet=True)
    assert any("were added to the biases" in note for note in pruned.report.notes)
    assert pruned.plan.biases
    assert pruned.report.pruned.params == sum(p.numel() for p in pruned.model.parameters())


def test_bounds_of_a_recipe_are_kept() -> None:
    x = torch.randn(1, 1, 8, 8)
    target = {"bounds": {"re:stage1.*": {"least": "75%"}, "stage2.0.conv1": {"most": 5}}}
    pruned = compress.prune(dense(), {"budget": {"macs": "70%"}, "target": target}, example_inputs=x, quiet=True)
    kept = {row.name: row.kept for row in pruned.report.groups}
    assert kept["stage1.0.conv1"] >= 12
    assert kept["stage1.1.conv1"] >= 12
    assert kept["stage2.0.conv1"] <= 5


class Clips(nn.Module):
    """Eight pictures in a row are one example."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        h = h.view(len(x) // 8, 8, *h.shape[1:]).roll(1, 1).flatten(0, 1)
        out: Tensor = self.head(self.b(h).relu().mean((2, 3))).view(len(x) // 8, 8, 3).mean(1)
        return out


def test_model_that_runs_on_no_single_example_is_timed_on_what_was_given(tmp_path: Path) -> None:
    recipe = {"budget": {"macs": "60%"}, "timing": {"repeats": 3}}
    pruned = compress.prune(Clips(), recipe, example_inputs=torch.randn(16, 1, 8, 8), workdir=tmp_path / "out")
    assert pruned.report.pruned.latency_ms and pruned.report.machine["batch size"] == "that of the example inputs"
    assert compress.load(Clips(), tmp_path / "out")(torch.randn(8, 1, 8, 8)).shape == (1, 3)
    one = compress.prune(dense(), recipe, example_inputs=torch.randn(16, 1, 8, 8)).report
    assert one.machine["batch size"] == 1


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"budget": {"macs": "1%"}}, compress.BudgetError),
        ({"target": {"exclude": ["foo"]}}, ValueError),
        ({"target": {"bounds": {"foo": {"least": 1}}}}, ValueError),
        ({"target": {"attention": True}}, compress.NotReady),
    ],
)
def test_impossible_arguments_are_refused_before_data_are_read(wrong: dict[str, Any], error: type[Exception]) -> None:
    train, val = loaders()
    read: list[Any] = []

    class Watched(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(read.append(batch) or batch for batch in super().__iter__())

    with pytest.raises(error):
        compress.prune(dense(), RECIPE | wrong, train=train, val=Watched(val), quiet=True)
    assert not read


def test_working_directory_with_files_of_trackers_can_be_saved_into(tmp_path: Path) -> None:
    recipe = {**RECIPE, "finetune": None, "engine": {"track": ["tensorboard"]}}
    train, val = loaders()
    pruned = compress.prune(dense(), recipe, train=train, val=val, workdir=tmp_path / "out", quiet=True)
    (tmp_path / "out" / "finetune").mkdir()  # as a task with a loop of its own leaves it
    (tmp_path / "out" / "finetune" / "log").write_text("kept")
    events = sorted((tmp_path / "out" / "track").rglob("*"))
    pruned.save(tmp_path / "out")
    assert events and events == sorted((tmp_path / "out" / "track").rglob("*"))
    assert (tmp_path / "out" / "finetune" / "log").read_text() == "kept"
    resumed = compress.prune(dense(), recipe, train=train, val=val, workdir=tmp_path / "out", resume=True)
    assert resumed.report == pruned.report
