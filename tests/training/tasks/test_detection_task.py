"""Detection: torchvision's losses in both modes, AP of a case by hand, feature distance, and refused batches."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compress
from compress import BatchError, Detection
from compress.data import AccumulatedBatch
from compress.training import GradientComputer
from compress.training.tasks.average_precision import average_precision
from compress.training.tasks.detector_modes import feature_distance
from helpers.shapes import Shapes, box_loaders, lists, small_detector

NO_PYCOCOTOOLS = importlib.util.find_spec("pycocotools") is None
needs_pycocotools = pytest.mark.skipif(NO_PYCOCOTOOLS, reason="pycocotools is not installed (the detection extra)")


def batch_of(count: int = 2) -> Any:
    return lists([Shapes(count, boxes=True)[i] for i in range(count)])


@pytest.mark.parametrize("name", ["FasterRCNN", "RetinaNet", "FCOS"])
def test_losses_are_those_of_training_mode_and_nothing_changes(name: str) -> None:
    """The oracle is the detector in training mode, with the statistics and the image size of eval mode."""
    model, task, (images, targets) = small_detector(name), Detection(), batch_of()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    torch.manual_seed(3)  # anchors and proposals are drawn
    outputs = task.forward(model, (images, targets))
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    model.train()
    for part in ("backbone", "transform"):
        model.get_submodule(part).eval()
    torch.manual_seed(3)
    expected = model(list(images), list(targets))
    assert outputs.losses.keys() == expected.keys()
    total = sum(float(value.detach()) for value in expected.values())
    assert float(task.loss(outputs, None).detach()) == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize(("name", "loss"), [("MaskRCNN", "loss_mask"), ("KeypointRCNN", "loss_keypoint")])
def test_masks_and_keypoints_are_trained_with_the_losses_of_their_heads(name: str, loss: str) -> None:
    images, targets = batch_of()
    for target in targets:
        target["masks"] = torch.zeros(2, 64, 64, dtype=torch.uint8)
        target["keypoints"] = torch.cat([target["boxes"][:, None, :2] + 3, torch.ones(2, 1, 1)], 2).repeat(1, 2, 1)
    model, task = small_detector(name), Detection()
    outputs = task.forward(model, (images, targets))
    assert {loss, "loss_classifier", "loss_objectness"} < outputs.losses.keys()
    total = sum(value.item() for value in outputs.losses.values())
    assert task.loss(outputs, None).item() == pytest.approx(total, rel=1e-6)


def test_training_mode_keeps_norms_and_dropout_of_the_heads_as_they_are() -> None:
    model = small_detector("FasterRCNN")
    head: Any = model.get_submodule("roi_heads.box_head")
    head.fc7 = nn.Sequential(head.fc7, nn.BatchNorm1d(64), nn.Dropout(0.5))
    seen = []
    for module in (head.fc7, head.fc7[1], head.fc7[2], model.get_submodule("transform")):
        module.register_forward_hook(lambda module, inputs, output: seen.append(module.training))
    model.eval()
    Detection().forward(model, batch_of())
    assert seen == [False, False, False, True], "transform, norm and dropout, and the Sequential around them"
    head.fc7[1].train()
    seen.clear()
    Detection().forward(model, batch_of())
    assert seen == [False, True, False, True]


def test_teacher_gives_the_maps_of_the_backbone_on_the_pixels_that_the_student_sees() -> None:
    model, task, (images, targets) = small_detector("FasterRCNN"), Detection(), batch_of()
    detector: Any = model
    detector.transform.min_size = (48, 64)  # training mode would draw one of them
    maps = task.teach(model, (images, targets))
    expected = detector.backbone(detector.transform(list(images))[0].tensors)
    assert [m.shape for m in maps] == [v.shape for v in expected.values()]
    assert all(torch.equal(m, v) for m, v in zip(maps, expected.values(), strict=True))
    model.train().get_submodule("backbone").eval()
    outputs = task.forward(model, (images, targets))
    assert float(task.distil(outputs, maps, 4.0).detach()) == 0


def test_feature_distance_is_the_mean_of_relative_squared_distances() -> None:
    teacher = [torch.tensor([[[[3.0, 4.0]]], [[[1.0, 0.0]]]]), torch.full((2, 2, 1, 1), 2.0)]
    student = [torch.tensor([[[[3.0, 0.0]]], [[[0.0, 0.0]]]]), torch.full((2, 2, 1, 1), 1.0)]
    assert float(feature_distance(student, teacher)) == pytest.approx(((16 / 25 + 1) / 2 + 1 / 4) / 2)
    with pytest.raises(ValueError, match="exclude the layers that write these maps from the target"):
        feature_distance([torch.zeros(1, 2, 3, 3)], [torch.zeros(1, 4, 3, 3)])


def test_parts_of_a_batch_have_the_gradient_of_the_images() -> None:
    """The oracle: the loss of RetinaNet is a mean over images."""
    model, task = small_detector("RetinaNet"), Detection()
    images, targets = batch_of(3)
    weights = [model.get_submodule("head.regression_head.bbox_reg").weight]
    exact = torch.autograd.grad(task.loss(task.forward(model, (images, targets)), None), weights)
    counts = {"task": task.count_targets}
    for batch, parts in (((images, targets), 3), (AccumulatedBatch([batch_of(1), (images[1:], targets[1:])]), 1)):
        compute = GradientComputer()
        compute.num_micro_batches = parts
        found = compute.gradients(
            lambda part: {"task": task.loss(task.forward(model, part), part)}, batch, weights, counts=counts
        )
        assert torch.allclose(found.gradients[0], exact[0], rtol=1e-3, atol=1e-5)


def boxes(*corners: tuple[float, ...]) -> Tensor:
    return torch.tensor(corners).reshape(-1, 4)


def labels(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.long)


@needs_pycocotools
def test_average_precision_of_a_case_by_hand() -> None:
    """Hit, miss, hit: precision 1 up to a recall of 1/2, then 2/3; COCO reads it at the recalls 0, 0.01, ..., 1."""
    targets = [{"boxes": boxes((0, 0, 10, 10), (20, 20, 40, 40)), "labels": labels(1, 1)}]
    scores = torch.tensor([0.7, 0.9, 0.8])
    found = boxes((20, 20, 40, 40), (0, 0, 10, 10), (60, 60, 70, 70))
    detections = [{"boxes": found, "labels": labels(1, 1, 1), "scores": scores}]
    expected = (51 * 1 + 50 * 2 / 3) / 101
    assert average_precision(detections, targets) == pytest.approx(dict.fromkeys(["ap", "ap50", "ap75"], expected))
    half = [{"boxes": boxes((0, 0, 10, 10)), "labels": labels(2)}]  # the IoU is 0.62: found at 0.5, 0.55 and 0.6
    close = [{"boxes": boxes((0, 0, 10, 6.2)), "labels": labels(2), "scores": torch.ones(1)}]
    assert average_precision(close, half) == pytest.approx({"ap": 0.3, "ap50": 1, "ap75": 0})
    wrong = [{**close[0], "labels": labels(1)}]
    assert average_precision(wrong, half) == {"ap": 0, "ap50": 0, "ap75": 0}
    none = [{"boxes": boxes(), "labels": labels(), "scores": torch.zeros(0)}]
    assert average_precision(none, half) == {"ap": 0, "ap50": 0, "ap75": 0}
    crowd = [{key: torch.cat([targets[0][key], half[0][key]]) for key in ("boxes", "labels")}]
    crowd[0] |= {"iscrowd": torch.tensor([0, 0, 1])}
    assert average_precision(detections, crowd)["ap"] == pytest.approx(expected), "a crowd is not to be found"


@needs_pycocotools
def test_evaluation_reads_all_batches() -> None:
    class Oracle(nn.Module):
        """Finds the boxes of every image; those of the first image with the wrong label."""

        def forward(self, images: list[Tensor]) -> list[Any]:
            found = []
            for image in images:
                i = next(i for i in range(4) if torch.equal(Shapes(4)[i][0], image))
                target = Shapes(4, boxes=True)[i][1]
                found.append({**target, "scores": torch.ones(2)})
                if i == 0:
                    found[-1]["labels"] = target["labels"].flip(0)
            return found

    # Of each class: four boxes, four detections, of which three are hits in some order of equal scores.
    _, val = box_loaders(4)
    metrics = Detection(None, val).evaluate(Oracle(), val)
    assert metrics["ap50"] == metrics["ap"] and 0.5 < metrics["ap"] < 0.8
    with pytest.raises(BatchError, match="val: expected at least one image with a box; the loader gave none"):
        Detection().evaluate(Oracle(), [([Shapes(4)[1][0]], [{"boxes": boxes(), "labels": labels()}])])


def test_missing_pycocotools_is_named_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycocotools", None)
    train, val = box_loaders(2)
    recipe = {"budget": "80%", "search": {"method": "taylor", "epochs": "1 step"}, "timing": {"repeats": 3}}
    with pytest.raises(compress.NotReady, match=r'pip install "compress\[detection\]", or leave val out'):
        compress.prune(small_detector("FasterRCNN"), recipe, task=Detection(train, val), quiet=True)
    with pytest.raises(ImportError, match="average precision needs pycocotools"):
        average_precision([], [])
    assert compress.prune(small_detector("FasterRCNN"), recipe, task=Detection(train), quiet=True).plan.keep


IMAGE = torch.zeros(3, 8, 8)
TARGET = {"boxes": boxes((0, 0, 4, 4)), "labels": labels(1)}


def test_batches_in_the_usual_forms_are_read() -> None:
    forms = [
        ([IMAGE, IMAGE], [TARGET, TARGET]),
        ((IMAGE, IMAGE), (TARGET, TARGET)),
        (torch.stack([IMAGE, IMAGE]), [TARGET, TARGET]),
        {"images": [IMAGE, IMAGE], "targets": [TARGET, TARGET]},
        ([IMAGE], [TARGET]),
    ]
    for batch in forms:
        images, targets = Detection().split(batch)
        assert len(images) == len(targets) == Detection().count_targets(batch)
        assert [image.shape for image in Detection().inputs(batch)] == [IMAGE.shape]
    odd = Detection(input="picture", target=lambda batch: batch["meta"])
    assert odd.split({"picture": [IMAGE], "meta": [TARGET]})[1] == [TARGET]
    assert len(Detection().images([IMAGE, IMAGE])) == 2


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([IMAGE, IMAGE], "there are no targets"),
        ({"image": [IMAGE]}, "there are no targets: KeyError: 'label'"),
        ({"picture": [IMAGE]}, "KeyError: 'image'"),
        ([(IMAGE, TARGET), (IMAGE, TARGET)], r"images must be a list of tensors \(3, height, width\)"),
        (([IMAGE], [TARGET, TARGET]), "with a dict of boxes and labels for each image"),
        (([IMAGE], [[{"bbox": [0, 0, 1, 1]}]]), "wrap_dataset_for_transforms_v2"),
        (([IMAGE], [{"boxes": torch.zeros(0), "labels": labels()}]), r"boxes must have shape \(n, 4\), \(0, 4\) if"),
        (([IMAGE], [{"boxes": boxes((0, 0, 1, 1)), "labels": torch.ones(1)}]), "labels must be one class number for"),
    ],
)
def test_other_batches_are_described_with_the_loader_that_fits(batch: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message) as caught:
        Detection().split(batch)
    assert "collate_fn=lambda batch: tuple(zip(*batch))" in str(caught.value)
    assert "compensate with calibration=IMAGES" in str(caught.value)


def test_other_models_are_named() -> None:
    with pytest.raises(BatchError, match=r"expected a detector of torchvision.*Conv2d has no transform and backbone"):
        Detection().forward(nn.Conv2d(3, 3, 1), ([IMAGE], [TARGET]))

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transform, self.backbone = nn.Identity(), nn.Identity()

        def forward(self, images: Any, targets: Any) -> Any:
            return images

    with pytest.raises(BatchError, match=r"expected a dict of losses from Other\(images, targets\) in training mode"):
        Detection().forward(Other(), ([IMAGE], [TARGET]))
