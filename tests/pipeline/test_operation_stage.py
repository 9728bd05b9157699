"""A run that chooses operations: report, budgets, widths afterwards, reload, resume, session, bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import compress
from compress.errors import PlanError
from compress.modules import choices_of
from compress.pipeline.operation_stage import verify_operations
from helpers.choice_networks import conv_choices, images
from helpers.interruption import Interrupted
from helpers.weights import same_weights

RECIPE: dict[str, Any] = {
    "target": {"operations": True},
    "search": {"method": "rarts", "epochs": "8 steps", "lr": 0.05},
    "timing": {"repeats": 3},
}


def loader() -> DataLoader[Any]:
    x, y = (torch.cat(part) for part in zip(*images(), strict=True))
    return DataLoader(TensorDataset(x, y), 8, shuffle=True)


def test_operations_are_chosen_without_a_budget_and_the_result_is_reloaded(tmp_path: Path) -> None:
    model = conv_choices()
    pruned = compress.prune(model, RECIPE, train=loader(), val=loader(), workdir=tmp_path, quiet=True)
    assert set(pruned.plan.choices) == {"first", "second", "down"}
    assert pruned.plan.choices["first"] == pruned.plan.choices["second"]
    assert not choices_of(pruned.model)
    assert len(choices_of(model)) == 3  # the argument is unchanged
    assert not model.down.scores.any()
    x = torch.randn(4, 3, 8, 8)
    assert torch.equal(compress.load(conv_choices(7), tmp_path).eval()(x), pruned.model(x))
    report = pruned.report
    assert report.pruned.params == sum(p.numel() for p in pruned.model.parameters())
    assert report.pruned.macs < report.dense.macs
    row = next(row for row in report.operations if row.name == "blocks")
    assert row.places == 2 and row.chosen == pruned.plan.choices["first"]
    assert sum(row.strengths.values()) == pytest.approx(1)
    assert compress.Report.load(tmp_path / "report.json").operations == report.operations
    page = (tmp_path / "report.html").read_text()
    assert "Operations" in page and "blocks" in page and "conv3" in page
    assert pruned.genotype is None


@pytest.mark.parametrize("unit", ["macs", "params"])
def test_a_budget_limits_the_operations(unit: str) -> None:
    pruned = compress.prune(conv_choices(), {**RECIPE, "budget": {unit: "60%"}}, train=loader(), quiet=True)
    costliest = compress.Plan({}, {}, choices={"first": "conv3", "second": "conv3", "down": "wide"})
    largest = costliest.apply_(conv_choices())
    cost = compress.find_groups(largest, torch.zeros(1, 3, 8, 8)).cost
    macs = int(cost.macs(cost.widths))
    if unit == "macs":
        assert pruned.report.pruned.macs <= 0.6 * macs
    else:
        assert pruned.report.pruned.params <= 0.6 * sum(p.numel() for p in largest.parameters())
    assert any("of the costliest network" in note for note in pruned.report.notes)


def test_latency_budget_and_latency_penalty_run() -> None:
    search = {**RECIPE["search"], "penalty": "latency", "gamma": 0.002}
    pruned = compress.prune(conv_choices(), {**RECIPE, "search": search}, train=loader(), quiet=True)
    assert pruned.plan.choices
    limited = {**RECIPE, "budget": {"latency": "99%"}, "timing": {"repeats": 9}}
    try:
        pruned = compress.prune(conv_choices(), limited, train=loader(), quiet=True)
        assert any(note.startswith("latency ") for note in pruned.report.notes)
    except compress.BudgetError as error:  # on a busy machine
        assert "cannot be reached by choosing operations" in str(error)


def test_operations_then_widths_in_one_recipe(tmp_path: Path) -> None:
    recipe = {**RECIPE, "target": {"operations": True, "channels": True}, "budget": {"macs": "60%"}}
    pruned = compress.prune(conv_choices(), recipe, train=loader(), val=loader(), workdir=tmp_path, quiet=True)
    assert set(pruned.plan.choices) == {"first", "second", "down"}
    assert any(len(kept) < pruned.plan.widths[name] for name, kept in pruned.plan.keep.items())
    chosen = compress.Plan({}, {}, choices=pruned.plan.choices).apply_(conv_choices())
    cost = compress.find_groups(chosen, torch.zeros(1, 3, 8, 8)).cost
    assert pruned.report.pruned.macs <= 0.6 * int(cost.macs(cost.widths))
    assert pruned.report.groups and pruned.report.operations
    x = torch.randn(4, 3, 8, 8)
    assert torch.equal(compress.load(conv_choices(7), tmp_path).eval()(x), pruned.model(x))


class InterruptedImages(TensorDataset):
    """A dataset that is interrupted when so many images have been read."""

    left = 10**9

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if self.left == 0:
            raise Interrupted
        self.left -= 1
        return super().__getitem__(index)


@pytest.mark.usefixtures("checkpoint_at_every_step")
@pytest.mark.parametrize(("method", "images_read"), [("rarts", (60, 130, 220)), ("bayesnas", (40, 70, 120))])
def test_a_resumed_run_ends_with_the_same_bits(method: str, images_read: tuple[int, ...], tmp_path: Path) -> None:
    """Interrupted in the search of operations, in that of widths, and in fine-tuning."""
    recipe = {
        **RECIPE,
        "search": {"method": method, "epochs": "6 steps", "lr": 0.05},
        "target": {"operations": True, "channels": True},
        "budget": {"macs": "60%"},
        "finetune": {"epochs": "4 steps"},
    }
    dataset = InterruptedImages(*(torch.cat(part) for part in zip(*images(), strict=True)))
    data = DataLoader(dataset, 8, shuffle=True)
    whole = compress.prune(conv_choices(), recipe, train=data, quiet=True)
    for number, after in enumerate(images_read):
        dataset.left = after
        with pytest.raises(Interrupted):
            compress.prune(conv_choices(), recipe, train=data, workdir=tmp_path / str(number), quiet=True)
        dataset.left = 10**9
        again = compress.prune(
            conv_choices(), recipe, train=data, workdir=tmp_path / str(number), resume=True, quiet=True
        )
        assert again.plan.choices == whole.plan.choices
        assert same_weights(again.model, whole.model)
        assert again.report.operations == whole.report.operations


def test_a_session_chooses_operations() -> None:
    batches = images()
    session = compress.search_session(conv_choices(), RECIPE, steps=4, example_inputs=batches[0][0])
    for first, second in zip(batches, reversed(batches), strict=True):
        session.step((first, second))
    with pytest.raises(
        RuntimeError, match=r"chosen once, by the budget of the recipe; got budget='60%'. Call finish()"
    ):
        session.finish(budget="60%")
    pruned = session.finish()  # the search is not lost
    with pytest.raises(RuntimeError, match="the session is finished; operations are chosen once"):
        session.finish()
    assert set(pruned.plan.choices) == {"first", "second", "down"}
    both = {**RECIPE, "target": {"operations": True, "channels": True}, "budget": {"macs": "60%"}}
    with pytest.raises(compress.NotReady, match="a session chooses operations or cuts widths"):
        compress.search_session(conv_choices(), both, steps=4, example_inputs=batches[0][0])


def test_preview_shows_candidates_and_whether_a_budget_can_be_met() -> None:
    x = torch.zeros(1, 3, 8, 8)
    shown = compress.preview(conv_choices(), RECIPE, example_inputs=x)
    assert shown.reachable and {row.chosen for row in shown.report.operations} == {"conv3", "wide"}
    assert compress.preview(conv_choices(), {**RECIPE, "budget": {"macs": "70%"}}, example_inputs=x).reachable
    out_of_reach = compress.preview(conv_choices(), {**RECIPE, "budget": {"macs": "1%"}}, example_inputs=x)
    assert not out_of_reach.reachable and out_of_reach.smallest["macs"] > 0.01


def test_onnx_file_holds_only_the_chosen_candidates(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    pruned = compress.prune(conv_choices(), {**RECIPE, "export": "onnx"}, train=loader(), workdir=tmp_path, quiet=True)
    graph = onnx.load(tmp_path / "model.onnx").graph
    convolutions = sum(node.op_type == "Conv" for node in graph.node)
    assert convolutions == sum(isinstance(module, nn.Conv2d) for module in pruned.model.modules())


def test_choices_that_a_recipe_does_not_search_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = {"budget": "90%", "search": "magnitude", "timing": {"repeats": 3}}
    pruned = compress.prune(conv_choices(), recipe, example_inputs=images()[0][0])
    (note,) = (note for note in pruned.report.notes if "target.operations" in note)
    assert "(first, second, down) keep all of their candidates" in note and "operations: true" in note
    assert "keep all of their candidates" in " ".join(capsys.readouterr().err.split())
    assert len(choices_of(pruned.model)) == 3
    chosen = compress.prune(conv_choices(), RECIPE, train=loader(), quiet=True)
    assert not any("target.operations" in note for note in chosen.report.notes)


def test_a_model_without_choices_is_refused() -> None:
    with pytest.raises(compress.NotReady, match=r"target.operations: the model has no choices. Put compress.Choice"):
        compress.prune(nn.Sequential(nn.Flatten(), nn.Linear(192, 4)), RECIPE, train=loader(), quiet=True)


def test_images_without_labels_need_a_teacher_to_search_operations() -> None:
    x = torch.cat([x for x, _ in images()])
    with pytest.raises(compress.NotReady, match=r"the training data have no labels, and the model .* cannot teach"):
        compress.prune(conv_choices(), RECIPE, train=x, quiet=True)
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
    pruned = compress.prune(conv_choices(), RECIPE, train=x, teacher=teacher, quiet=True)
    assert not choices_of(pruned.model) and pruned.report.recipe["search"]["distill"]["weight"] == 8


def test_choices_that_cannot_be_replaced_are_refused() -> None:
    whole = compress.Choice(
        a=nn.Sequential(nn.Flatten(), nn.Linear(192, 4)), b=nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
    )
    with pytest.raises(compress.NotReady, match="a Choice cannot be the whole model"):
        compress.prune(whole, RECIPE, train=loader(), quiet=True)
    nested = compress.Choice(a=nn.Sequential(compress.Choice(x=nn.Identity(), y=nn.ReLU())), b=nn.Identity())
    model = nn.Sequential(nested, nn.Flatten(), nn.Linear(192, 4))
    with pytest.raises(compress.NotReady, match=r"0.candidates.a.0 is a Choice inside a candidate of 0"):
        compress.prune(model, RECIPE, train=loader(), quiet=True)


def test_different_output_shapes_are_found_before_the_search() -> None:
    model = nn.Sequential(compress.Choice(a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(3, 5, 1)), nn.Flatten(), nn.Linear(256, 4))
    with pytest.raises(compress.NotReady, match=r"a returns \[8, 4, 8, 8\], b returns \[8, 5, 8, 8\]"):
        compress.prune(model, RECIPE, train=loader(), quiet=True)


def test_code_that_uses_a_choice_in_another_way_is_found() -> None:
    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = compress.Choice(a=nn.Linear(3, 3), b=nn.Linear(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.block(x)
            return 2 * out if isinstance(self.block, compress.Choice) else out

    with pytest.raises(PlanError, match="computes something else than the mixture with all weight on them"):
        verify_operations(Doubled(), {"block": "a"}, torch.randn(2, 3))


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"target": {"operations": True}}, "search: target.operations needs a search.*darts1"),
        ({**RECIPE, "search": {"method": "taylor"}}, "search: target.operations needs a search"),
        ({**RECIPE, "steps": 2}, "steps: operations are chosen in one round"),
        ({**RECIPE, "budget": {"dims": "50%"}}, "budget: operations have no dimensions"),
        ({**RECIPE, "search": {**RECIPE["search"], "gamma": 0.1}}, "penalty: latency or macs"),
        ({**RECIPE, "target": {"operations": True, "channels": True}}, "budget: .*missing"),
    ],
)
def test_recipes_that_contradict_themselves_are_refused(recipe: dict[str, Any], message: str) -> None:
    with pytest.raises(compress.RecipeError, match=message):
        compress.Recipe.load(recipe)
