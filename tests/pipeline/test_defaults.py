"""A budget alone: search, repair and fine-tuning follow from the data, and the run says what it does."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import compress
from compress import Recipe
from compress.pipeline.preflight import TrainingTrial, prefers_adamw
from compress.recipe import complete_recipe, config_class
from compress.training import Classification, Unlabelled, as_batches, has_labels

TIMING = {"repeats": 3}


def network(norm: Any = nn.BatchNorm1d) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 24), norm(24), nn.ReLU(), nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 3)).eval()


def points(count: int = 96) -> tuple[Tensor, Tensor]:
    """Three clusters in four dimensions."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(count) % 3
    return F.one_hot(y, 4) * 3.0 + torch.randn(count, 4, generator=generator), y


def trained() -> nn.Module:
    model, (x, y) = network().train(), points()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval()


@pytest.mark.parametrize("recipe", ["50%", 0.5, {"budget": "50%"}, {"budget": {"macs": "50%"}, "timing": TIMING}])
def test_budget_alone_with_labels_is_the_default_recipe(recipe: Any) -> None:
    completed = complete_recipe(Recipe.load(recipe), "labels", prefers_adamw=False, distill_weight=8.0, trains=True)
    packaged = Recipe.load("default")
    assert Recipe.load(recipe).is_automatic and not packaged.is_automatic
    same = complete_recipe(packaged, "labels", prefers_adamw=False, distill_weight=8.0, trains=True)
    assert (completed.target, completed.budget, completed.search) == (same.target, same.budget, same.search)
    assert completed.finetune == same.finetune and completed.compensate is False
    assert completed.search.method == "netslim" and completed.search.gamma == "auto"
    assert completed.finetune.distill.weight == completed.search.distill.weight == 8


@pytest.mark.parametrize("durations", [[0.4, 0.02, 0.02], [1.1]], ids=["disturbed", "slow"])
def test_forecast_is_the_shortest_of_three_steps_and_makes_one_if_steps_are_slow(durations: list[float]) -> None:
    class Steps(TrainingTrial):
        def __init__(self) -> None:
            self.durations = iter(durations)

        def _step(self) -> None:
            time.sleep(next(self.durations))

    assert min(durations) <= Steps().step_seconds()
    if len(durations) > 1:
        assert Steps().step_seconds() < max(durations)


def test_default_run_trains_with_the_teacher_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    x, y = points()
    train = DataLoader(TensorDataset(x, y), 32, shuffle=True)
    pruned = compress.prune(trained(), {"budget": "50%", "timing": TIMING}, train=train, val=[(x, y)])
    report = pruned.report
    said = " ".join(capsys.readouterr().err.split())
    line = "default recipe: netslim search of 100 steps, fine-tuning of 400 steps, taught by the labels and the dense"
    assert line in said and "about " in said and any(line in note for note in report.notes)
    assert report.recipe["search"]["method"] == "netslim" and report.recipe["finetune"]["distill"]["weight"] == 8
    assert report.pruned.macs <= 0.5 * report.dense.macs
    assert report.pruned.metrics["accuracy"] >= report.dense.metrics["accuracy"] - 0.02


def test_a_network_with_choices_does_not_teach_by_default() -> None:
    operations = {"target": {"operations": True}, "search": {"method": "rarts", "epochs": 2}, "finetune": {"epochs": 2}}
    settings: dict[str, Any] = {"prefers_adamw": False, "distill_weight": 8.0, "trains": True}
    alone = complete_recipe(Recipe.load(operations), "labels", **settings)
    assert alone.search.distill is None and alone.finetune.distill is None
    assert alone.search.schedule == "cosine", "as in the papers"
    taught = complete_recipe(Recipe.load(operations), "labels", **settings, has_teacher=True)
    assert taught.search.distill.weight == taught.finetune.distill.weight == 8
    with_widths = {**operations, "target": {"operations": True, "channels": True}, "budget": "50%"}
    both = complete_recipe(Recipe.load(with_widths), "labels", **settings)
    assert both.search.distill is None and both.finetune.distill is None and both.search.schedule == "constant"
    asked = {**operations, "search": {**operations["search"], "distill": {}}}  # type: ignore[dict-item]
    assert complete_recipe(Recipe.load(asked), "labels", **settings).search.distill.weight == 8


