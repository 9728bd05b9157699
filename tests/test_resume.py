"""A run that was stopped goes on to the same result; a working directory belongs to one run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from digits import FINETUNE, RECIPE, dense, loaders
from test_prune import same_weights
from torch.utils.data import DataLoader

import compress
from compress import engine as engine_module
from compress.checkpoint import Store, own_randomness, random_state
from compress.data import digits

FULL: dict[str, Any] = {
    **RECIPE,
    "search": {**RECIPE["search"], "epochs": "6 steps"},
    "finetune": {**FINETUNE, "epochs": "8 steps", "ema": 0.9, "mixup": 0.2},
}


class Stop(KeyboardInterrupt):
    """Ctrl-C at a moment of our choosing."""


class Stopping:
    """A loader that is interrupted when the n-th batch is asked for, counted over all epochs and stages."""

    def __init__(self, loader: DataLoader[Any], after: int) -> None:
        self.loader, self.left = loader, after

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            if self.left == 0:
                raise Stop
            self.left -= 1
            yield batch


@pytest.fixture(autouse=True)
def checkpoint_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a stop can fall right behind any step."""
    monkeypatch.setattr(engine_module, "SAVE_EVERY", -1.0)
    original = engine_module.Engine.save

    def save(self: Any, *args: Any) -> None:
        original(self, *args)
        self._cost = 0.0

    monkeypatch.setattr(engine_module.Engine, "save", save)


def small() -> tuple[DataLoader[Any], DataLoader[Any]]:
    return loaders(batch=64, count=256)


@pytest.fixture(scope="module")
def undisturbed() -> compress.Pruned:
    train, val = small()
    return compress.prune(dense(), FULL, train=train, val=val, quiet=True)


@pytest.mark.parametrize("after", [0, 1, 2, 4, 6, 7, 8, 10, 13, 14])
def test_stopped_run_goes_on_to_the_same_bits(after: int, undisturbed: compress.Pruned, tmp_path: Path) -> None:
    """One batch is read before the start; then 6 steps of search, 8 of fine-tuning."""
    train, val = small()
    with pytest.raises(Stop):
        compress.prune(dense(), FULL, train=Stopping(train, after), val=val, workdir=tmp_path, quiet=True)
    assert not (tmp_path / "plan.json").exists()
    train, val = small()
    again = compress.prune(dense(), FULL, train=train, val=val, workdir=tmp_path, resume=True, quiet=True)
    assert again.plan.keep == undisturbed.plan.keep
    assert same_weights(again.model, undisturbed.model)
    assert again.report.pruned.metrics == undisturbed.report.pruned.metrics
    strip = [{k: v for k, v in record.items() if k != "lr"} for record in again.report.history]
    assert strip == undisturbed.report.history


def test_stop_of_a_stop_goes_on_too(undisturbed: compress.Pruned, tmp_path: Path) -> None:
    for after in (3, 4, 5):  # each attempt gets a little further
        train, val = small()
        with pytest.raises(Stop):
            loader = Stopping(train, after)
            compress.prune(dense(), FULL, train=loader, val=val, workdir=tmp_path, resume=True, quiet=True)
    train, val = small()
    again = compress.prune(dense(), FULL, train=train, val=val, workdir=tmp_path, resume=True, quiet=True)
    assert same_weights(again.model, undisturbed.model)


def test_rounds_and_loaders_with_a_generator_go_on_too(tmp_path: Path) -> None:
    def data() -> DataLoader[Any]:
        some = torch.utils.data.Subset(digits()[0], range(256))
        return DataLoader(some, 64, shuffle=True, generator=torch.Generator().manual_seed(5))

    recipe = {**FULL, "steps": 2, "search": {**FULL["search"], "epochs": "12 steps"}}
    whole = compress.prune(dense(), recipe, train=data(), quiet=True)
    for after in (3, 9, 11, 15):
        folder = tmp_path / str(after)
        with pytest.raises(Stop):
            compress.prune(dense(), recipe, train=_with_generator(data(), after), workdir=folder, quiet=True)
        again = compress.prune(dense(), recipe, train=data(), workdir=folder, resume=True, quiet=True)
        assert again.plan.keep == whole.plan.keep, after
        assert same_weights(again.model, whole.model), after


def _with_generator(loader: DataLoader[Any], after: int) -> Stopping:
    stopping = Stopping(loader, after)
    stopping.generator = loader.generator  # type: ignore[attr-defined]
    return stopping


def test_interruption_says_in_which_stage_and_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for after, stage in ((0, ""), (3, "search"), (9, "finetune")):
        train, val = small()
        folder = tmp_path / str(after)
        with pytest.raises(Stop):
            compress.prune(dense(), FULL, train=Stopping(train, after), val=val, workdir=folder)
        said = " ".join(capsys.readouterr().err.split())
        if stage:
            assert f"interrupted in stage {stage}; go on with resume=True (--resume) and the same workdir" in said
        with pytest.raises(Stop):
            compress.prune(dense(), FULL, train=Stopping(small()[0], after))
        said = " ".join(capsys.readouterr().err.split())
        if stage:
            assert f"interrupted in stage {stage}; nothing was kept, as there is no workdir" in said


