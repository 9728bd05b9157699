"""A small Swin Cascade Mask R-CNN, from its config through search, cut and fine-tuning, back into mmdet's own tools."""

from __future__ import annotations

import copy
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import compress
import compress.mmdet
from compress.storage.checkpoint import state_tensors
from compress.training.interruption import Terminated
from helpers.detectors import make_pictures, small_config
from helpers.weights import same_weights

# isort: split
from mmdet.apis import inference_detector, init_detector
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # pycocotools and numpy 2
    pytest.mark.filterwarnings("ignore:checkpoint is None"),
]
AP = "coco/bbox_mAP"
RECIPE: dict[str, Any] = {
    "target": {"channels": False, "attention": True, "mlp": True},
    "budget": {"dims": "30%"},
    "search": {"method": "rarts", "epochs": "4 steps", "optimizer": "adamw", "lr": 1e-3, "gamma": 1e-4, "distill": {}},
    "finetune": {"epochs": "15 steps", "lr": 2e-3, "distill": {"temperature": 1, "weight": 1}},
    "timing": {"repeats": 3},
}


@dataclass
class Case:
    folder: Path
    cfg: Config
    detector: Any
    task: compress.mmdet.Detection


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = make_pictures(tmp_path_factory.mktemp("pictures"))
    cfg = small_config(folder)
    torch.manual_seed(0)
    detector, task = compress.mmdet.build(cfg), compress.mmdet.task(cfg)
    optimizer = torch.optim.AdamW(detector.parameters(), 2e-3, weight_decay=0.05)
    detector.train()
    for _ in range(12):
        for batch in task.train or ():
            optimizer.zero_grad()
            task.loss(task.forward(detector, batch), batch).backward()
            optimizer.step()
    detector.eval()
    return Case(folder, cfg, detector, task)


@pytest.fixture(scope="module")
def pruned(case: Case, tmp_path_factory: pytest.TempPathFactory) -> tuple[compress.Pruned, Path]:
    before = {name: t.clone() for name, t in state_tensors(case.detector).items()}
    workdir = tmp_path_factory.mktemp("run") / "out"
    done = compress.prune(case.detector, RECIPE, task=case.task, workdir=workdir, quiet=True)
    assert all(torch.equal(t, before[name]) for name, t in state_tensors(case.detector).items())
    return done, workdir


def _boxes(model: Any, path: Path) -> torch.Tensor:
    found = inference_detector(model, str(path)).pred_instances
    return torch.cat([found.bboxes, found.scores[:, None], found.labels[:, None]], 1)


def test_pruning_from_end_to_end(pruned: Any) -> None:
    report = pruned[0].report
    assert all(row.name.startswith("backbone.") for row in report.groups)
    assert sum(row.kept for row in report.groups) <= 0.3 * sum(row.width for row in report.groups)
    tuned = [h for h in report.history if h["stage"] == "finetune" and "loss" in h]
    assert len(tuned) == 15
    assert sum(h["loss"] for h in tuned[-4:]) < sum(h["loss"] for h in tuned[:4])
    assert all(h["loss_distil"] > 0 for h in tuned)
    assert report.pruned.metrics[AP] > report.sliced[AP]
    checks = [h[f"val_{AP}"] for h in report.history if f"val_{AP}" in h]
    assert report.pruned.metrics[AP] == max(checks)  # the best on validation are kept
    at = [h["step"] for h in report.history if h.get(f"val_{AP}") == max(checks)]
    assert report.kept == {"step": at[-1], "of": 15}


def test_mmdets_own_tools_load_it_by_an_entry_of_the_config(case: Case, pruned: Any, tmp_path: Path) -> None:
    done, workdir = pruned
    moved = shutil.copytree(workdir, tmp_path / "elsewhere")
    mine = copy.deepcopy(done.model)
    mine.cfg = case.cfg
    detector = init_detector(str(moved / "config.py"), device="cpu")
    for number in range(3):
        expected = _boxes(mine, case.folder / f"{number}.png")
        assert len(expected)
        assert torch.equal(_boxes(detector, case.folder / f"{number}.png"), expected)
    cfg = Config.fromfile(moved / "config.py")
    cfg.work_dir = str(tmp_path / "work")
    found = Runner.from_cfg(cfg).test()
    assert {k: v for k, v in found.items() if k.startswith("coco")} == done.report.pruned.metrics
    assert not [path for path in moved.iterdir() if path.suffix in (".pth", ".pt", ".pkl")]


def test_the_entry_can_be_written_by_hand_and_trained_on(case: Case, pruned: Any, tmp_path: Path) -> None:
    done, workdir = pruned
    case.cfg.dump(tmp_path / "dense.py")
    (tmp_path / "mine.py").write_text(
        f'''_base_ = "dense.py"
custom_imports = dict(imports=["compress.mmdet"])
model = dict(type="PrunedDetector", dense="CascadeRCNN", directory="{workdir}")
work_dir = "{tmp_path / "work"}"
train_cfg = dict(max_epochs=1)
'''
    )
    runner = Runner.from_cfg(Config.fromfile(tmp_path / "mine.py"))
    expected = state_tensors(done.model)
    assert all(torch.equal(t, expected[name]) for name, t in state_tensors(runner.model).items())
    start: dict[str, torch.Tensor] = {}

    class Look(Hook):  # type: ignore[misc]
        def before_train(self, runner: Any) -> None:
            start.update({name: t.clone() for name, t in state_tensors(runner.model).items()})

    runner.register_hook(Look())
    runner.train()
    assert all(torch.equal(t, expected[name]) for name, t in start.items())  # not initialised anew
    after = state_tensors(runner.model)
    assert any(not torch.equal(after[name], t) for name, t in start.items())
    assert {n: t.shape for n, t in after.items()} == {n: t.shape for n, t in expected.items()}


