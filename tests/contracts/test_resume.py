"""A run that was interrupted and resumed ends with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import compress
from compress.data.named_loaders import digits_datasets
from helpers.digits import dense
from helpers.interruption import SHORT_RECIPE, Interrupted, InterruptedLoader, small_loaders
from helpers.stateful_network import Stateful
from helpers.weights import same_weights

pytestmark = pytest.mark.usefixtures("checkpoint_at_every_step")


@pytest.mark.parametrize("after", [0, 1, 2, 4, 6, 7, 8, 10, 13, 14])
def test_interrupted_run_resumes_to_the_same_bits(after: int, undisturbed: compress.Pruned, tmp_path: Path) -> None:
    """One batch is read before the start; then 6 steps of search, 8 of fine-tuning."""
    train, val = small_loaders()
    with pytest.raises(Interrupted):
        compress.prune(
            dense(), SHORT_RECIPE, train=InterruptedLoader(train, after), val=val, workdir=tmp_path, quiet=True
        )
    assert not (tmp_path / "plan.json").exists()
    train, val = small_loaders()
    again = compress.prune(dense(), SHORT_RECIPE, train=train, val=val, workdir=tmp_path, resume=True, quiet=True)
    assert again.plan.keep == undisturbed.plan.keep
    assert same_weights(again.model, undisturbed.model)
    assert again.report.pruned.metrics == undisturbed.report.pruned.metrics
    strip = [{k: v for k, v in record.items() if k != "lr"} for record in again.report.history]
    assert strip == undisturbed.report.history
    assert again.report.scores == undisturbed.report.scores
    assert again.report.costs == undisturbed.report.costs != []


def test_resumed_run_keeps_the_date_of_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, val = small_loaders()
    monkeypatch.setattr("compress.pipeline.context.run_origin", lambda model, seed: {"date": "the first"})
    with pytest.raises(Interrupted):
        compress.prune(dense(), SHORT_RECIPE, train=InterruptedLoader(train, 4), val=val, workdir=tmp_path, quiet=True)
    monkeypatch.setattr("compress.pipeline.context.run_origin", lambda model, seed: {"date": "the second"})
    train, val = small_loaders()
    again = compress.prune(dense(), SHORT_RECIPE, train=train, val=val, workdir=tmp_path, resume=True, quiet=True)
    assert again.report.origin == {"date": "the first"}


def test_a_run_interrupted_twice_ends_with_the_same_bits(undisturbed: compress.Pruned, tmp_path: Path) -> None:
    for after in (3, 4, 5):  # each attempt gets a little further
        train, val = small_loaders()
        with pytest.raises(Interrupted):
            loader = InterruptedLoader(train, after)
            compress.prune(dense(), SHORT_RECIPE, train=loader, val=val, workdir=tmp_path, resume=True, quiet=True)
    train, val = small_loaders()
    again = compress.prune(dense(), SHORT_RECIPE, train=train, val=val, workdir=tmp_path, resume=True, quiet=True)
    assert same_weights(again.model, undisturbed.model)


def test_rounds_and_loaders_with_a_generator_resume_to_the_same_bits(tmp_path: Path) -> None:
    def data() -> DataLoader[Any]:
        some = torch.utils.data.Subset(digits_datasets()[0], range(256))
        return DataLoader(some, 64, shuffle=True, generator=torch.Generator().manual_seed(5))

    recipe = {**SHORT_RECIPE, "steps": 2, "search": {**SHORT_RECIPE["search"], "epochs": "12 steps"}}
    whole = compress.prune(dense(), recipe, train=data(), quiet=True)
    for after in (3, 9, 11, 15):
        folder = tmp_path / str(after)
        with pytest.raises(Interrupted):
            compress.prune(dense(), recipe, train=_with_generator(data(), after), workdir=folder, quiet=True)
        again = compress.prune(dense(), recipe, train=data(), workdir=folder, resume=True, quiet=True)
        assert again.plan.keep == whole.plan.keep, after
        assert same_weights(again.model, whole.model), after


def _with_generator(loader: DataLoader[Any], after: int) -> InterruptedLoader:
    stopping = InterruptedLoader(loader, after)
    stopping.generator = loader.generator  # type: ignore[attr-defined]
    return stopping


def test_resuming_in_an_empty_directory_is_noted_and_starts_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = next(iter(small_loaders()[0]))[0]
    given: dict[str, Any] = {"example_inputs": x, "workdir": tmp_path / "run", "resume": True}
    compress.prune(dense(), {"budget": {"macs": "50%"}, "timing": {"repeats": 3}}, **given)
    said = "".join(capsys.readouterr().err.splitlines())
    assert f"nothing to resume in {tmp_path / 'run'}: starting from the beginning".replace(" ", "") in said.replace(
        " ", ""
    )
    compress.prune(dense(), {"budget": {"macs": "50%"}, "timing": {"repeats": 3}}, **given)
    assert "nothing to resume" not in capsys.readouterr().err


def test_interruption_says_in_which_stage_and_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for after, stage in ((0, ""), (3, "search"), (9, "finetune")):
        train, val = small_loaders()
        folder = tmp_path / str(after)
        with pytest.raises(Interrupted):
            compress.prune(dense(), SHORT_RECIPE, train=InterruptedLoader(train, after), val=val, workdir=folder)
        said = " ".join(capsys.readouterr().err.split())
        if stage:
            assert f"interrupted in stage {stage}; continue with resume=True (--resume) and the same workdir" in said
        with pytest.raises(Interrupted):
            compress.prune(dense(), SHORT_RECIPE, train=InterruptedLoader(small_loaders()[0], after))
        said = " ".join(capsys.readouterr().err.split())
        if stage:
            assert f"interrupted in stage {stage}; nothing was saved because there is no workdir" in said


@pytest.mark.parametrize(
    "stage", ["run.find_groups", "run.choose_widths", "run.slice_", "report_updates.compare_latency_in_batches"]
)
def test_interruption_outside_the_trainings_leaves_model_and_directory_good(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: compress.Pruned
) -> None:
    from helpers.snapshots import same_snapshot, snapshot

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise Interrupted

    model = dense()
    before = snapshot(model)
    train, val = small_loaders()
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(f"compress.pipeline.{stage}", stop)
        compress.prune(model, SHORT_RECIPE, train=train, val=val, workdir=tmp_path, quiet=True)
    assert same_snapshot(before, snapshot(model))
    train, val = small_loaders()
    again = compress.prune(model, SHORT_RECIPE, train=train, val=val, workdir=tmp_path, resume=True, quiet=True)
    assert same_weights(again.model, undisturbed.model)


def test_interruption_while_saving_leaves_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: compress.Pruned
) -> None:
    def stop(*args: Any, **kwargs: Any) -> Any:
        raise Interrupted

    train, val = small_loaders()
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr("compress.api.save_model", stop)
        compress.prune(dense(), SHORT_RECIPE, train=train, val=val, workdir=tmp_path, quiet=True)
    train, val = small_loaders()
    again = compress.prune(dense(), SHORT_RECIPE, train=train, val=val, workdir=tmp_path, resume=True, quiet=True)
    assert same_weights(again.model, undisturbed.model)


class Augmented(torch.utils.data.Dataset[Any]):
    """Draws from every generator there is, in the process that reads it."""

    def __init__(self) -> None:
        self.data = digits_datasets()[0]

    def __len__(self) -> int:
        return 256

    def __getitem__(self, i: int) -> Any:
        import random

        import numpy as np

        x, y = self.data[i]
        return x + 0.1 * torch.randn(()) + 0.1 * random.random() + 0.1 * np.random.rand(), y


def augmented(workers: int, **settings: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(), 64, shuffle=True, num_workers=workers, **settings)


def sampled() -> DataLoader[Any]:
    data = torch.utils.data.Subset(digits_datasets()[0], range(256))
    sampler = torch.utils.data.RandomSampler(data, generator=torch.Generator().manual_seed(9))
    return DataLoader(data, 64, sampler=sampler)


class Dropping(torch.nn.Sequential):
    """The digits' network with dropout: the training itself draws random numbers."""

    def __init__(self) -> None:
        super().__init__(dense(), torch.nn.Dropout(0.5))