@pytest.mark.parametrize("stage", ["find_groups", "choose", "slice_", "compare"])
def test_interruption_outside_the_trainings_leaves_model_and_directory_good(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: compress.Pruned
) -> None:
    from test_untouched import alike, portrait

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise Stop

    model = dense()
    before = portrait(model)
    train, val = small()
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(f"compress.run.{stage}", stop)
        compress.prune(model, FULL, train=train, val=val, workdir=tmp_path, quiet=True)
    assert alike(before, portrait(model))
    train, val = small()
    again = compress.prune(model, FULL, train=train, val=val, workdir=tmp_path, resume=True, quiet=True)
    assert same_weights(again.model, undisturbed.model)


def test_interruption_while_saving_leaves_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: compress.Pruned
) -> None:
    def stop(*args: Any, **kwargs: Any) -> Any:
        raise Stop

    train, val = small()
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr("compress.api.save", stop)
        compress.prune(dense(), FULL, train=train, val=val, workdir=tmp_path, quiet=True)
    train, val = small()
    again = compress.prune(dense(), FULL, train=train, val=val, workdir=tmp_path, resume=True, quiet=True)
    assert same_weights(again.model, undisturbed.model)


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
    with pytest.raises(
        FileExistsError, match=r"(?s)belongs to another run:.*budget.macs: was 0.5, is 0.4.*seed: was 0, is 7"
    ):
        compress.prune(dense(), other, train=train, val=val, workdir=tmp_path, resume=True, quiet=True)
    changed = dense()
    with torch.no_grad():
        changed.stem[0].weight[0, 0, 0, 0] += 1
    with pytest.raises(FileExistsError, match="the model has other weights, or is another"):
        compress.prune(changed, FULL, train=train, val=val, workdir=tmp_path, resume=True, quiet=True)


def test_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    train, val = small()
    with pytest.raises(Stop):
        compress.prune(dense(), FULL, train=Stopping(train, 3), val=val, workdir=tmp_path, quiet=True)
    path = Store(tmp_path).path
    path.write_bytes(path.read_bytes()[:1000])
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


def test_random_numbers_of_the_caller_are_put_back() -> None:
    import random

    import numpy as np

    before = random_state()
    with own_randomness(3):
        first = (random.random(), np.random.rand(), float(torch.rand(())))
    assert random_state() == before
    with own_randomness(3):
        assert first == (random.random(), np.random.rand(), float(torch.rand(())))


class Augmented(torch.utils.data.Dataset[Any]):
    """Draws from every generator there is, in the process that reads it."""

    def __init__(self) -> None:
        self.data = digits()[0]

    def __len__(self) -> int:
        return 256

    def __getitem__(self, i: int) -> Any:
        import random

        import numpy as np

        x, y = self.data[i]
        return x + 0.1 * torch.randn(()) + 0.1 * random.random() + 0.1 * np.random.rand(), y


def augmented(workers: int) -> DataLoader[Any]:
    return DataLoader(Augmented(), 64, shuffle=True, num_workers=workers)


def sampled() -> DataLoader[Any]:
    data = torch.utils.data.Subset(digits()[0], range(256))
    sampler = torch.utils.data.RandomSampler(data, generator=torch.Generator().manual_seed(9))
    return DataLoader(data, 64, sampler=sampler)


class Dropping(torch.nn.Sequential):
    """The digits' network with dropout: the training itself draws random numbers."""

    def __init__(self) -> None:
        super().__init__(dense(), torch.nn.Dropout(0.5))


@pytest.mark.parametrize("kind", ["augmented", "workers", "sampler"])
def test_loaders_that_draw_random_numbers_go_on_to_the_same_bits(kind: str, tmp_path: Path) -> None:
    """Four batches an epoch: stops within an epoch, at its end, at the cut and within the fine-tuning."""
    make = {"augmented": lambda: augmented(0), "workers": lambda: augmented(2), "sampler": sampled}[kind]
    recipe = {**FULL, "finetune": {**FULL["finetune"], "best": False, "recalibrate": 2}}
    torch.manual_seed(0)
    model = Dropping()
    whole = compress.prune(model, recipe, train=make(), quiet=True)
    for after in (2, 3, 5, 8, 9, 12) if kind != "workers" else (3, 5):
        folder = tmp_path / str(after)
        with pytest.raises(Stop):
            compress.prune(model, recipe, train=_like(make(), after), workdir=folder, quiet=True)
        again = compress.prune(model, recipe, train=make(), workdir=folder, resume=True, quiet=True)
        assert same_weights(again.model, whole.model), after


def _like(loader: DataLoader[Any], after: int) -> Stopping:
    stopping = Stopping(loader, after)
    stopping.sampler = loader.sampler  # type: ignore[attr-defined]
    return stopping


def test_generators_of_the_loader_are_put_back() -> None:
    loader = sampled()
    before = loader.sampler.generator.get_state()  # type: ignore[union-attr]
    compress.prune(dense(), FULL, train=loader, quiet=True)
    assert torch.equal(before, loader.sampler.generator.get_state())  # type: ignore[union-attr]


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
    with pytest.raises(ValueError, match=r"run\.json: damaged .*; start anew in another workdir"):
        compress.prune(dense(), FULL, train=train, val=val, workdir=tmp_path, resume=True, quiet=True)


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