@pytest.mark.parametrize(("length", "stop_at"), [(4, (7, 9)), ("12 steps", (1, 11))])
def test_a_fine_tuning_that_was_stopped_ends_with_the_same_weights_and_history(
    case: Case, length: Any, stop_at: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three batches an epoch, in random order, with random boxes: stops within an epoch, at its end, and at the end."""
    cfg = compress.mmdet.read(case.cfg)
    stops: list[int] = []

    @HOOKS.register_module(name="StopOnce")  # type: ignore[untyped-decorator]
    class StopOnce(Hook):  # type: ignore[misc]
        def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
            if runner.iter in stops:
                stops.clear()
                if runner.iter == 7:  # the iteration ends, and is saved
                    signal.raise_signal(signal.SIGTERM)
                else:
                    raise KeyboardInterrupt

    monkeypatch.setattr("compress.training.engine.Engine.checkpoint_is_due", lambda self: True)
    recipe = {**RECIPE, "search": {"method": "magnitude"}, "finetune": {"epochs": length, "distill": {}}}
    try:
        cfg.custom_hooks = [{"type": "StopOnce"}]
        settings: dict[str, Any] = {"quiet": True}
        whole = compress.prune(case.detector, recipe, task=compress.mmdet.task(cfg), **settings)
        for stop in stop_at:
            settings["workdir"] = tmp_path / str(stop)
            stops.append(stop)
            with pytest.raises(Terminated if stop == 7 else KeyboardInterrupt):
                compress.prune(case.detector, recipe, task=compress.mmdet.task(cfg), **settings)
            again = compress.prune(case.detector, recipe, task=compress.mmdet.task(cfg), resume=True, **settings)
            assert same_weights(again.model, whole.model), stop
            assert again.report.history == whole.report.history
            assert again.report.pruned.metrics == whole.report.pruned.metrics
    finally:
        HOOKS._module_dict.pop("StopOnce")
    steps = [h["step"] for h in whole.report.history if h["stage"] == "finetune" and "loss" in h]
    assert steps == list(range(1, 13))


def test_an_epoch_that_was_left_early_leaves_nothing_to_the_next(case: Case) -> None:
    loader: Any = compress.mmdet.task(case.cfg).train
    next(iter(loader))
    seen = [sample.metainfo["img_id"] for batch in loader for sample in batch["data_samples"]]
    assert sorted(seen) == list(range(12))


def test_halves_share_no_image_and_keep_the_configs_settings(case: Case) -> None:
    from compress.data.split_halves import split_into_halves

    seen: list[set[int]] = [set(), set()]
    for pair in split_into_halves(case.task.train, 0):  # type: ignore[arg-type]
        for part, batch in zip(seen, pair, strict=True):
            part |= {sample.metainfo["img_id"] for sample in batch["data_samples"]}
    assert not seen[0] & seen[1]
    assert seen[0] | seen[1] == set(range(12))


def test_the_loss_is_the_sum_of_the_detectors_losses(case: Case) -> None:
    batch = next(iter(case.task.train))  # type: ignore[arg-type]
    torch.manual_seed(0)  # proposals are sampled
    mine = case.task.loss(case.task.forward(case.detector, batch), batch)
    data = case.detector.data_preprocessor(copy.deepcopy(batch), True)
    torch.manual_seed(0)
    losses = case.detector.loss(**{"batch_inputs": data["inputs"], "batch_data_samples": data["data_samples"]})
    lists = [v if isinstance(v, list) else [v] for k, v in losses.items() if "loss" in k]
    total = torch.stack([t.mean() for some in lists for t in some]).sum()
    torch.testing.assert_close(mine, total)


@pytest.mark.parametrize(
    ("include", "kinds"),
    [
        (["neck"], {"neck"}),
        (["backbone", "neck", "rpn_head", "roi_head"], {*["backbone", "neck", "rpn_head", "roi_head"]}),
    ],
)
def test_other_parts_can_be_named(case: Case, include: list[str], kinds: set[str]) -> None:
    recipe = {"target": {"include": include, "residual": True}, "budget": {"dims": "50%"}}
    recipe |= {"search": {"method": "magnitude"}, "timing": {"repeats": 3}}
    task = compress.mmdet.task(case.cfg)
    task.val = None
    done = compress.prune(case.detector, recipe, task=task, quiet=True)
    assert {row.name.split(".")[0] for row in done.report.groups} == kinds
    zeroed = done.plan.zero_(copy.deepcopy(case.detector))
    with torch.no_grad():
        x = torch.randn(1, 3, 70, 90)
        mine, full = (m.rpn_head(m.extract_feat(x)) for m in (done.model, zeroed))
    for a, b in zip((t for level in mine for t in level), (t for level in full for t in level), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_a_preprocessor_that_draws_does_so_once_for_student_and_teacher(case: Case) -> None:
    grow = {"type": "BatchSyncRandomResize", "random_size_range": (64, 160), "interval": 1, "size_divisor": 32}
    cfg = compress.mmdet.read(case.cfg, {"model.data_preprocessor.batch_augments": [grow]})
    task = compress.mmdet.task(cfg)
    batch = next(iter(task.train))  # type: ignore[arg-type]
    student, teacher = task.forward(case.detector, batch), task.teach(case.detector, batch)
    assert [t.shape for t in student.maps] == [t.shape for t in teacher]
    assert float(task.distil(student, teacher, 1.0)) == pytest.approx(0.0, abs=1e-5)


def test_compact_modules_are_plain(pruned: Any) -> None:
    model: nn.Module = pruned[0].model
    assert "loss" not in vars(model)
    assert not any("parametrizations" in name for name, _ in model.named_modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