@pytest.mark.parametrize("kind", ["augmented", "workers", "sampler"])
def test_loaders_that_draw_random_numbers_resume_to_the_same_bits(kind: str, tmp_path: Path) -> None:
    """Four batches an epoch: stops within an epoch, at its end, at the cut and within the fine-tuning."""
    make = {"augmented": lambda: augmented(0), "workers": lambda: augmented(2), "sampler": sampled}[kind]
    recipe = {**SHORT_RECIPE, "finetune": {**SHORT_RECIPE["finetune"], "best": False, "recalibrate": 2}}
    torch.manual_seed(0)
    model = Dropping()
    whole = compress.prune(model, recipe, train=make(), quiet=True)
    for after in (2, 3, 5, 8, 9, 12) if kind != "workers" else (3, 5):
        folder = tmp_path / str(after)
        with pytest.raises(Interrupted):
            compress.prune(model, recipe, train=_like(make(), after), workdir=folder, quiet=True)
        again = compress.prune(model, recipe, train=make(), workdir=folder, resume=True, quiet=True)
        assert same_weights(again.model, whole.model), after


@pytest.mark.parametrize("after", [6, 11])
def test_loaders_whose_workers_persist_resume_to_the_same_bits(after: int, tmp_path: Path) -> None:
    """Four batches an epoch, and one before the start: stops in the second epoch of search and of fine-tuning."""
    whole = compress.prune(dense(), SHORT_RECIPE, train=augmented(1, persistent_workers=True), quiet=True)
    with pytest.raises(Interrupted):
        loader = _like(augmented(1, persistent_workers=True), after)
        compress.prune(dense(), SHORT_RECIPE, train=loader, workdir=tmp_path, quiet=True)
    loader = augmented(1, persistent_workers=True)
    again = compress.prune(dense(), SHORT_RECIPE, train=loader, workdir=tmp_path, resume=True, quiet=True)
    assert same_weights(again.model, whole.model)
    assert loader.persistent_workers


