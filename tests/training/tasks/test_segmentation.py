"""Segmentation: losses, counts and metrics against loops over pixels and numpy; the masks that are refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compress
from compress import BatchError, Segmentation
from compress.data import AccumulatedBatch
from compress.training import GradientComputer
from compress.training.tasks.pixel_losses import dice_losses
from compress.training.tasks.segmentation import pixel_logits

CLASS_WEIGHTS = [0.5, 1.0, 3.0]


def example(count: int = 4, size: int = 5) -> tuple[Tensor, Tensor]:
    """Images, and masks in which a different number of pixels is ignored in each."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 3, size, size, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (count, size, size), generator=generator)
    for i in range(count):
        y[i].view(-1)[: 6 * i] = 255 if i % 2 else -100
    return x, y


def naive_loss(logits: Tensor, mask: Tensor, cross_entropy: float, dice: float, class_weights: list[float]) -> float:
    """The loss of one image, pixel by pixel, times its weight; and its weight."""
    total, weight = 0.0, 0.0
    common, sizes = [0.0] * 3, [[0.0, 0.0] for _ in range(3)]
    for i in range(mask.shape[0]):
        for j in range(mask.shape[1]):
            label = int(mask[i, j])
            if label in (255, -100):
                continue
            exponentials = [math.exp(float(z)) for z in logits[:, i, j]]
            q = [e / sum(exponentials) for e in exponentials]
            total -= class_weights[label] * math.log(q[label])
            weight += class_weights[label]
            common[label] += q[label]
            sizes[label][1] += 1
            for c in range(3):
                sizes[c][0] += q[c]
    present = [c for c in range(3) if sizes[c][1]]
    coefficient = sum(2 * common[c] / sum(sizes[c]) for c in present) / len(present)
    return cross_entropy * total + dice * weight * (1 - coefficient), weight


@pytest.mark.parametrize("class_weights", [None, CLASS_WEIGHTS])
@pytest.mark.parametrize(("cross_entropy", "dice"), [(1.0, 0.0), (0.0, 1.0), (0.7, 2.0)])
def test_loss_is_that_of_a_loop_over_pixels(cross_entropy: float, dice: float, class_weights: Any) -> None:
    x, y = example()
    task = Segmentation(cross_entropy=cross_entropy, dice=dice, class_weights=class_weights)
    losses = [naive_loss(a, m, cross_entropy, dice, class_weights or [1.0] * 3) for a, m in zip(x, y, strict=True)]
    expected = sum(loss for loss, _ in losses) / sum(weight for _, weight in losses)
    assert float(task.loss(x, (x, y))) == pytest.approx(expected, rel=1e-6)
    assert task.count_targets((x, y)) == pytest.approx(sum(weight for _, weight in losses), rel=1e-6)
    if not dice:
        weights = None if class_weights is None else torch.tensor(class_weights, dtype=torch.float64)
        exact = F.cross_entropy(x, torch.where(y == 255, -100, y), weights)
        assert float(task.loss(x, (x, y))) == pytest.approx(float(exact), rel=1e-9)


