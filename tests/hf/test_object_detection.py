"""Object detection: AP, and distillation of sets of boxes whose order does not matter."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

import compress
from helpers.hugging_face import batches, build

pytest.importorskip("compress.hf")
from compress.hf.object_detection import match_queries


def predictions(classes: int, seed: int, queries: int = 5) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    boxes = 0.2 + 0.5 * torch.rand(2, queries, 4, generator=draw)
    return {"logits": 2 * torch.randn(2, queries, classes, generator=draw), "pred_boxes": boxes}


@pytest.fixture(scope="module")
def task() -> Any:
    return compress.hf.task(build("detr"))


def test_queries_are_matched_as_brute_force_matches_them() -> None:
    student, teacher = predictions(3, 0), predictions(3, 1)
    order = match_queries(student["logits"], student["pred_boxes"], teacher["logits"], teacher["pred_boxes"])
    for image in range(2):

        def cost(columns: Any, image: int = image) -> float:
            parts = (student[key][image][columns] - teacher[key][image] for key in student)
            return sum(float(part.abs().sum()) for part in parts)

        assert cost(order[image].tolist()) == pytest.approx(min(cost([*columns]) for columns in permutations(range(5))))


@pytest.mark.parametrize("classes", [3, 4])  # each class for itself, or with a class for "no object"
def test_distance_from_the_teacher_does_not_depend_on_the_order_of_queries(classes: int, task: Any) -> None:
    student, teacher = predictions(classes, 0), predictions(classes, 1)
    shuffled = {key: value[:, [3, 0, 4, 1, 2]] for key, value in student.items()}
    distance = task.distil(student, teacher, 4.0)
    assert torch.allclose(task.distil(shuffled, teacher, 4.0), distance)
    assert float(distance) > 0.01
    assert float(task.distil(teacher, shuffled_copy(teacher), 4.0)) == pytest.approx(0, abs=1e-6)


def shuffled_copy(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value[:, [1, 2, 0, 4, 3]] for key, value in outputs.items()}


def test_distance_of_one_query_in_closed_form(task: Any) -> None:
    """One query, so that nothing has to be matched; denoising queries come in front of it."""
    for classes in (3, 4):
        student, teacher = predictions(classes, 0, 1), predictions(classes, 1, 1)
        s, t = student["logits"] / 2, teacher["logits"] / 2
        if classes == 4:
            p = t.softmax(-1)
            divergence = (p * (p.log() - s.log_softmax(-1))).sum(-1).mean()
            confidence = 1 - teacher["logits"].softmax(-1)[..., 3]
        else:
            p, q = t.sigmoid(), s.sigmoid()
            divergence = (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).sum(-1).mean()
            confidence = teacher["logits"].sigmoid().amax(-1)
        apart = (student["pred_boxes"] - teacher["pred_boxes"]).abs().sum(-1)
        expected = divergence + 5 / 2**2 * (confidence * apart).sum() / confidence.sum()
        noisy = {key: torch.cat([torch.rand_like(value), value], 1) for key, value in student.items()}
        assert torch.allclose(task.distil(noisy, teacher, 2.0), expected)


def test_perfect_detections_have_the_precision_1_and_a_wrong_class_halves_it(task: Any) -> None:
    pytest.importorskip("pycocotools")
    (batch,) = batches("detr", 1)
    for label in batch["labels"]:
        label["class_labels"] = torch.tensor([0, 1])

    def model(wrong: bool) -> Any:
        logits = torch.full((4, 5, 4), -9.0)
        logits[:, :, 3] = 0.0  # no object
        boxes = torch.rand(4, 5, 4)
        for image, label in enumerate(batch["labels"]):
            boxes[image, :2] = label["boxes"]
            logits[image, 0, 0] = logits[image, 1, 2 if wrong else 1] = 9.0
        return lambda **arguments: {"logits": logits, "pred_boxes": boxes, "loss": torch.tensor(0.25)}

    right, wrong = (task.evaluate(model(flag), [batch]) for flag in (False, True))
    assert right == {"ap": pytest.approx(1), "ap50": pytest.approx(1), "ap75": pytest.approx(1), "loss": 0.25}
    assert wrong["ap"] == pytest.approx(0.5)
    empty = [{**batch, "labels": [{"class_labels": torch.zeros(0).long(), "boxes": torch.zeros(0, 4)}] * 4}]
    with pytest.raises(compress.BatchError, match="expected at least one image with a box; the loader gave none"):
        task.evaluate(model(False), empty)


def test_classes_without_background_may_share_a_query(task: Any) -> None:
    logits, boxes = torch.tensor([[[3.0, 2.0, -9.0], [-9.0, -9.0, -9.0]]]), torch.rand(1, 2, 4)
    found = task.detections({"logits": logits, "pred_boxes": boxes})[0]
    assert found["labels"][:2].tolist() == [0, 1]
    assert torch.equal(found["boxes"][0], found["boxes"][1])
    assert torch.allclose(found["scores"][:2], torch.tensor([3.0, 2.0]).sigmoid())


def test_loss_is_the_metric_where_pycocotools_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = build("detr"), batches("detr", 2)
    task = compress.hf.task(model)
    monkeypatch.setattr("compress.hf.object_detection.can_measure_boxes", lambda: False)
    losses = [model(**batch).loss.item() for batch in data]
    assert task.evaluate(model, data) == {"minus_loss": pytest.approx(-sum(losses) / 2, rel=1e-5)}


PIXELS = torch.tensor([[9.0, 9.0, 4.0, 4.0], [20.0, 20.0, 9.0, 9.0]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"boxes": torch.zeros(0), "class_labels": torch.zeros(0).long()},
            r"floats of shape \(n, 4\), \(0, 4\) if",
        ),
        ({"boxes": PIXELS.long()}, r"boxes are tensor\[2, 4\]\. Give floats"),
        ({"boxes": PIXELS}, r"a box has the value 20\. Divide pixels by the width and height"),
        ({"class_labels": torch.tensor([0, 9])}, r"class 9 is not one of the model's 3, 0 to 2"),
        ({"class_labels": torch.tensor([1])}, r"class_labels are .*\. Give a class number for each of 2 boxes"),
    ],
)
def test_labels_that_are_not_those_of_the_image_processor_are_refused(
    change: dict[str, Tensor], message: str, task: Any
) -> None:
    (batch,) = batches("detr", 1)
    batch["labels"][1] |= change
    with pytest.raises(compress.errors.BatchError, match=rf"labels: expected for each image a dict.*{message}"):
        task.forward(build("detr"), batch)


def test_labels_of_another_library_are_refused(task: Any) -> None:
    (batch,) = batches("detr", 1)
    batch["labels"] = [{"boxes": torch.rand(1, 4), "labels": torch.tensor([1])}] * 4
    with pytest.raises(compress.errors.BatchError, match=r"class_labels \(n,\) and boxes .*; got a dict of 'boxes'"):
        task.forward(build("detr"), batch)


def test_images_without_boxes_are_allowed(task: Any) -> None:
    (batch,) = batches("detr", 1)
    for label in batch["labels"]:
        label |= {"boxes": torch.zeros(0, 4), "class_labels": torch.zeros(0).long()}
    assert bool(task.loss(task.forward(build("detr"), batch), batch).isfinite())


def test_validation_data_without_labels_are_refused(task: Any) -> None:
    (batch,) = batches("detr", 1)
    del batch["labels"]
    with pytest.raises(compress.errors.BatchError, match=r"expected a loss, .*Name the labels as the model"):
        task.evaluate(build("detr"), [batch])