@pytest.mark.parametrize(("given", "steps"), [("train tensor", 50), ("train list", 75), ("calibration", 50)])
def test_inputs_alone_are_repaired_and_distilled(given: str, steps: int) -> None:
    """On few inputs for fewer steps than with labels: 25 epochs, but 50 steps at least."""
    x, y = points()
    model = trained()
    data: dict[str, Any] = {
        "train tensor": {"train": x},
        "train list": {"train": [[part] for part in x.split(32)]},
        "calibration": {"calibration": x},
    }[given]
    recipe = {"budget": "50%", "timing": TIMING}
    report = compress.prune(model, recipe, val=[(x, y)], quiet=True, **data).report
    assert report.recipe["search"]["method"] == "magnitude" and report.recipe["compensate"] == "least_squares"
    line = f"default recipe: cut by magnitude, repair by least squares, fine-tuning of {steps} steps, taught by the "
    assert any(note.startswith(line) for note in report.notes)
    assert any(note.startswith("least squares: ") for note in report.notes)
    assert report.pruned.metrics["accuracy"] >= report.dense.metrics["accuracy"] - 0.02


def test_without_data_nothing_is_trained_and_the_run_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    pruned = compress.prune(network(), "50%", example_inputs=torch.zeros(2, 4))
    assert "no training data: the dimensions are ranked by magnitude" in " ".join(capsys.readouterr().err.split())
    assert pruned.report.recipe["search"]["method"] == "magnitude" and "finetune" not in pruned.report.recipe


def test_data_that_nothing_trains_on_are_named() -> None:
    x, y = points()
    recipe = {"budget": "50%", "search": "magnitude", "timing": TIMING}
    notes = compress.prune(network(), recipe, train=[(x, y)], quiet=True).report.notes
    assert any(note.startswith("nothing trains on the training data: search magnitude needs none") for note in notes)


def test_calibration_data_that_repair_nothing_are_named() -> None:
    x, _ = points()
    recipe: dict[str, Any] = {"budget": "50%", "search": "magnitude", "timing": TIMING}
    expected = "nothing is repaired on the calibration data: add compensate: least_squares"
    for compensate in (False, "mean", "least_squares"):
        pruned = compress.prune(network(), {**recipe, "compensate": compensate}, calibration=x, quiet=True)
        assert (expected in pruned.report.notes) == (compensate != "least_squares")


def test_inputs_without_labels_serve_a_search_that_is_named() -> None:
    x, _ = points()
    recipe = {"budget": "50%", "search": {"method": "netslim", "epochs": "4 steps"}, "timing": TIMING}
    report = compress.prune(trained(), recipe, train=x, val=[x], quiet=True).report
    assert report.dense.metrics["accuracy"] == 1, "without labels it is the agreement with the teacher"
    assert report.pruned.macs <= 0.5 * report.dense.macs


def test_inputs_that_the_model_does_not_take_are_named_as_inputs() -> None:
    with pytest.raises(compress.NotReady, match=r"does not run on the first .* no labels, so it was taken as inputs"):
        compress.prune(network(), "50%", train=torch.zeros(8, 5), quiet=True)


def test_loss_without_labels_is_the_cross_entropy_to_the_teacher() -> None:
    x, _ = points()
    teacher, student = trained(), network()
    task = Unlabelled([x], None, teacher)
    with torch.no_grad():
        p, q = teacher(x).softmax(-1), student(x).log_softmax(-1)
        for batch in (x, [x], {"image": x}):
            assert not has_labels(batch)
            torch.testing.assert_close(task.loss(task.forward(student, batch), batch), -(p * q).sum(-1).mean())
            assert task.count_targets(batch) == len(x)
    agreement = (p.argmax(-1) == q.argmax(-1)).float().mean()
    assert task.evaluate(student, [x])["accuracy"] == pytest.approx(float(agreement))
    labels = torch.zeros(len(x), dtype=torch.long)
    assert task.evaluate(student, [(x, labels)]) == Classification().evaluate(student, [(x, labels)])


