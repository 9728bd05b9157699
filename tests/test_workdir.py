"""A working directory belongs to one run; what else lies there, or is damaged, costs nobody a result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from digits import dense, loaders
from test_prune import same_weights
from test_resume import FULL, Stop, Stopping, checkpoint_at_every_step, small, undisturbed

import compress
from compress.checkpoint import Store

__all__ = ["checkpoint_at_every_step", "undisturbed"]


def test_finished_run_is_given_back(tmp_path: Path) -> None:
    train, val = small()
    first = compress.prune(dense(), FULL, train=train, val=val, workdir=tmp_path, quiet=True)
    again = compress.prune(dense(), FULL, workdir=tmp_path, resume=True, quiet=True)  # needs no data: nothing is done
    assert same_weights(first.model, again.model)
    assert again.report == first.report
    assert again.plan.keep == first.plan.keep


def test_directory_that_is_not_empty_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    train, val = small()
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(
        FileExistsError, match=r"expected an empty or missing directory; it holds other files \(thesis.txt\)"
    ):
        compress.prune(dense(), FULL, train=train, val=val, workdir=tmp_path, quiet=True)
    with pytest.raises(FileExistsError, match="nothing to resume; it holds other files"):
        compress.prune(dense(), FULL, train=train, val=val, workdir=tmp_path, resume=True, quiet=True)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]
    file = tmp_path / "thesis.txt"
    with pytest.raises(FileExistsError, match="expected a directory, found a file"):
        compress.prune(dense(), FULL, train=train, val=val, workdir=file, quiet=True)
    run = tmp_path / "run"
    with pytest.raises(Stop):
        compress.prune(dense(), FULL, train=Stopping(train, 3), val=val, workdir=run, quiet=True)
    with pytest.raises(
        FileExistsError, match=r"it holds a run: go on with resume=True \(--resume\), or choose another"
    ):
        compress.prune(dense(), FULL, train=train, val=val, workdir=run, quiet=True)


def test_directory_of_another_run_is_refused_with_the_difference(tmp_path: Path) -> None:
    train, val = small()
    with pytest.raises(Stop):
        compress.prune(dense(), FULL, train=Stopping(train, 3), val=val, workdir=tmp_path, quiet=True)
    other = {**FULL, "budget": {"macs": "40%"}, "seed": 7}
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
        (changed, r"the model: has the same shapes and other numbers, first in stem\.0\.weight$"),
        (
            torch.nn.Sequential(dense()),
            r"had stem\.0\.weight, .*, and has not\n  the model: has 0\.stem\.0\.weight, float32",
        ),
        (dense().double(), r"stem\.0\.weight was float32 \[(.*)\], is float64 \[\1\] \(and \d+ more\)"),
    ):
        for resume in (True, False):
            with pytest.raises(FileExistsError, match=rf"(?s)belongs to another run:\n.*{text}"):
                compress.prune(model, FULL, train=train, val=val, workdir=tmp_path, resume=resume, quiet=True)
    facts = json.loads((tmp_path / "run.json").read_text()) | {"model": "a hash"}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    with pytest.raises(FileExistsError, match="the model has other weights, or is another"):
        compress.prune(dense(), FULL, train=train, val=val, workdir=tmp_path, resume=True, quiet=True)


def test_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    train, val = small()
    for name, recipe in (("a", FULL), ("b", {**FULL, "seed": 7})):
        with pytest.raises(Stop):
            compress.prune(dense(), recipe, train=Stopping(train, 9), val=val, workdir=tmp_path / name, quiet=True)
    Store(tmp_path / "a").path.write_bytes(Store(tmp_path / "b").path.read_bytes())
    with pytest.raises(ValueError, match=r"checkpoint\.safetensors: of another run than run\.json beside it"):
        compress.prune(dense(), FULL, train=train, val=val, workdir=tmp_path / "a", resume=True, quiet=True)


def test_damaged_checkpoint_falls_back_to_the_one_before_and_two_are_refused(
    undisturbed: compress.Pruned,
    tmp_path: Path,
) -> None:
    train, val = small()
    for name in ("one", "both"):
        with pytest.raises(Stop):
            compress.prune(dense(), FULL, train=Stopping(train, 5), val=val, workdir=tmp_path / name, quiet=True)
    paths = Store(tmp_path / "one").path, Store(tmp_path / "both").path, Store(tmp_path / "both").before
    for path in paths:
        path.write_bytes(path.read_bytes()[:1000])
    again = compress.prune(dense(), FULL, train=train, val=val, workdir=tmp_path / "one", resume=True, quiet=True)
    assert same_weights(again.model, undisturbed.model)
    tmp_path /= "both"
    with pytest.raises(ValueError, match=r"not a checkpoint .*; start anew in another workdir"):
        compress.prune(dense(), FULL, train=train, val=val, workdir=tmp_path, resume=True, quiet=True)


def test_checkpoint_is_data(tmp_path: Path) -> None:
    train, val = small()
    with pytest.raises(Stop):
        compress.prune(dense(), FULL, train=Stopping(train, 9), val=val, workdir=tmp_path, quiet=True)
    found = Store(tmp_path).load()
    assert found is not None
    tensors, facts = found
    assert facts["stage"] == "finetune"
    assert json.loads((tmp_path / "run.json").read_text())["recipe"]["budget"] == {"macs": 0.5}
    assert any(name.startswith("optimizer0/") for name in tensors)
    assert any(name.startswith("average/") for name in tensors)


def test_resume_where_nothing_was_begun_begins(undisturbed: compress.Pruned, tmp_path: Path) -> None:
    train, val = small()
    got = compress.prune(dense(), FULL, train=train, val=val, workdir=tmp_path / "new", resume=True, quiet=True)
    assert same_weights(got.model, undisturbed.model)


def test_stray_files_and_half_written_checkpoints_do_not_cost_the_result(tmp_path: Path) -> None:
    train, val = small()
    with pytest.raises(Stop):
        compress.prune(dense(), FULL, train=Stopping(train, 9), val=val, workdir=tmp_path, quiet=True)
    (tmp_path / ".checkpoint.safetensors.abc123").write_bytes(b"half")
    (tmp_path / "train.log").write_text("mine")
    train, val = small()
    pruned = compress.prune(dense(), FULL, train=train, val=val, workdir=tmp_path, resume=True, quiet=True)
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
    train, val = small()
    with pytest.raises(compress.BudgetError):
        impossible = {**FULL, "budget": {"macs": "1%"}}
        compress.prune(dense(), impossible, train=train, val=val, workdir=tmp_path, quiet=True)
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]
    compress.prune(dense(), FULL, train=train, val=val, workdir=tmp_path, quiet=True)


def test_other_data_are_noticed(tmp_path: Path) -> None:
    train, val = small()
    with pytest.raises(Stop):
        compress.prune(dense(), FULL, train=Stopping(train, 9), workdir=tmp_path, quiet=True)
    with pytest.raises(FileExistsError, match=r"belongs to another run:\n  data.val: was None, is 2"):
        compress.prune(dense(), FULL, train=train, val=val, workdir=tmp_path, resume=True, quiet=True)
    with pytest.raises(FileExistsError, match=r"data.train: was 4, is 8"):
        compress.prune(dense(), FULL, train=loaders(32, 256)[0], workdir=tmp_path, resume=True, quiet=True)


@pytest.mark.parametrize("text", ["{", "{}", "[]", "3"])
def test_damaged_directories_are_refused_by_name(text: str, tmp_path: Path) -> None:
    train, val = small()
    with pytest.raises(Stop):
        compress.prune(dense(), FULL, train=Stopping(train, 9), val=val, workdir=tmp_path, quiet=True)
    (tmp_path / "run.json").write_text(text)
    for resume in (True, False):
        with pytest.raises(ValueError, match=r"run\.json: damaged .*; start anew in another workdir"):
            compress.prune(dense(), FULL, train=train, val=val, workdir=tmp_path, resume=resume, quiet=True)


def test_resume_needs_a_workdir() -> None:
    with pytest.raises(compress.NotReady, match="resume: there is no workdir to go on from"):
        compress.prune(dense(), FULL, train=small()[0], resume=True, quiet=True)


def test_iterators_cannot_be_resumed(tmp_path: Path) -> None:
    def stream() -> Iterator[Any]:
        for number, batch in enumerate(list(small()[0]) * 9):
            if number == 9:
                raise Stop
            yield batch

    with pytest.raises(Stop):
        compress.prune(dense(), FULL, train=stream(), workdir=tmp_path, quiet=True)
    with pytest.raises(
        compress.NotReady, match="train: a run on an iterator, which is read only once, cannot be resumed"
    ):
        compress.prune(dense(), FULL, train=stream(), workdir=tmp_path, resume=True, quiet=True)


def test_modules_with_state_of_their_own_and_buffers_that_share_memory_go_through(tmp_path: Path) -> None:
    class Peculiar(torch.nn.Sequential):
        def __init__(self) -> None:
            super().__init__(dense())
            self.register_buffer("table", torch.arange(6.0))
            self.register_buffer("head", self.table[:2])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[0](x) + 0 * self.head.sum()

        def get_extra_state(self) -> Any:
            return {"name": "peculiar"}

        def set_extra_state(self, state: Any) -> None:
            pass

    train, val = small()
    pruned = compress.prune(Peculiar(), FULL, train=train, val=val, workdir=tmp_path, quiet=True)
    again = compress.load(Peculiar(), tmp_path).eval()
    x = torch.randn(2, 1, 8, 8)
    assert torch.equal(again(x), pruned.model.eval()(x))
