"""The task of a Hugging Face model follows from its class, and runs through search, cut, fine-tuning and reload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import compress
from helpers.hugging_face import batches, build, inputs_of, same_outputs, transformers, vit

RECIPE: dict[str, Any] = {
    "search": {"method": "netslim", "epochs": "2 steps"},
    "finetune": {"epochs": "2 steps"},
    "timing": {"repeats": 3},
}
BUDGETS = {"vit": 0.5, "segformer": 0.5, "detr": 0.5}
FIRST_METRIC = {"vit": "accuracy", "segformer": "miou", "detr": "ap"}


@pytest.mark.parametrize("name", BUDGETS)
def test_model_is_searched_cut_and_fine_tuned_by_its_own_loss_and_loads_bit_equal(name: str, tmp_path: Path) -> None:
    pytest.importorskip("pycocotools")
    model, data = build(name), batches(name)
    dense = {key: value.clone() for key, value in model.state_dict().items()}
    recipe = RECIPE | {"budget": {"macs": BUDGETS[name]}}
    workdir = tmp_path / "run"
    pruned = compress.prune(model, recipe, train=data, val=data, workdir=workdir, quiet=True)
    report = pruned.report
    assert report.pruned.macs <= BUDGETS[name] * report.dense.macs
    assert next(iter(report.pruned.metrics)) == FIRST_METRIC[name]
    assert report.recipe["finetune"]["distill"]["weight"] == 8.0
    trained = [record for record in report.history if record["stage"] == "finetune" and "distil" in record]
    assert len(trained) == 2 and all(record["distil"] > 0 for record in trained)
    assert all(torch.equal(value, dense[key]) for key, value in model.state_dict().items())
    loaded = compress.hf.load(workdir)
    assert type(loaded) is type(model) and not loaded.training
    assert same_outputs(loaded, pruned.model, data[0])
    shapes = {key: value.shape for key, value in pruned.model.state_dict().items()}
    assert {key: value.shape for key, value in loaded.state_dict().items()} == shapes
    assert same_outputs(compress.load(build(name), workdir), pruned.model, data[0])  # as any other model


def test_tasks_by_class() -> None:
    names = {name: type(compress.hf.task(build(name))).__name__ for name in BUDGETS}
    assert names == {"vit": "Classification", "segformer": "SemanticSegmentation", "detr": "ObjectDetection"}
    many = vit(problem_type="multi_label_classification")
    assert type(compress.hf.task(many)).__name__ == "ModelLoss"
    with pytest.raises(compress.NotReady, match=r"expected a transformers\.PreTrainedModel; got Linear"):
        compress.hf.task(torch.nn.Linear(2, 2))


def test_masks_of_other_types_give_the_same_loss() -> None:
    model, (batch,) = build("segformer"), batches("segformer", 1)
    task = compress.hf.task(model)
    expected = task.loss(task.forward(model, batch), batch)
    for mask in (batch["labels"].to(torch.uint8), batch["labels"].float(), batch["labels"][:, None].int()):
        changed = {**batch, "labels": mask}
        assert torch.equal(task.loss(task.forward(model, changed), changed), expected)


def test_masks_that_the_model_has_no_output_for_are_refused() -> None:
    model, (batch,) = build("segformer"), batches("segformer", 1)
    batch["labels"][0, 9, 9] = 7
    with pytest.raises(compress.errors.BatchError, match=r"expected classes 0 to 2, .* 3 outputs; got 7"):
        compress.hf.task(model).forward(model, batch)


def test_batch_in_which_all_pixels_are_ignored_leaves_the_weights_as_they_are() -> None:
    """The model's own loss is a mean over no pixels, which is not a number."""
    model, (batch,) = build("segformer"), batches("segformer", 1)
    batch["labels"][:] = 255
    task = compress.hf.task(model)
    loss = task.loss(task.forward(model, batch), batch)
    assert loss.item() == 0
    loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize(("name", "labels"), [("segformer", "labels"), ("detr", "labels")])
def test_batches_without_labels_are_explained(name: str, labels: str) -> None:
    """A classifier would learn from its teacher."""
    data = [{"pixel_values": batch["pixel_values"]} for batch in batches(name)]
    with pytest.raises(compress.NotReady, match=rf"got .*pixel_values.*{labels}") as error:
        compress.prune(build(name), RECIPE | {"budget": "50%"}, train=data, quiet=True)
    assert "one row of class scores" not in str(error.value)


