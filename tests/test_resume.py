"""A run that was stopped goes on to the same result; a working directory belongs to one run."""

from __future__ import annotations

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
from compress.checkpoint import own_randomness, random_state
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
        self.batch_sampler = loader.batch_sampler  # which is seeded wherever it is seen

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
    assert again.report.scores == undisturbed.report.scores


def test_resumed_run_keeps_the_date_of_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, val = small()
    monkeypatch.setattr("compress.run.origin", lambda model, seed: {"date": "the first"})
    with pytest.raises(Stop):
        compress.prune(dense(), FULL, train=Stopping(train, 4), val=val, workdir=tmp_path, quiet=True)
    monkeypatch.setattr("compress.run.origin", lambda model, seed: {"date": "the second"})
    train, val = small()
    again = compress.prune(dense(), FULL, train=train, val=val, workdir=tmp_path, resume=True, quiet=True)
    assert again.report.origin == {"date": "the first"}


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


def test_resuming_where_there_is_nothing_says_so_and_starts_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = next(iter(small()[0]))[0]
    given: dict[str, Any] = {"example_inputs": x, "workdir": tmp_path / "run", "resume": True}
    compress.prune(dense(), {"budget": {"macs": "50%"}, "timing": {"repeats": 3}}, **given)
    said = "".join(capsys.readouterr().err.splitlines())
    assert f"nothing to resume in {tmp_path / 'run'}: starting anew".replace(" ", "") in said.replace(" ", "")
    compress.prune(dense(), {"budget": {"macs": "50%"}, "timing": {"repeats": 3}}, **given)
    assert "starting anew" not in capsys.readouterr().err


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


@pytest.mark.parametrize("stage", ["find_groups", "choose", "slice_", "compare_batches"])
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
