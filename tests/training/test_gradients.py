"""Gradients in micro-batches, over accumulated batches and in mixed precision are the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compress
from compress.data.micro_batches import AccumulatedBatch
from compress.training.gradients import GradientComputer
from helpers.engine_runs import SEARCHES, TRAIN, close, loader, network, pruned


class Small(compress.Classification):
    """A task on a device that holds four images."""

    largest, tried = 4, 0

    def forward(self, model: nn.Module, batch: Any) -> Any:
        if model.training and len(batch[0]) > self.largest:
            type(self).tried += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return super().forward(model, batch)


@pytest.mark.parametrize("search", SEARCHES)
def test_accumulated_batches_are_as_one_batch(search: str) -> None:
    whole, parts = pruned(search, 16), pruned(search, 4, accumulate=4)
    assert whole.plan.keep == parts.plan.keep
    assert close(whole.model, parts.model)
    steps = [[h["step"] for h in p.report.history if "loss" in h] for p in (whole, parts)]
    assert steps[0] == steps[1]


@pytest.mark.parametrize("search", ["netslim", "rarts"])
def test_batches_too_large_for_memory_are_run_in_micro_batches(search: str, capsys: pytest.CaptureFixture[str]) -> None:
    Small.tried = 0
    whole, pieces = pruned(search, 16), pruned(search, 16, Small(loader(16), loader(32)))
    assert whole.plan.keep == pieces.plan.keep
    assert close(whole.model, pieces.model)
    assert Small.tried == 2  # sixteen, eight; four do, and that is remembered


def test_low_memory_is_noted_and_a_single_sample_that_does_not_fit_is_an_error() -> None:
    said: list[str] = []
    compute = GradientComputer(message=said.append)
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
    assert compute.num_micro_batches == 4
    assert [text.split("each batch is run in ")[1][:15] for text in said] == ["2 micro-batches", "4 micro-batches"]
    with pytest.raises(torch.OutOfMemoryError):
        compute.gradients(most(0), x, [weight])
    assert "a single sample does not fit" in said[-1]

    def fails(piece: Any) -> dict[str, Tensor]:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        compute.gradients(fails, x, [weight])


def with_ignored_targets() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    x = torch.randn(12, 5, generator=random, dtype=torch.float64)
    y = torch.tensor([0, -100, 2, 1, -100, -100, -100, -100, 3, 3, -100, 1])  # 5 to 8 of them: none is counted
    return x, y


@pytest.mark.parametrize("parts", [1, 3, 4])
@pytest.mark.parametrize("accumulated", [False, True])
def test_loss_is_the_mean_over_the_counted_targets_of_the_step(parts: int, accumulated: bool) -> None:
    """The oracle: torch's mean over the whole batch; that of distillation is over all samples."""
    task, layer = compress.Classification(), nn.Linear(5, 4).double()
    x, y = with_ignored_targets()
    teacher = torch.randn(12, 4, dtype=torch.float64)
    weights = list(layer.parameters())
    compute = GradientComputer()
    batch: Any = (x, y, teacher)
    if accumulated:
        pieces = [part.split(12 // parts) for part in batch]
        batch = AccumulatedBatch(list(zip(*pieces, strict=True)))
    else:
        compute.num_micro_batches = parts

    def terms(part: Any) -> dict[str, Tensor]:
        outputs = layer(part[0])
        return {"task": task.loss(outputs, part), "distil": task.distil(outputs, part[2], 2.0)}

    found = compute.gradients(terms, batch, weights, 3.0, {"task": task.count_targets})
    cross_entropy = nn.functional.cross_entropy(layer(x), y)
    distance = compress.distillation(layer(x), teacher, 2.0)
    for ours, exact in zip(found.gradients, torch.autograd.grad(3 * (cross_entropy + distance), weights), strict=True):
        assert torch.allclose(ours, exact, rtol=1e-12, atol=1e-14)
    assert float(found.terms["task"]) == pytest.approx(cross_entropy.item(), rel=1e-12)
    assert float(found.terms["distil"]) == pytest.approx(distance.item(), rel=1e-12)


def test_mean_over_nothing_is_left_out_even_if_it_is_not_a_number() -> None:
    x, y = with_ignored_targets()
    weight = nn.Parameter(torch.randn(5, 4, dtype=torch.float64))
    batch = AccumulatedBatch([(x[4:8], y[4:8]), (x[8:], y[8:])])

    def terms(part: Any) -> dict[str, Tensor]:
        return {"task": nn.functional.cross_entropy(part[0] @ weight, part[1])}

    found = GradientComputer().gradients(terms, batch, [weight], counts={"task": lambda part: (part[1] >= 0).sum()})
    exact = nn.functional.cross_entropy(x[8:] @ weight, y[8:])
    assert torch.allclose(found.gradients[0], torch.autograd.grad(exact, weight)[0], rtol=1e-12)
    assert float(found.loss) == pytest.approx(exact.item(), rel=1e-12)
    nothing = AccumulatedBatch([(x[4:6], y[4:6]), (x[6:8], y[6:8])])
    found = GradientComputer().gradients(terms, nothing, [weight], counts={"task": lambda part: (part[1] >= 0).sum()})
    assert found.unused == [True]
    assert float(found.loss) == 0


@pytest.mark.parametrize("parts", [1, 4])
def test_what_is_measured_beside_the_loss_is_summed_and_no_part_of_it(parts: int) -> None:
    x, weight = torch.randn(8, 3, dtype=torch.float64), nn.Parameter(torch.randn(3, dtype=torch.float64))

    def terms(part: Tensor) -> dict[str, Tensor]:
        outputs = part @ weight
        return {"task": outputs.square().mean(), "sizes": torch.stack([outputs.sum(), outputs.abs().sum()])}

    compute = GradientComputer()
    compute.num_micro_batches = parts
    found = compute.gradients(terms, x, [weight], measured=("sizes", "unknown"))
    outputs = x @ weight
    (exact,) = torch.autograd.grad(outputs.square().mean(), weight)
    assert list(found.terms) == ["task"] and list(found.measured) == ["sizes"]
    assert torch.allclose(found.gradients[0], exact, rtol=1e-12)
    assert float(found.loss) == pytest.approx(float(outputs.detach().square().mean()), rel=1e-12)
    expected = [float(outputs.detach().sum()), float(outputs.detach().abs().sum())]
    assert found.measured["sizes"].tolist() == pytest.approx(expected, rel=1e-12)
    assert not found.measured["sizes"].requires_grad


def test_what_a_model_freezes_later_is_left_alone() -> None:
    weight, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    frozen.requires_grad_(False)
    found = GradientComputer().gradients(
        lambda p: {"task": (p @ (weight * frozen)).mean()}, torch.ones(3, 2), [frozen, weight]
    )
    assert found.unused == [True, False]
    assert found.gradients[1].tolist() == [1, 1]


def test_half_precision_that_overflows_is_scaled_down_and_nothing_is_skipped() -> None:
    said: list[str] = []
    compute = GradientComputer(precision="fp16", message=said.append)
    weight = nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))

    def terms(piece: Tensor) -> dict[str, Tensor]:
        return {"task": nn.functional.linear(piece, weight).square().float().mean() * 100}

    found = compute.gradients(terms, x, [weight])
    exact = torch.autograd.grad(100 * (x @ weight.T).square().mean(), weight)[0]
    assert compute.loss_scale < 2.0**16
    assert (found.gradients[0] - exact).norm() < 2e-3 * exact.norm()
    assert found.gradients[0].dtype == torch.float32
    again = GradientComputer(precision="fp16")
    again.restore_(compute.state)
    assert again.state == compute.state
    for _ in range(1999):
        compute._unscaled([torch.ones(1)])
    assert compute.loss_scale == 2 * again.loss_scale  # after many steps that went well


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