def test_segmentation_has_the_loss_of_the_model_and_counts_pixels() -> None:
    model, (batch,) = build("segformer"), batches("segformer", 1)
    task = compress.hf.task(model)
    outputs = task.forward(model, batch)
    logits = F.interpolate(outputs.logits, (32, 32), mode="bilinear", align_corners=False)
    expected = F.cross_entropy(logits, batch["labels"], ignore_index=255)
    assert torch.allclose(task.loss(outputs, batch), expected)
    assert task.count_targets(batch) == 4 * 28 * 32
    assert set(task.inputs(batch)) == {"pixel_values"}
    assert torch.equal(task.teach(model, batch).logits, outputs.logits)
    counted = batch["labels"] != 255
    hits = (logits.argmax(1) == batch["labels"])[counted].double().mean()
    assert task.evaluate(model, [batch])["pixel_accuracy"] == pytest.approx(float(hits))


def test_other_models_are_trained_by_their_loss_and_imitate_their_predictions() -> None:
    torch.manual_seed(0)
    model, other = (vit(problem_type="multi_label_classification") for _ in range(2))
    data = [{**batch, "labels": F.one_hot(batch["labels"], 10).float()} for batch in batches("vit", 2)]
    data[1] = {name: value[:1] for name, value in data[1].items()}
    task = compress.hf.task(model, data, data)
    losses = [F.binary_cross_entropy_with_logits(model(**inputs_of(b)).logits, b["labels"]) for b in data]
    outputs = task.forward(model, {**data[0], "file": ["a.png"]})  # an argument that the model does not take
    assert torch.allclose(task.loss(outputs, data[0]), losses[0])
    mean = (4 * losses[0] + losses[1]) / 5
    assert task.evaluate(model, data) == {"minus_loss": pytest.approx(-mean.item(), rel=1e-5)}
    taught = task.teach(other, data[0])
    distance = (outputs.logits - taught.logits).square().sum() / taught.logits.square().sum()
    assert torch.allclose(task.distil(outputs, taught, 4.0), distance)


def test_batches_that_do_not_fit_say_what_the_model_takes() -> None:
    model, (batch,) = build("segformer"), batches("segformer", 1)
    task: Any = compress.hf.ModelLoss(model)
    with pytest.raises(compress.BatchError, match=r"expected dicts of the model's arguments, such as pixel_values"):
        task.forward(model, (batch["pixel_values"], batch["labels"]))
    without = inputs_of(batch)
    with pytest.raises(compress.BatchError, match=r"expected a loss.*Name the labels as the model does \(labels\)"):
        task.loss(task.forward(model, without), without)
    with pytest.raises(compress.BatchError, match=r"expected at least one batch; the loader gave none"):
        task.evaluate(model, [])
    with pytest.raises(compress.BatchError, match=r"distill: expected predictions to compare.*Leave distill out"):
        task.distil({}, {"loss": torch.ones(())}, 4.0)


def test_wrong_names_of_labels_are_found_before_the_run() -> None:
    data = [{"pixel_values": batch["pixel_values"], "label_map": batch["labels"]} for batch in batches("segformer", 1)]
    with pytest.raises(compress.NotReady, match=r"expected a loss.*Name the labels as the model does \(labels\)"):
        compress.prune(build("segformer"), "50%", train=data, quiet=True)


def test_labels_of_detr_name_their_task() -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 3, 3))
    with pytest.raises(compress.NotReady, match=r"boxes, as Hugging Face's .*\n    task = compress\.hf\.task\("):
        compress.prune(net, "50%", train=batches("detr", 1), quiet=True)


def test_models_of_transformers_are_recognized_without_importing_it() -> None:
    from compress.modules import is_hugging_face_model

    assert is_hugging_face_model(build("vit"))
    assert not is_hugging_face_model(torch.nn.Linear(2, 2))
    assert not hasattr(torch.nn, transformers.PreTrainedModel.__name__)


def test_command_prunes_and_says_how_to_reload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from compress.cli import app as cli

    command = ["prune", "--model", "helpers.hugging_face:segformer", "--task", "helpers.hugging_face:segmentation_task"]
    recipe = tmp_path / "short.yaml"
    recipe.write_text(
        "extends: segformer_half\nsearch: {epochs: 1 steps}\nfinetune: {epochs: 1 steps}\ntiming: {repeats: 3}\n"
    )
    out = tmp_path / "out"
    monkeypatch.setattr("sys.argv", ["compress", *command, "--recipe", str(recipe), "--workdir", str(out), "--quiet"])
    with pytest.raises(SystemExit) as done:
        cli.main()
    assert not done.value.code, capsys.readouterr().err
    assert f"reload with compress.hf.load('{out}')" in capsys.readouterr().out
    assert not compress.hf.load(out).training