@pytest.mark.parametrize("class_weights", [None, CLASS_WEIGHTS])
@pytest.mark.parametrize("form", ["micro-batches", "accumulated"])
def test_parts_of_a_batch_have_its_gradient(form: str, class_weights: Any) -> None:
    """So have processes, whose weights are these counts: the masks have 25, 19, 13 and 7 pixels that count."""
    task, layer = Segmentation(dice=0.5, class_weights=class_weights), nn.Conv2d(3, 3, 1).double()
    x, y = example()
    weights = list(layer.parameters())
    exact = torch.autograd.grad(task.loss(layer(x), (x, y)), weights)
    compute = GradientComputer()
    batch: Any = (x, y)
    if form == "accumulated":
        batch = AccumulatedBatch([(x[:1], y[:1]), (x[1:], y[1:])])
    else:
        compute.num_micro_batches = 4
    counts = {"task": task.count_targets}
    found = compute.gradients(lambda part: {"task": task.loss(layer(part[0]), part)}, batch, weights, counts=counts)
    for ours, theirs in zip(found.gradients, exact, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def test_loss_over_no_pixel_is_zero_with_a_gradient_of_zero() -> None:
    x, _ = example(2)
    x.requires_grad_()
    task, none = Segmentation(dice=1.0), torch.full((2, 5, 5), 255)
    loss = task.loss(x, (x, none))
    (gradient,) = torch.autograd.grad(loss, x)
    assert loss.item() == 0 and task.count_targets((x, none)) == 0 and not bool(gradient.any())


def test_dice_of_a_perfect_and_of_a_half_covered_square() -> None:
    mask = torch.zeros(2, 4, 4, dtype=torch.long)
    mask[:, :2] = 1
    sure = 50.0 * F.one_hot(mask, 2).movedim(-1, 1).double()
    sure[1] = torch.tensor([0.0, 50.0])[:, None, None]  # class 1 everywhere
    assert dice_losses(sure, mask).tolist() == pytest.approx([0, 1 - (0 + 2 * 8 / (16 + 8)) / 2], abs=1e-9)


@pytest.mark.parametrize("ignore", [255, [255, 7]])
def test_metrics_are_those_of_a_confusion_matrix_in_numpy(ignore: Any) -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 1).requires_grad_(False)
    data = [(torch.randn(2, 3, 6, 6), torch.randint(0, 3, (2, 1, 6, 6))) for _ in range(3)]
    data[1][1][0, 0, :4] = 255
    if ignore != 255:
        data[2][1][1, 0, 2:] = 7
    found = Segmentation(None, data, ignore=ignore).evaluate(model, data)
    predicted = np.concatenate([model(x).argmax(1).flatten().numpy() for x, _ in data])
    truth = np.concatenate([y.flatten().numpy() for _, y in data])
    keep = truth < 4
    matrix = np.zeros((4, 4), int)
    np.add.at(matrix, (truth[keep], predicted[keep]), 1)
    union = matrix.sum(0) + matrix.sum(1) - np.diag(matrix)
    assert found["miou"] == pytest.approx(np.mean(np.diag(matrix)[union > 0] / union[union > 0]), rel=1e-12)
    assert found["pixel_accuracy"] == pytest.approx(np.trace(matrix) / matrix.sum(), rel=1e-12)
    logits = torch.cat([model(x).movedim(1, -1).reshape(-1, 4) for x, _ in data])[torch.from_numpy(keep)]
    expected = F.cross_entropy(logits, torch.from_numpy(truth[keep]))
    assert found["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert next(iter(found)) == "miou", "the first metric decides"
    with pytest.raises(BatchError, match="val: expected at least one pixel with a class; the loader gave none"):
        Segmentation().evaluate(model, [])


def test_one_output_is_the_logit_of_class_one() -> None:
    z, y = torch.randn(2, 1, 4, 4), torch.randint(0, 2, (2, 1, 4, 4))
    task = Segmentation()
    expected = F.binary_cross_entropy_with_logits(z, y.float())
    for mask in (y, y.float(), y.bool()):
        assert float(task.loss(z, (z, mask))) == pytest.approx(float(expected), rel=1e-5)
    p = torch.sigmoid(z / 2)
    t = torch.sigmoid(torch.zeros_like(z) / 2)
    divergence = (t * (t / p).log() + (1 - t) * ((1 - t) / (1 - p)).log()).mean()
    assert float(task.distil(z, torch.zeros_like(z), 2.0)) == pytest.approx(float(divergence), rel=1e-4)


def test_distillation_is_the_mean_over_pixels() -> None:
    student, teacher = torch.randn(2, 2, 3, 4, 4, dtype=torch.float64)
    total = 0.0
    for n in range(2):
        for i in range(4):
            for j in range(4):
                p, q = (t[n, :, i, j].div(3).softmax(0) for t in (teacher, student))
                total += float((p * (p / q).log()).sum())
    found = Segmentation().distil({"out": student}, {"out": teacher}, 3.0)
    assert float(found) == pytest.approx(total / 32, rel=1e-9)


def test_logits_are_found_in_the_usual_outputs_and_resized_to_the_mask() -> None:
    logits = torch.tensor([1.0, 3.0])[None, :, None, None].expand(2, 2, 3, 3)
    mask = torch.ones(2, 12, 9, dtype=torch.long)

    class Output:
        pass

    output = Output()
    output.logits = logits  # type: ignore[attr-defined]
    for form in (logits, {"out": logits}, {"logits": logits}, output, (logits, torch.zeros(2)), [logits]):
        assert pixel_logits(form) is logits
        assert float(Segmentation().loss(form, (mask[:, None].float(), mask))) == pytest.approx(
            math.log(1 + math.exp(-2)), rel=1e-5
        )
    for wrong in ({"masks": logits}, torch.zeros(2, 3), None):
        with pytest.raises(BatchError, match=r"expected logits of shape \(images, classes, height, width\)"):
            pixel_logits(wrong)


def test_auxiliary_output_is_trained_with_its_weight_and_not_measured() -> None:
    x, y = example()
    aux = x.flip(0)
    task = Segmentation(auxiliary=0.3)
    expected = task.loss(x, (x, y)) + 0.3 * task.loss(aux, (x, y))
    assert torch.allclose(task.loss({"out": x, "aux": aux}, (x, y)), expected)

    class Network(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"out": x, "aux": x.flip(0)}

    assert task.evaluate(Network(), [(x, y)])["loss"] == pytest.approx(float(task.loss(x, (x, y))))


def test_reward_is_the_accuracy_of_the_pixels() -> None:
    x, y = example()
    counted = (y != 255) & (y != -100)
    expected = (x.argmax(1) == y)[counted].double().mean()
    assert float(Segmentation().reward(x, (x, y))) == pytest.approx(float(expected))


def test_training_does_not_wait_for_the_device() -> None:
    """The meta device has no values, so that reading one fails."""
    logits = torch.zeros(2, 3, 4, 4, device="meta", requires_grad=True)
    batch = (logits.detach(), torch.zeros(2, 8, 8, dtype=torch.long, device="meta"))
    task = Segmentation(dice=1.0, class_weights=CLASS_WEIGHTS)
    loss = task.loss({"out": logits, "aux": logits}, batch) + task.distil(logits, logits.detach(), 4.0)
    assert torch.autograd.grad(loss, logits)[0].shape == logits.shape
    one = torch.zeros(2, 1, 4, 4, device="meta", requires_grad=True)
    assert Segmentation().loss(one, batch).shape == ()


IMAGES = torch.zeros(2, 3, 4, 4)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.zeros(2, 3, 4, 4), r"3 channels, such as one-hot masks, become class numbers by mask.argmax\(1\)"),
        (torch.zeros(2, dtype=torch.long), r"one mask of class numbers per image, \(images, height, width\)"),
        (torch.zeros(3, 4, 4), "one mask of class numbers per image"),
        (torch.full((2, 4, 4), 0.2), "masks: expected class numbers; got fractions. ToTensor divides by 255"),
        (torch.full((2, 4, 4), 3), r"expected classes 0 to 2, because the model has 3 outputs; got 3.*ignore=3"),
        (torch.full((2, 4, 4), -1), r"expected classes 0 to 2.*got -1.*ignore=-1"),
        ("names", "input and target must be tensors"),
    ],
)
def test_wrong_masks_are_described(mask: Any, message: str) -> None:
    with pytest.raises(BatchError, match=f"(?s){message}"):
        Segmentation().loss(torch.zeros(2, 3, 4, 4), (IMAGES, mask))


