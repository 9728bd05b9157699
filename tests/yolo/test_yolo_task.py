"""The task of a YOLO: its loss, metrics and fine-tuning are Ultralytics' own, on every kind of head."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import compress
from compress.errors import BatchError

pytest.importorskip("ultralytics", reason="the extra yolo is not installed")
from ultralytics.cfg import get_cfg

from compress import yolo

Data = Callable[[str], Path]
Build = Callable[[str], Any]
SMALL = {"imgsz": 64, "batch": 2}
CUT = {"budget": "70%", "search": "magnitude", "timing": {"repeats": 3}}
SHORT = {**CUT, "finetune": {"epochs": "3 steps", "distill": {"temperature": 1, "weight": 1}}}


@pytest.mark.parametrize("task", ["detect", "segment", "pose", "obb", "classify"])
def test_loss_is_that_of_ultralytics(task: str, yolo_data: Data, yolo_model: Build) -> None:
    model = yolo_model(task)
    ours = yolo.task(model, data=yolo_data(task), **SMALL)
    batch = next(iter(ours.train))
    network = model.model.train()
    torch.manual_seed(1)
    value = ours.loss(ours.forward(network, batch), batch)
    theirs = copy.deepcopy(network)
    theirs.args = get_cfg()
    images = batch["img"].float() / (255 if batch["img"].dtype == torch.uint8 else 1)
    expected = theirs.loss({**batch, "img": images})[0].sum() / (1 if task == "classify" else len(images))
    torch.testing.assert_close(value, expected)
    value.backward()
    assert "criterion" not in vars(network) and sum(p.grad is not None for p in network.parameters()) > 50


def test_classes_that_have_no_names_get_those_of_the_data(yolo_data: Data, yolo_model: Build) -> None:
    model = yolo_model("detect")
    assert model.names == {0: "0", 1: "1"}
    assert yolo.task(model, data=yolo_data("detect"), **SMALL).architecture.names == {0: "red", 1: "green"}
    model.model.names = {0: "first", 1: "second"}
    assert yolo.task(model, data=yolo_data("detect"), **SMALL).architecture.names == {0: "first", 1: "second"}
    assert model.names == {0: "first", 1: "second"}


def test_image_size_must_be_a_multiple_of_the_stride(yolo_data: Data, yolo_model: Build) -> None:
    with pytest.raises(ValueError, match=r"imgsz: expected a multiple of 32, the stride .*; got 50\. Give 64"):
        yolo.task(yolo_model("detect"), data=yolo_data("detect"), imgsz=50)


def test_metrics_are_those_of_val(yolo_data: Data, yolo_model: Build) -> None:
    model, data = yolo_model("detect"), yolo_data("detect")
    before = {name: value.clone() for name, value in model.model.state_dict().items()}
    metrics = yolo.task(model, data=data, **SMALL).evaluate(model.model, ())
    expected = model.val(data=str(data), device="cpu", workers=0, plots=False, verbose=False, **SMALL).results_dict
    assert {f"metrics/{name}": value for name, value in metrics.items()} == {
        name: pytest.approx(value) for name, value in expected.items() if name != "fitness"
    }
    assert next(iter(metrics)) == "mAP50-95(B)"
    assert all(torch.equal(value, before[name]) for name, value in model.model.state_dict().items())


@pytest.mark.parametrize("task", ["segment", "classify"])
def test_one_run_leaves_a_directory_that_is_loaded_bit_equal(
    task: str, yolo_data: Data, yolo_model: Build, tmp_path: Path
) -> None:
    model = yolo_model(task)
    before = copy.deepcopy(vars(model.model)["args"])
    out = tmp_path / "out"
    pruned = compress.prune(
        model.model, SHORT, task=yolo.task(model, data=yolo_data(task), **SMALL), workdir=out, quiet=True
    )
    assert pruned.report.pruned.macs <= 0.7 * pruned.report.dense.macs
    steps = [entry["step"] for entry in pruned.report.history if entry["stage"] == "finetune" and "distil" in entry]
    assert steps == [1, 2, 3]
    assert vars(model.model)["args"] == before and not list(out.glob("**/*.pt"))
    reloaded = yolo.load(out)
    assert reloaded.task == task and reloaded.overrides["imgsz"] == 64
    state = pruned.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in reloaded.model.state_dict().items())


def test_stopped_fine_tuning_goes_on_and_ends_with_the_same_bits(
    yolo_data: Data, yolo_model: Build, tmp_path: Path, checkpoint_at_every_step: None
) -> None:
    recipe = {**CUT, "finetune": {"epochs": "3 epochs"}}
    data = yolo_data("detect")

    def run(folder: str, stop_at: int | None, resume: bool = False) -> nn.Module:
        model = yolo_model("detect")
        task = yolo.task(model, data=data, nbs=2, **SMALL)
        if stop_at is not None:
            finetune = task.finetune

            def interrupted(job: Any) -> None:
                record = job.engine.record

                def stop(where: dict[str, Any], values: dict[str, float]) -> None:
                    record(where, values)
                    if where["step"] == stop_at:
                        raise KeyboardInterrupt

                job.engine.record = stop
                finetune(job)

            task.finetune = interrupted  # type: ignore[method-assign]
        return compress.prune(
            model.model, recipe, task=task, workdir=tmp_path / folder, resume=resume, quiet=True
        ).model

    whole = run("whole", None)
    with pytest.raises(KeyboardInterrupt):
        run("stopped", 3)  # in the second epoch of two batches
    assert (tmp_path / "stopped" / "finetune" / "checkpoint.safetensors").exists()
    resumed = run("stopped", None, resume=True)
    state = whole.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in resumed.state_dict().items())


def test_rt_detr_has_a_loss_and_says_that_it_is_not_distilled(yolo_data: Data) -> None:
    torch.manual_seed(0)
    model = yolo.build("rtdetr-resnet50.yaml", classes=2)
    task = yolo.task(model, data=yolo_data("detect"), **SMALL)
    batch = next(iter(task.train))
    assert torch.isfinite(task.loss(task.forward(model.model.train(), batch), batch))
    with pytest.raises(
        compress.NotReady,
        match=r"the queries of RT-DETR have no order.*`extends: yolo_half` and `finetune: .*distill: null",
    ):
        compress.prune(model.model, SHORT, task=task, quiet=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"export": "onnx"}, r"export: a pruned YOLO is exported by Ultralytics: compress\.yolo\.load"),
        ({"finetune": {"ema": 0.9}}, r"finetune\.ema: fine-tuning runs on Ultralytics' trainer, which always averages"),
        ({"finetune": {"clip": 1.0}}, r"finetune\.clip: .* clips gradients to a norm of 10"),
        ({"finetune": {"schedule": "step"}}, r"finetune\.schedule: .*expected cosine or constant"),
        ({"finetune": {"recalibrate": 3}}, r"finetune\.decay_norms, finetune\.recalibrate: .*has none"),
        ({"finetune": {"distill": {"features": ["model.0"]}}}, r"distill\.features: the outputs of the head"),
        ({"finetune": {}, "engine": {"precision": "fp16"}}, r"engine\.precision: fp16 makes Ultralytics download"),
    ],
)
def test_settings_that_the_trainer_lacks_are_refused(
    changes: dict[str, Any], message: str, yolo_data: Data, yolo_model: Build, tmp_path: Path
) -> None:
    model = yolo_model("detect")
    task = yolo.task(model, data=yolo_data("detect"), **SMALL)
    with pytest.raises(compress.NotReady, match=message):
        compress.prune(model.model, {**CUT, **changes}, task=task, workdir=tmp_path / "out", quiet=True)


def test_batches_of_another_loader_are_refused(yolo_data: Data, yolo_model: Build) -> None:
    model = yolo_model("detect")
    task = yolo.task(model, data=yolo_data("detect"), **SMALL)
    with pytest.raises(BatchError, match="expected Ultralytics' batches, a dict with img and cls; got list"):
        task.inputs([torch.zeros(1)])


def test_data_with_other_keypoints_are_refused(yolo_data: Data, yolo_model: Build, tmp_path: Path) -> None:
    text = yolo_data("pose").read_text().replace("[17, 3]", "[5, 3]")
    (tmp_path / "five.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"expected \[17, 3\], that of the network; got \[5, 3\].*keypoints=\[5, 3\]"):
        yolo.task(yolo_model("pose"), data=tmp_path / "five.yaml")


def test_data_with_other_classes_are_refused(yolo_data: Data) -> None:
    with pytest.raises(ValueError, match=r"expected 80 classes, those of the network; got 2.*build it for them"):
        yolo.task(yolo.build("yolov8n.yaml"), data=yolo_data("detect"))