@pytest.mark.parametrize("best", [True, False])
def test_extra_state_and_buffers_that_are_not_persistent_resume_to_the_same_bits(best: bool, tmp_path: Path) -> None:
    """The outputs depend on both, and training changes them: stops within search, at the cut, within fine-tuning."""
    recipe = {**SHORT_RECIPE, "finetune": {**SHORT_RECIPE["finetune"], "best": best, "ema": 0.9 if best else None}}
    train, val = small_loaders()
    whole: Any = compress.prune(Stateful(), recipe, train=train, val=val, quiet=True)
    for after in (4, 7, 10):
        folder, (train, val) = tmp_path / str(after), small_loaders()
        with pytest.raises(Interrupted):
            compress.prune(
                Stateful(), recipe, train=InterruptedLoader(train, after), val=val, workdir=folder, quiet=True
            )
        train, val = small_loaders()
        again: Any = compress.prune(Stateful(), recipe, train=train, val=val, workdir=folder, resume=True, quiet=True)
        assert same_weights(again.model[0], whole.model[0]), after
        assert again.model[1].steps == whole.model[1].steps > 0
        assert torch.equal(again.model[1].seen["mean"], whole.model[1].seen["mean"]), after
        assert torch.equal(again.model[1].trend, whole.model[1].trend), after
        assert again.report.pruned.metrics == whole.report.pruned.metrics


def _like(loader: DataLoader[Any], after: int) -> InterruptedLoader:
    stopping = InterruptedLoader(loader, after)
    stopping.sampler = loader.sampler  # type: ignore[attr-defined]
    return stopping


def test_generators_of_the_loader_are_put_back() -> None:
    loader = sampled()
    before = loader.sampler.generator.get_state()  # type: ignore[union-attr]
    compress.prune(dense(), SHORT_RECIPE, train=loader, quiet=True)
    assert torch.equal(before, loader.sampler.generator.get_state())  # type: ignore[union-attr]
