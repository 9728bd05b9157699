"""The tasks that come with the library, from the dense network to the one that is loaded again."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import compress
from compress.training import GradientComputer
from helpers.shapes import box_loaders, mask_loaders, small_deeplab, small_detector, small_unet, train
from helpers.task_metrics import detection_metrics, engine, segmentation_task, task_metrics
from helpers.two_processes import run_in_two_processes

MISSING = {
    "unet": "segmentation_models_pytorch" * (importlib.util.find_spec("segmentation_models_pytorch") is None),
    "faster_rcnn": "pycocotools" * (importlib.util.find_spec("pycocotools") is None),
    "deeplab": "",
}
TIMING = {"repeats": 3}


def segmentation(**settings: Any) -> compress.Task:
    return compress.Segmentation(*mask_loaders(16, 32), **settings)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], compress.Task], int, str]] = {
    "unet": (small_unet, lambda: segmentation(dice=1.0), 40, "miou"),
    "deeplab": (small_deeplab, segmentation, 40, "miou"),
    "faster_rcnn": (lambda: small_detector("FasterRCNN"), lambda: compress.Detection(*box_loaders(16)), 40, "ap50"),
}


@cache
def _trained(name: str) -> dict[str, torch.Tensor]:
    make, make_task, steps, _ = CASES[name]
    return train(make(), make_task(), steps).state_dict()


def trained(name: str) -> nn.Module:
    if MISSING[name]:
        pytest.skip(f"{MISSING[name]} is not installed")
    model = CASES[name][0]()
    model.load_state_dict(_trained(name))
    return model


@pytest.mark.parametrize("name", CASES)
def test_search_fine_tuning_saving_and_loading(name: str, tmp_path: Path) -> None:
    model, task, metric = trained(name), CASES[name][1](), CASES[name][3]
    recipe = {
        "budget": "60%",
        "search": {"method": "netslim", "epochs": "6 steps"},
        "finetune": {"epochs": "8 steps", "optimizer": "adamw", "lr": 1e-3},
        "timing": TIMING,
    }
    test = box_loaders(4)[1] if name == "faster_rcnn" else mask_loaders(4, 32)[1]
    pruned = compress.prune(model, recipe, task=task, test=test, quiet=True)
    report = pruned.report
    assert report.pruned.macs <= 0.6 * report.dense.macs
    assert report.dense.metrics[metric] > 0.6, "the dense network has learned something"
    assert report.pruned.metrics[metric] > 0.5 * report.dense.metrics[metric]
    assert report.pruned.test.keys() == report.pruned.metrics.keys()
    assert any("distil" in entry for entry in report.history), "the dense network teaches by default"
    assert task.evaluate(pruned.model, test) == pytest.approx(report.pruned.test, rel=1e-5)
    pruned.save(tmp_path)
    again = compress.load(CASES[name][0](), tmp_path).eval()
    assert task.evaluate(again, test) == task.evaluate(pruned.model, test)


@pytest.mark.parametrize("name", ["unet", "faster_rcnn"])
@pytest.mark.parametrize("method", ["rarts", "taylor", "bayesnas", "aps"])
def test_searches_that_need_losses_run(name: str, method: str) -> None:
    task = CASES[name][1]()
    search = {"method": method, "epochs": "2 steps"} | ({} if method == "taylor" else {"lr": 1e-4})
    search |= {"controller": {"draws": 2}} if method == "aps" else {}
    task.val = None
    report = compress.prune(trained(name), {"budget": "70%", "search": search, "timing": TIMING}, task=task, quiet=True)
    assert report.report.pruned.macs <= 0.7 * report.report.dense.macs


@pytest.mark.parametrize("name", ["unet", "faster_rcnn"])
def test_repair_on_the_task_s_images_brings_the_outputs_closer(name: str) -> None:
    recipe = {"budget": "70%", "search": {"method": "magnitude"}, "compensate": "least_squares", "timing": TIMING}
    repair = compress.prune(trained(name), recipe, task=CASES[name][1](), quiet=True).report.repair
    assert repair["error_after"] < 0.8 * repair["error_before"]


def test_a_budget_alone_searches_and_distils_with_the_weight_of_the_task() -> None:
    torch.manual_seed(0)
    data = [(torch.randn(8, 4), torch.randn(8)) for _ in range(2)]
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    task = compress.Regression(data, data)
    recipe = compress.prune(model, {"budget": "60%", "timing": TIMING}, task=task, quiet=True).report.recipe
    assert recipe["search"]["method"] == "netslim"
    assert recipe["search"]["distill"]["weight"] == recipe["finetune"]["distill"]["weight"] == 1


@pytest.mark.skipif(bool(MISSING["faster_rcnn"]), reason="pycocotools is not installed")
def test_two_processes_measure_and_train_like_one(tmp_path: Path) -> None:
    """The oracle is one process on all batches: metrics, and the gradient of a batch twice as large."""
    reports = run_in_two_processes(task_metrics, tmp_path)
    assert reports[0] == reports[1]
    task, layer, batches = segmentation_task()
    expected = engine().evaluate(task, layer, data=batches)
    assert reports[0]["segmentation"] == pytest.approx(expected, rel=1e-6)
    assert reports[0]["detection"] == pytest.approx(detection_metrics(), rel=1e-9)
    whole = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    weights = list(layer.parameters())
    counts = {"task": task.count_targets}
    exact = GradientComputer().gradients(
        lambda part: {"task": task.loss(layer(part[0]), part)}, whole, weights, counts=counts
    )
    flat = torch.cat([gradient.flatten() for gradient in exact.gradients])
    assert torch.tensor(reports[0]["gradient"]).allclose(flat, rtol=1e-5, atol=1e-7)