def test_tensor_of_inputs_is_read_in_even_batches_and_each_row_once() -> None:
    x = torch.arange(130.0)[:, None]
    batches = [batch for (batch,) in as_batches(x)]
    assert [len(batch) for batch in batches] == [44, 44, 42]
    assert torch.equal(torch.cat(batches).sort(0).values, x)


def test_optimizer_follows_the_family_and_the_rate_the_optimizer() -> None:
    assert prefers_adamw(network(nn.LayerNorm)) and not prefers_adamw(network())
    settings = {"labels": {"prefers_adamw": True, "distill_weight": 8.0, "trains": True}}
    recipe = complete_recipe(Recipe.load("50%"), "labels", **settings["labels"])
    assert (recipe.search.optimizer, recipe.search.lr, recipe.search.weight_decay) == ("adamw", 5e-4, 0.05)
    assert (recipe.finetune.optimizer, recipe.finetune.lr, recipe.finetune.schedule) == ("adamw", 1e-4, "cosine")
    given = {"budget": "50%", "search": {"method": "netslim", "lr": 0.3}, "finetune": {"optimizer": "sgd"}}
    recipe = complete_recipe(Recipe.load(given), "labels", **settings["labels"])
    assert (recipe.search.optimizer, recipe.search.lr) == ("adamw", 0.3)
    assert (recipe.finetune.optimizer, recipe.finetune.lr, recipe.finetune.weight_decay) == ("sgd", 0.01, 1e-4)


def test_what_is_given_stays_and_null_stays_off() -> None:
    given = {
        "budget": "50%",
        "search": {"method": "netslim", "gamma": 1e-4, "epochs": 3},
        "finetune": {"epochs": 2, "distill": None},
    }
    recipe = complete_recipe(Recipe.load(given), "labels", prefers_adamw=False, distill_weight=8.0, trains=True)
    assert recipe.finetune.distill is None and recipe.search.distill is None, "a number as gamma: as in the paper"
    assert Recipe.load(recipe.to_dict()) == recipe
    again = complete_recipe(
        Recipe.load(recipe.to_dict()), "labels", prefers_adamw=True, distill_weight=8.0, trains=True
    )
    assert again == recipe
    own_loop = complete_recipe(Recipe.load(given), "labels", prefers_adamw=True, distill_weight=None, trains=False)
    assert own_loop.finetune == Recipe.load(given).finetune


def test_every_search_that_trains_has_a_length() -> None:
    for method in ("netslim", "rarts", "milenas", "darts1", "darts2", "bayesnas"):
        assert config_class(method)(method=method).length.steps(15) == 100
    assert Recipe.load({"budget": 0.5, "finetune": {}}).finetune.epochs.steps(1000) == 4000


def test_session_of_a_budget_alone_searches_by_netslim() -> None:
    x, y = points()
    session = compress.search_session(trained(), "50%", train=[(x, y)] * 2, steps=3)
    for _ in range(3):
        session.step((x, y))
    assert session.finish().report.recipe["search"]["method"] == "netslim"


def test_resumed_run_of_a_budget_alone_is_not_one_of_a_named_search(tmp_path: Any) -> None:
    folder = tmp_path / "run"
    compress.prune(network(), "50%", example_inputs=torch.zeros(2, 4), workdir=folder, quiet=True)
    compress.prune(network(), "50%", example_inputs=torch.zeros(2, 4), workdir=folder, resume=True, quiet=True)
    named = {"budget": "50%", "search": "magnitude"}
    with pytest.raises(FileExistsError, match="belongs to another run"):
        compress.prune(network(), named, example_inputs=torch.zeros(2, 4), workdir=folder, resume=True, quiet=True)
