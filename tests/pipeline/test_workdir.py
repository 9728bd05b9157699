"""A working directory belongs to one run; other or damaged files in it never cost a result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import compress
from helpers.digits import dense, loaders
from helpers.interruption import SHORT_RECIPE, Interrupted, InterruptedLoader, small_loaders
from helpers.weights import same_weights

pytestmark = pytest.mark.usefixtures("checkpoint_at_every_step")


def test_finished_run_is_returned(tmp_path: Path) -> None:
    train, val = small_loaders()
    first = compress.prune(dense(), SHORT_RECIPE, train=train, val=val, workdir=tmp_path, quiet=True)
    again = compress.prune(
        dense(), SHORT_RECIPE, workdir=tmp_path, resume=True, quiet=True
    )  # needs no data: nothing is done
    assert same_weights(first.model, again.model)
    assert again.report == first.report
    assert again.plan.keep == first.plan.keep


def test_directory_that_is_not_empty_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    train, val = small_loaders()
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(
        FileExistsError, match=r"expected an empty or missing directory; it holds other files \(thesis.txt\)"
    ):
        compress.prune(dense(), SHORT_RECIPE, train=train, val=val, workdir=tmp_path, quiet=True)
    with pytest.raises(FileExistsError, match="nothing to resume; it holds other files"):
        compress.prune(dense(), SHORT_RECIPE, train=train, val=val, workdir=tmp_path, resume=True, quiet=True)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]
    file = tmp_path / "thesis.txt"
    with pytest.raises(FileExistsError, match="expected a directory"):
        compress.prune(dense(), SHORT_RECIPE, train=train, val=val, workdir=file, quiet=True)
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        compress.prune(dense(), SHORT_RECIPE, train=InterruptedLoader(train, 3), val=val, workdir=run, quiet=True)
    with pytest.raises(
        FileExistsError, match=r"it holds a run: continue it with resume=True \(--resume\), or choose another"
    ):
        compress.prune(dense(), SHORT_RECIPE, train=train, val=val, workdir=run, quiet=True)


@pytest.mark.parametrize("name", ["run.json", "plan.json", "model.safetensors", "checkpoint.safetensors"])
def test_unfinished_writes_of_a_killed_run_are_removed(name: str, tmp_path: Path) -> None:
    train, val = small_loaders()
    (tmp_path / f".{name}.a1b2_c3d").write_text("half of a fi")
    (tmp_path / ".lock").write_text("process 0 on nowhere")
    compress.prune(dense(), SHORT_RECIPE, train=train, val=val, workdir=tmp_path, resume=True, quiet=True)
    finished = ["model.safetensors", "plan.json", "report.html", "report.json", "run.json"]
    assert sorted(p.name for p in tmp_path.iterdir()) == finished
    (tmp_path / f".{name}.a1b2_c3d").write_text("half of a fi")
    (tmp_path / "checkpoint.safetensors").write_text("left when all but this was done")
    compress.prune(dense(), SHORT_RECIPE, workdir=tmp_path, resume=True, quiet=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == finished


def test_files_that_only_resemble_unfinished_writes_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".thesis.txt.a1b2_c3d").write_text("precious")
    with pytest.raises(FileExistsError, match=r"it holds other files \(.thesis.txt.a1b2_c3d\)"):
        compress.prune(dense(), SHORT_RECIPE, train=small_loaders()[0], workdir=tmp_path, resume=True, quiet=True)
    assert (tmp_path / ".thesis.txt.a1b2_c3d").read_text() == "precious"


def test_directory_of_another_run_is_refused_with_the_difference(tmp_path: Path) -> None:
    train, val = small_loaders()
    with pytest.raises(Interrupted):
        compress.prune(dense(), SHORT_RECIPE, train=InterruptedLoader(train, 3), val=val, workdir=tmp_path, quiet=True)
    other = {**SHORT_RECIPE, "budget": {"macs": "40%"}, "seed": 7}
    match = (
        r"(?s)choose another workdir; this one belongs to another run:.*"
        r"budget.macs: was 0.5, is 0.4.*seed: was 0, is 7"
    )
    for resume in (True, False):
        with pytest.raises(FileExistsError, match=match):
            compress.prune(dense(), other, train=train, val=val, workdir=tmp_path, resume=resume, quiet=True)
    changed = dense()
    with torch.no_grad():
        changed.stem[0].weight[0, 0, 0, 0] += 1
    for model, text in (
        (changed, r"the model: has the same shapes but other values, first in stem\.0\.weight$"),
        (
            torch.nn.Sequential(dense()),
            r"no longer has stem\.0\.weight, .*\n  the model: now has 0\.stem\.0\.weight, float32",
        ),
        (dense().double(), r"stem\.0\.weight was float32 \[(.*)\], is float64 \[\1\] \(and \d+ more\)"),
    ):
        for resume in (True, False):
            with pytest.raises(FileExistsError, match=rf"(?s)belongs to another run:\n.*{text}"):
                compress.prune(model, SHORT_RECIPE, train=train, val=val, workdir=tmp_path, resume=resume, quiet=True)
    facts = json.loads((tmp_path / "run.json").read_text()) | {"model": "a hash"}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    with pytest.raises(FileExistsError, match="the model has other weights, or is another"):
        compress.prune(dense(), SHORT_RECIPE, train=train, val=val, workdir=tmp_path, resume=True, quiet=True)


def test_run_does_not_go_on_with_other_settings_of_its_task(tmp_path: Path) -> None:
    class Weighted(compress.Classification):
        def __init__(self, weight: float, train: Any, val: Any) -> None:
            super().__init__(train, val)
            self.weight = weight

        def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
            return self.weight * super().loss(outputs, batch)

        def describe(self) -> dict[str, Any]:
            return {"weight": self.weight}

    train, val = small_loaders()
    with pytest.raises(Interrupted):
        task = Weighted(2.0, InterruptedLoader(train, 3), val)
        compress.prune(dense(), SHORT_RECIPE, task=task, workdir=tmp_path, quiet=True)
    with pytest.raises(FileExistsError, match=r"belongs to another run:\n  task.weight: was 2.0, is 3.0"):
        compress.prune(dense(), SHORT_RECIPE, task=Weighted(3.0, train, val), workdir=tmp_path, resume=True, quiet=True)
    with pytest.raises(FileExistsError, match="was 'Weighted', is 'Classification'"):
        compress.prune(dense(), SHORT_RECIPE, train=train, val=val, workdir=tmp_path, resume=True, quiet=True)
    compress.prune(dense(), SHORT_RECIPE, task=Weighted(2.0, train, val), workdir=tmp_path, resume=True, quiet=True)


def test_resume_in_an_empty_directory_starts_a_run(undisturbed: compress.Pruned, tmp_path: Path) -> None:
    train, val = small_loaders()
    got = compress.prune(dense(), SHORT_RECIPE, train=train, val=val, workdir=tmp_path / "new", resume=True, quiet=True)
    assert same_weights(got.model, undisturbed.model)


def test_stray_files_and_half_written_checkpoints_do_not_cost_the_result(tmp_path: Path) -> None:
    train, val = small_loaders()
    with pytest.raises(Interrupted):
        compress.prune(dense(), SHORT_RECIPE, train=InterruptedLoader(train, 9), val=val, workdir=tmp_path, quiet=True)
    (tmp_path / ".checkpoint.safetensors.abc12345").write_bytes(b"half")
    (tmp_path / "train.log").write_text("mine")
    train, val = small_loaders()
    pruned = compress.prune(dense(), SHORT_RECIPE, train=train, val=val, workdir=tmp_path, resume=True, quiet=True)
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"plan.json", "model.safetensors", "report.json", "report.html", "run.json", "train.log"}
    assert same_weights(compress.load(dense(), tmp_path), pruned.model)


def test_links_and_the_current_directory_serve_as_workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    recipe = {"budget": {"macs": 0.5}, "timing": {"repeats": 3}}
    x = torch.randn(1, 1, 8, 8)
    pruned = compress.prune(dense(), recipe, example_inputs=x, workdir=tmp_path / "link", quiet=True)
    assert (tmp_path / "real" / "plan.json").exists()
    pruned.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "run.json").exists(), "a working directory stays one"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    compress.prune(dense(), recipe, example_inputs=x, workdir=".", quiet=True)
    assert (tmp_path / "here" / "report.json").exists()


def test_run_that_stopped_before_it_had_anything_can_be_started_again_with_another_recipe(tmp_path: Path) -> None:
    train, val = small_loaders()
    with pytest.raises(compress.BudgetError):
        impossible = {**SHORT_RECIPE, "budget": {"macs": "1%"}}
        compress.prune(dense(), impossible, train=train, val=val, workdir=tmp_path, quiet=True)
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]
    compress.prune(dense(), SHORT_RECIPE, train=train, val=val, workdir=tmp_path, quiet=True)


def test_other_data_are_noticed(tmp_path: Path) -> None:
    train, val = small_loaders()
    with pytest.raises(Interrupted):
        compress.prune(dense(), SHORT_RECIPE, train=InterruptedLoader(train, 9), workdir=tmp_path, quiet=True)
    with pytest.raises(FileExistsError, match=r"belongs to another run:\n  data.val: was None, is 2"):
        compress.prune(dense(), SHORT_RECIPE, train=train, val=val, workdir=tmp_path, resume=True, quiet=True)
    with pytest.raises(FileExistsError, match=r"data.train: was 4, is 8"):
        compress.prune(dense(), SHORT_RECIPE, train=loaders(32, 256)[0], workdir=tmp_path, resume=True, quiet=True)


@pytest.mark.parametrize("text", ["{", "{}", "[]", "3"])
def test_damaged_directories_are_refused_by_name(text: str, tmp_path: Path) -> None:
    train, val = small_loaders()
    with pytest.raises(Interrupted):
        compress.prune(dense(), SHORT_RECIPE, train=InterruptedLoader(train, 9), val=val, workdir=tmp_path, quiet=True)
    (tmp_path / "run.json").write_text(text)
    for resume in (True, False):
        with pytest.raises(ValueError, match=r"run\.json: damaged .*; start again in another workdir"):
            compress.prune(dense(), SHORT_RECIPE, train=train, val=val, workdir=tmp_path, resume=resume, quiet=True)


def test_resume_needs_a_workdir() -> None:
    with pytest.raises(compress.NotReady, match="resume: there is no workdir to continue from"):
        compress.prune(dense(), SHORT_RECIPE, train=small_loaders()[0], resume=True, quiet=True)


def test_iterators_cannot_be_resumed(tmp_path: Path) -> None:
    def stream() -> Iterator[Any]:
        for number, batch in enumerate(list(small_loaders()[0]) * 9):
            if number == 9:
                raise Interrupted
            yield batch

    with pytest.raises(Interrupted):
        compress.prune(dense(), SHORT_RECIPE, train=stream(), workdir=tmp_path, quiet=True)
    with pytest.raises(
        compress.NotReady, match="train: a run on an iterator, which is read only once, cannot be resumed"
    ):
        compress.prune(dense(), SHORT_RECIPE, train=stream(), workdir=tmp_path, resume=True, quiet=True)