def test_mistakes_of_settings_and_loaders_are_named() -> None:
    for settings in ({"cross_entropy": 0.0}, {"dice": -1.0}, {"class_weights": [1.0, -1.0]}):
        with pytest.raises(ValueError, match="expected weights of 0 or more, and cross_entropy or dice above 0"):
            Segmentation(**settings)  # type: ignore[arg-type]
    mask = torch.zeros(2, 4, 4, dtype=torch.long)
    with pytest.raises(BatchError, match="class_weights: expected one for each of 3 classes; got 2"):
        Segmentation(class_weights=[1, 2]).loss(torch.zeros(2, 3, 4, 4), (IMAGES, mask))
    with pytest.raises(BatchError, match="expected batches; got single samples"):
        Segmentation().split((IMAGES[0], mask[0]))
    with pytest.raises(BatchError, match=r"Without targets.*compensate: least_squares"):
        Segmentation().split(IMAGES)
    white = torch.full((2, 4, 4), 255)
    with pytest.raises(BatchError, match=r"expected 0 and 1, because the model has one output; got 255.*// 255"):
        Segmentation().loss(torch.zeros(2, 1, 4, 4), (IMAGES, white))
    assert float(Segmentation(ignore=255).loss(torch.zeros(2, 1, 4, 4), (IMAGES, white))) == 0


def test_errors_of_classification_name_the_task_of_masks_and_boxes() -> None:
    target = {"boxes": torch.zeros(1, 4), "labels": torch.ones(1, dtype=torch.long)}
    for batch, line in (
        ((IMAGES, torch.zeros(2, 4, 4, dtype=torch.long)), r"The targets are masks:\n    task = compress.Segmentation"),
        (([IMAGES[0]] * 2, [target] * 2), r"torchvision's detectors take them:\n    task = compress.Detection\("),
        ({"image": IMAGES, "labels": [{"boxes": target["boxes"]}] * 2}, "YourTask.*see compress.Task"),
        ((IMAGES, torch.full((2,), 0.5)), r"task=compress.Regression\(train, val\)"),
    ):
        with pytest.raises(BatchError, match=line):
            compress.Classification().split(batch)
