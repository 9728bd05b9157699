"""Gradients in pieces, over accumulated batches and in mixed precision: the mathematics stays the same."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import compress
from compress.compute import Compute, EngineConfig, Several, divided, samples, taken
from compress.display import Display
from compress.engine import Engine
from compress.states import synchronised

TRAIN: dict[str, Any] = {"epochs": 2, "lr": 0.01, "clip": 1.0}
SEARCHES: dict[str, dict[str, Any]] = {
    "netslim": {"method": "netslim", **TRAIN, "distill": {}},
    "rarts": {"method": "rarts", **TRAIN},
    "darts2": {"method": "darts2", **TRAIN},
    "bayesnas": {"method": "bayesnas", "hessian": "empirical", **TRAIN, "samples": 100000},
    "taylor": {"method": "taylor", "epochs": 1},
}


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.GELU(), nn.Conv2d(8, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(128, 4)
    return nn.Sequential(*layers).to(dtype)


def loader(batch: int, dtype: torch.dtype = torch.float64) -> DataLoader[Any]:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(64, 3, 8, 8, generator=random, dtype=torch.float64).to(dtype)
    return DataLoader(TensorDataset(x, torch.randint(0, 4, (64,), generator=random)), batch, shuffle=True)


def pruned(search: str, batch: int, task: Any = None, **engine: Any) -> compress.Pruned:
    recipe = {
        "budget": {"dims": "50%"},
        "search": SEARCHES[search],
        "finetune": {**TRAIN, "distill": {}},
        "timing": {"repeats": 3},
        "engine": engine,
    }
    given = {"task": task} if task is not None else {"train": loader(batch), "val": loader(32)}
    return compress.prune(network(), recipe, quiet=True, **given)  # type: ignore[arg-type]


def close(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.allclose(x, y, rtol=1e-8, atol=1e-11) for x, y in pairs)


class Small(compress.Classification):
    """A task on a device that holds four images."""

    largest, tried = 4, 0

    def forward(self, model: nn.Module, batch: Any) -> Any:
        if model.training and len(batch[0]) > self.largest:
            type(self).tried += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return super().forward(model, batch)


@pytest.mark.parametrize("search", SEARCHES)
def test_batches_that_are_accumulated_are_as_one(search: str) -> None:
    whole, parts = pruned(search, 16), pruned(search, 4, accumulate=4)
    assert whole.plan.keep == parts.plan.keep
    assert close(whole.model, parts.model)
    steps = [[h["step"] for h in p.report.history if "loss" in h] for p in (whole, parts)]
    assert steps[0] == steps[1]


@pytest.mark.parametrize("search", ["netslim", "rarts"])
def test_where_memory_is_short_the_batch_is_run_in_pieces(search: str, capsys: pytest.CaptureFixture[str]) -> None:
    Small.tried = 0
    whole, pieces = pruned(search, 16), pruned(search, 16, Small(loader(16), loader(32)))
    assert whole.plan.keep == pieces.plan.keep
    assert close(whole.model, pieces.model)
    assert Small.tried == 2  # sixteen, eight; four do, and that is remembered


def test_short_memory_is_said_and_a_single_sample_that_does_not_fit_is_an_error() -> None:
    said: list[str] = []
    compute = Compute(say=said.append)
    weight = nn.Parameter(torch.ones(3))

    def most(limit: int) -> Any:
        def terms(piece: Any) -> dict[str, Tensor]:
            if len(piece) > limit:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
            return {"task": (piece @ weight).square().mean()}

        return terms

    x = torch.randn(6, 3)
    found = compute.gradients(most(2), x, [weight])
    expected = torch.autograd.grad((x @ weight).square().mean(), weight)[0]
    assert torch.allclose(found.gradients[0], expected)
    assert compute.pieces == 4
    assert [text.split("each batch is run in ")[1][:8] for text in said] == ["2 pieces", "4 pieces"]
    with pytest.raises(torch.OutOfMemoryError):
        compute.gradients(most(0), x, [weight])
    assert "a single sample does not fit" in said[-1]

    def fails(piece: Any) -> dict[str, Tensor]:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        compute.gradients(fails, x, [weight])


def test_batches_are_divided_where_their_samples_can_be_told_apart() -> None:
    x, y = torch.randn(5, 3), torch.arange(5)
    images, targets = [torch.rand(3, 4, 4) for _ in range(3)], [{"boxes": torch.rand(3, 4)} for _ in range(3)]
    assert [samples(b) for b in ((x, y), {"a": x}, (images, targets), (x, torch.ones(4)), "text")] == [
        5,
        5,
        3,
        None,
        None,
    ]
    parts = divided((x, y), 2)
    assert [len(part[1]) for part in parts] == [3, 2]
    assert torch.equal(torch.cat([part[0] for part in parts]), x)
    assert divided("text", 4) == ["text"]
    assert taken((images, targets), 1, 3)[1] == targets[1:3]
    assert [len(p["inputs"]) for p in divided({"inputs": images, "data_samples": targets}, 2)] == [2, 1]


def test_what_a_model_freezes_later_is_left_alone() -> None:
    weight, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    frozen.requires_grad_(False)
    found = Compute().gradients(lambda p: {"task": (p @ (weight * frozen)).mean()}, torch.ones(3, 2), [frozen, weight])
    assert found.idle == [True, False]
    assert found.gradients[1].tolist() == [1, 1]


def test_shares_are_by_samples() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
    x = torch.randn(7, 2, dtype=torch.float64)
    uneven = Several([x[:4], x[4:]])
    found = Compute().gradients(lambda p: {"task": (p @ weight).exp().mean()}, uneven, [weight], 3.0)
    loss = (x @ weight).exp().mean()
    assert torch.allclose(found.gradients[0], torch.autograd.grad(3 * loss, weight)[0], rtol=1e-12)
    assert found.loss == pytest.approx(loss.item(), rel=1e-12)


def test_half_precision_that_overflows_is_scaled_down_and_nothing_is_skipped() -> None:
    said: list[str] = []
    compute = Compute(precision="fp16", say=said.append)
    weight = nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))

    def terms(piece: Tensor) -> dict[str, Tensor]:
        return {"task": nn.functional.linear(piece, weight).square().float().mean() * 100}

    found = compute.gradients(terms, x, [weight])
    exact = torch.autograd.grad(100 * (x @ weight.T).square().mean(), weight)[0]
    assert compute.scale < 2.0**16
    assert (found.gradients[0] - exact).norm() < 2e-3 * exact.norm()
    assert found.gradients[0].dtype == torch.float32
    again = Compute(precision="fp16")
    again.restore_(compute.facts)
    assert again.facts == compute.facts
    for _ in range(1999):
        compute._shared({"task": torch.zeros(())}, [torch.ones(1)], [weight])
    assert compute.scale == 2 * again.scale  # after many steps that went well


@pytest.mark.parametrize("search", ["netslim", "rarts", "bayesnas", "taylor"])
def test_bfloat16_trains_single_precision_weights_to_about_the_same(search: str) -> None:
    recipe: dict[str, Any] = {
        "budget": {"dims": "50%"},
        "search": SEARCHES[search],
        "finetune": {**TRAIN, "distill": {}},
        "timing": {"repeats": 3},
    }
    data = {"train": loader(16, torch.float32), "val": loader(32, torch.float32)}
    single = compress.prune(network(torch.float32), recipe, quiet=True, **data)  # type: ignore[arg-type]
    mixed = compress.prune(
        network(torch.float32),
        {**recipe, "engine": {"precision": "bf16"}},
        quiet=True,
        **data,  # type: ignore[arg-type]
    )
    assert all(t.dtype == torch.float32 for t in mixed.model.state_dict().values())
    losses = [[h["loss"] for h in p.report.history if h["stage"] == "search" and "loss" in h] for p in (single, mixed)]
    assert losses[0] != losses[1]
    assert losses[1][0] == pytest.approx(losses[0][0], rel=0.05)


def test_launchers_say_what_the_recipe_leaves_open(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (EngineConfig().passes, EngineConfig().batches) == ("float32", 1)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert (EngineConfig().passes, EngineConfig().batches) == ("bf16", 4)
    assert EngineConfig(precision="float32", accumulate=2).passes == "float32"
    assert EngineConfig(precision="float32", accumulate=2).batches == 2


def test_channels_last_is_a_matter_of_memory_only() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    plain, last = pruned("netslim", 16), pruned("netslim", 16, channels_last=True)
    assert plain.plan.keep == last.plan.keep
    assert close(plain.model, last.model)
    assert all(p.is_contiguous() for p in last.model.parameters())
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_compiled_fine_tuning_leaves_a_plain_model() -> None:
    plain, compiled = pruned("taylor", 16), pruned("taylor", 16, compile="eager")
    assert close(plain.model, compiled.model)
    assert compiled.model._compiled_call_impl is None


def test_what_is_measured_is_tracked(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = {"budget": {"dims": "50%"}, "search": SEARCHES["taylor"], "finetune": TRAIN, "timing": {"repeats": 3}}
    recipe["engine"] = {"track": ["tensorboard"]}
    done = compress.prune(network(), recipe, train=loader(16), val=loader(32), workdir=tmp_path / "out", quiet=True)
    (folder,) = {p.parent for p in (tmp_path / "out" / "track").rglob("*tfevents*") if "17" not in p.parent.name}
    events = EventAccumulator(str(folder))
    events.Reload()
    seen = [(e.step, e.value) for e in events.Scalars("finetune/loss")]
    ours = [(h["step"], h["loss"]) for h in done.report.history if h["stage"] == "finetune" and "loss" in h]
    assert [step for step, _ in seen] == [step for step, _ in ours]
    assert [value for _, value in seen] == pytest.approx([value for _, value in ours], rel=1e-6)
    assert "finetune/val_accuracy" in events.Tags()["scalars"]


def test_what_cannot_be_had_is_said_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = {"sync_batchnorm": True, "precision": "fp16", "track": ["tensorbord", "wandb", "tensorboard"]}
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    recipe = {"budget": {"dims": "50%"}, "search": SEARCHES["taylor"], "engine": engine}
    with pytest.raises(compress.NotReady) as caught:
        compress.prune(network(), recipe, train=loader(16), quiet=True)
    text = str(caught.value)
    assert "engine.sync_batchnorm: torch's batch norms over processes run on GPUs alone" in text
    assert "engine.precision: fp16 is for GPUs" in text
    assert "got 'tensorbord'. Did you mean tensorboard?" in text
    assert "engine.track: wandb is not installed here" in text
    assert "engine.track: tensorboard writes files, and there is no workdir" in text
    assert "ACCELERATE_USE_FSDP: the launcher asks for sharded training" in text


def test_batch_norms_are_in_step_only_inside_and_only_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    engine = Engine(torch.device("cpu"), 0, Display(quiet=True), config=EngineConfig(sync_batchnorm=True))
    with synchronised(model, engine):
        assert type(model[1]) is nn.BatchNorm2d
    monkeypatch.setattr("compress.states.world", lambda: 2)
    with synchronised(model, engine):
        assert type(model[1]) is nn.SyncBatchNorm
    assert type(model[1]) is nn.BatchNorm2d
    assert "process_group" not in vars(model[1])
