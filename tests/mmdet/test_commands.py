"""Detectors on the command line: every recipe in shortened form on a small detector, and mistakes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

import compress
import compress.mmdet
from compress.cli import app as cli
from compress.recipe import Recipe, packaged_recipes
from helpers.detectors import data_of, lighten_, small_config

# isort: split
from mmdet.apis import init_detector
from mmengine.config import Config

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:checkpoint is None"),
]
SWIN = {"embed_dims": 24, "depths": [1, 1, 1, 1], "num_heads": [2, 2, 4, 4], "init_cfg": None}
SMALL: dict[str, dict[str, Any]] = {
    "cascade-mask-rcnn_swin-t-p4-w7_fpn_3x_coco": {
        "model.backbone": SWIN,
        "model.neck.in_channels": [24, 48, 96, 192],
    },
    "mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py": {
        "model.backbone": SWIN,
        "model.neck.in_channels": [24, 48, 96, 192],
    },
    "mmdet::swin/retinanet_swin-t-p4-w7_fpn_1x_coco.py": {
        "model.backbone": SWIN,
        "model.neck.in_channels": [48, 96, 192],
    },
    "mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py": {
        "model.backbone": {"depth": 18, "init_cfg": None},
        "model.neck.in_channels": [64, 128, 256, 512],
    },
    "mmdet::rtmdet/rtmdet_tiny_8xb32-300e_coco.py": {"model.backbone.init_cfg": None},
}
RECIPES = [name for name, path in packaged_recipes().items() if path.parent.name == "mmdet"]


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["compress", *map(str, words)])
    with pytest.raises(SystemExit) as done:
        cli.main()
    streams = capsys.readouterr()
    return int(done.value.code or 0), streams.out, " ".join(streams.err.split())


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_runs_in_shortened_form(name: str, pictures: Path) -> None:
    (config,) = set(re.findall(r"--mmdet (\S+)", packaged_recipes()[name].read_text()))
    cfg = compress.mmdet.read(config, SMALL[config])
    cfg.merge_from_dict({**data_of(pictures, masks="mask" in config), "log_level": "ERROR", "custom_hooks": []})
    cfg.train_dataloader.batch_size = 2
    if "rpn" in cfg.model.test_cfg:
        lighten_(cfg)
    torch.manual_seed(0)
    task = compress.mmdet.task(cfg)
    task.val = None
    length = {"epochs": "2 steps"}
    short = {"extends": name, "search": length, "finetune": length, "timing": {"repeats": 3}}
    report = compress.prune(compress.mmdet.build(cfg), short, task=task, quiet=True).report
    budget = Recipe.load(name).budget
    if budget.unit == "dims":
        assert sum(g.kept for g in report.groups) <= budget.limits[budget.unit] * sum(g.width for g in report.groups)
    else:
        assert getattr(report.pruned, budget.unit) <= budget.limits[budget.unit] * getattr(report.dense, budget.unit)
    parts = {row.name.split(".")[0] for row in report.groups}
    assert parts <= set(Recipe.load(name).target.include)
    assert [h["step"] for h in report.history if h["stage"] == "finetune"] == [1, 2]


def test_one_command_leaves_a_directory_that_mmdet_loads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pictures: Path, tmp_path: Path
) -> None:
    cfg = small_config(pictures)
    cfg.dump(tmp_path / "dense.py")
    torch.manual_seed(0)
    with redirect_stdout(sys.stderr):  # loggers of mmengine stay where they begin, here as in a program of its own
        detector = compress.mmdet.build(cfg)
    torch.save({"state_dict": detector.state_dict(), "meta": {}}, tmp_path / "dense.pth")
    (tmp_path / "mine.yaml").write_text(
        "target: {mlp: true, channels: false}\nbudget: {dims: 50%}\nsearch: {method: netslim, epochs: 1 step}\n"
        "finetune: {epochs: 1 step}\ntiming: {repeats: 3}\n"
    )
    words = ["prune", "--mmdet", tmp_path / "dense.py", "--checkpoint", tmp_path / "dense.pth", "--quiet", "--json"]
    words += ["--recipe", tmp_path / "mine.yaml", "--workdir", tmp_path / "out"]
    code, out, error = run(
        monkeypatch, capsys, *words, "--cfg-options", "train_dataloader.batch_size=3", "val_dataloader.batch_size=2"
    )
    assert code == 0, error
    report = json.loads(out)
    assert report["dense"]["params"] == sum(p.numel() for p in detector.parameters())
    saved = Config.fromfile(tmp_path / "out" / "config.py")
    assert (saved.train_dataloader.batch_size, saved.val_dataloader.batch_size) == (3, 2)
    compact = init_detector(str(tmp_path / "out" / "config.py"), device="cpu")
    assert sum(p.numel() for p in compact.parameters()) == report["pruned"]["params"]


def test_closing_line_loads_the_detector_as_it_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pictures: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(
        "target: {mlp: true, channels: false}\nbudget: {dims: 50%}\nsearch: {method: magnitude}\ntiming: {repeats: 3}\n"
    )
    words = ["--mmdet", _write(tmp_path, small_config(pictures)), "--recipe", tmp_path / "mine.yaml", "--quiet"]
    code, out, error = run(monkeypatch, capsys, "prune", *words, "--workdir", tmp_path / "out")
    assert code == 0, error
    statement = next(line for line in out.splitlines() if line.startswith("reload with ")).removeprefix("reload with ")
    counting = f"{statement}; print(sum(p.numel() for p in detector.parameters()))"
    environment = {**os.environ, "PYTHONPATH": str(Path(compress.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", counting], capture_output=True, text=True, check=True, env=environment, cwd=tmp_path
    )
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert int(done.stdout.split()[-1]) == report["pruned"]["params"]


def test_preview_of_a_detector_reads_no_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pictures: Path, tmp_path: Path
) -> None:
    cfg = small_config(pictures)
    cfg.merge_from_dict({f"{part}_dataloader.dataset.data_root": "nowhere/" for part in ("train", "val")})
    words = ["preview", "--mmdet", _write(tmp_path, cfg), "--recipe", "swin_t_cascade_40", "--input", "3,64,64"]
    code, out, error = run(monkeypatch, capsys, *words, "--json")
    assert code == 0, error
    preview = json.loads(out)
    assert preview["reachable"]
    assert {row["name"].split(".")[0] for row in preview["groups"]} == {"backbone"}
    assert sum(r["kept"] for r in preview["groups"]) <= 0.6 * sum(r["width"] for r in preview["groups"])
    assert preview["dense"]["params"] == sum(p.numel() for p in compress.mmdet.build(cfg).parameters())
    for options, message in (
        (["--weights", "x.pt"], "--weights: not for --mmdet, which takes --checkpoint"),
        (["--model", "timm:resnet18"], "--model, --mmdet or --yolo: expected one of the three"),
    ):
        code, _, error = run(monkeypatch, capsys, *words, *options)
        assert code == 2 and message in error
    code, _, error = run(
        monkeypatch, capsys, "preview", "--model", "timm:resnet18", "--budget", "50%", *("--checkpoint", "x")
    )
    assert code == 2 and "--checkpoint: only for --mmdet" in error


def _write(folder: Path, cfg: Config) -> Path:
    cfg.dump(folder / "config.py")
    return folder / "config.py"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mmdet", "cascade-mask-rcnn_swin-t"], r"expected the path of an mmdet config.*Did you mean cascade-mask"),
        (["--mmdet", "x.py", "--model", "timm:resnet18"], r"--model, --mmdet or --yolo: expected one of the three"),
        ([], r"--model, --mmdet or --yolo: expected one of the three"),
        (["--mmdet", "x.py", "--data", "digits"], r"--data: not for --mmdet, whose config contains it"),
        (["--mmdet", "x.py", "--task", "my:task"], r"--task: not for --mmdet, whose config contains it"),
        (["--model", "timm:resnet18", "--checkpoint", "x"], r"--checkpoint: only for --mmdet"),
        (["--mmdet", "CONFIG", "--checkpoint", "nowhere.pth"], r"checkpoint nowhere.pth: no such file"),
        (["--mmdet", "CONFIG", "--cfg-options", "train_dataloader.dataset.data_root=away/"], r"cannot be read: .*away"),
        (["--mmdet", "CONFIG", "--cfg-options", "model={}"], r"expected the config of a detector, with model.backbone"),
    ],
)
def test_mistakes_of_the_mmdet_command_are_named(
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    pictures: Path,
    tmp_path: Path,
) -> None:
    path = _write(tmp_path, small_config(pictures))
    given = [str(path) if word == "CONFIG" else word for word in words]
    recipe = ["--recipe", "swin_t_cascade_40", "--workdir", tmp_path / "out"]
    code, _, error = run(monkeypatch, capsys, "prune", *recipe, *given)
    assert code == 2
    assert re.search(message, error), error


@pytest.mark.parametrize(
    ("finetune", "message"),
    [
        ({"ema": 0.9}, r"finetune.ema: fine-tuning runs on mmengine's Runner; add an EMAHook"),
        pytest.param(
            {"engine": {"precision": "bf16"}},
            r"engine.precision: fine-tuning runs on mmengine's Runner, whose AMP needs a GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        ({"recalibrate": 2}, r"finetune.recalibrate: fine-tuning runs on mmengine's Runner, which has none"),
        ({"mixup": 0.5}, r"finetune.mixup: .*Detection has no method `soften`"),
        ({"distill": {"feature_weight": 2}}, r"feature_weight: only feature maps are distilled; set weight"),
        ({"distill": {"features": ["nek"]}}, r"the model has no module 'nek'; the nearest are neck"),
    ],
)
def test_what_the_runner_does_not_support_is_refused_before_the_start(
    finetune: dict[str, Any], message: str, pictures: Path
) -> None:
    cfg = small_config(pictures)
    engine = finetune.pop("engine", {})
    recipe = {"budget": {"dims": "50%"}, "finetune": {"epochs": 1, **finetune}, "engine": engine}
    with pytest.raises(compress.NotReady, match=message):
        compress.prune(compress.mmdet.build(cfg), recipe, task=compress.mmdet.task(cfg), quiet=True)


def test_batches_and_configs_of_another_kind_are_refused(pictures: Path) -> None:
    cfg = small_config(pictures)
    task = compress.mmdet.task(cfg)
    with pytest.raises(compress.BatchError, match="expected mmdet's batches, a dict with inputs and data_samples"):
        task.inputs((torch.zeros(1), 2))
    cfg.pop("optim_wrapper")
    recipe = {"budget": {"dims": "50%"}, "finetune": {"epochs": 1}}
    with pytest.raises(compress.NotReady, match=r"config.optim_wrapper: fine-tuning takes the optimizer from"):
        compress.prune(compress.mmdet.build(cfg), recipe, task=compress.mmdet.task(cfg), quiet=True)