def test_unavailable_settings_are_refused_before_the_start() -> None:
    engine = {"sync_batchnorm": True, "precision": "fp16", "track": ["tensorbord", "wandb", "tensorboard"]}
    recipe = {"budget": {"dims": "50%"}, "search": SEARCHES["taylor"], "engine": engine}
    with pytest.raises(compress.NotReady) as caught:
        compress.prune(network(), recipe, train=loader(16), quiet=True)
    text = str(caught.value)
    assert "engine.sync_batchnorm: torch synchronizes batch norms on GPUs only" in text
    assert "engine.precision: fp16 needs a GPU" in text
    assert "got 'tensorbord'. Did you mean tensorboard?" in text
    assert "engine.track: wandb is not installed" in text
    assert "engine.track: tensorboard writes files, and there is no workdir" in text


def test_accumulated_batches_are_weighted_by_their_samples() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
    x = torch.randn(7, 2, dtype=torch.float64)
    uneven = AccumulatedBatch([x[:4], x[4:]])
    found = GradientComputer().gradients(lambda p: {"task": (p @ weight).exp().mean()}, uneven, [weight], 3.0)
    loss = (x @ weight).exp().mean()
    assert torch.allclose(found.gradients[0], torch.autograd.grad(3 * loss, weight)[0], rtol=1e-12)
    assert found.loss == pytest.approx(loss.item(), rel=1e-12)
