"""Fine-tuning: each part of the loss, what is kept, what is measured anew."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from digits import dense, loaders
from torch import Tensor, nn

import compress
from compress.checkpoint import State
from compress.display import Display
from compress.engine import Engine
from compress.fields import Length, Training
from compress.finetune import Tuning, finetune, matched, recalibrate_
from compress.optimise import optimiser, rate, set_rate
from compress.recipe import Finetune


def engine() -> Engine:
    return Engine(torch.device("cpu"), 0, Display(quiet=True))


def config(**settings: Any) -> Finetune:
    return Finetune.model_validate({"epochs": "6 steps", **settings})


def cut(model: nn.Module, residual: bool = False) -> tuple[nn.Module, compress.Plan]:
    recipe = {"budget": {"dims": "60%"}, "target": {"residual": residual}, "timing": {"repeats": 3}}
    pruned = compress.prune(model, recipe, example_inputs=torch.randn(1, 1, 8, 8), quiet=True)
    return pruned.model, pruned.plan


def tuning(student: nn.Module, teacher: nn.Module, plan: Any = None, **settings: Any) -> Tuning:
    task = compress.Classification(*loaders(count=256))
    task.classes = 10
    plan = plan or compress.Plan({}, {})
    return Tuning(student.train(), teacher.eval(), plan, task, config(**settings), engine(), 6)


def first() -> Any:
    return next(iter(loaders(count=64)[0]))


def test_loss_is_task_plus_weighted_distillation() -> None:
    student, plan = cut(dense())
    work = tuning(student, dense(), plan, lr=1e-12, distill={"temperature": 3, "weight": 0.7})
    x, y = first()
    with torch.no_grad():
        logits, teacher = copy.deepcopy(student)(x), dense()(x)
    terms = {k: float(v) for k, v in work.step((x, y)).items()}
    assert terms["task"] == pytest.approx(float(nn.functional.cross_entropy(logits, y)), rel=1e-5)
    assert terms["distil"] == pytest.approx(0.7 * float(compress.distillation(logits, teacher, 3)), rel=1e-4)
    assert terms["loss"] == pytest.approx(terms["task"] + terms["distil"], rel=1e-5)


def test_dense_model_as_its_own_student_learns_nothing_from_the_teacher() -> None:
    model = dense()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()  # statistics of the batch would differ from those of the teacher
    task = compress.Classification(*loaders(count=256))
    work = Tuning(model, dense(), compress.Plan({}, {}), task, config(distill={}), engine(), 6)
    assert abs(float(work.step(first())["distil"])) < 1e-6


def test_teacher_is_run_once_a_batch_and_never_changes() -> None:
    teacher, student = dense(), cut(dense())[0]
    before = copy.deepcopy(teacher.state_dict())
    calls = []
    teacher.register_forward_hook(lambda *_: calls.append((teacher.training, torch.is_inference_mode_enabled())))
    work = tuning(student, teacher, distill={"features": ["stage1", "stage2.0"]})
    work.step(first())  # the first finds out which features to compare
    calls.clear()
    for _ in range(3):
        work.step(first())
    assert calls == [(False, True)] * 3
    assert all(torch.equal(before[k], v) for k, v in teacher.state_dict().items())


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("name", ["stage1.0.bn1", "stage1.0.conv1", "stage2.1.conv2"])
def test_feature_loss_compares_with_what_the_plan_keeps(residual: bool, name: str) -> None:
    teacher = dense()
    student, plan = cut(teacher, residual)
    work = tuning(student, teacher, plan, lr=1e-12, distill={"features": [name], "feature_weight": 2, "weight": 0})
    seen: dict[str, Tensor] = {}
    x, y = first()
    twin = copy.deepcopy(student)
    for key, network in (("s", twin), ("t", copy.deepcopy(teacher))):
        network.get_submodule(name).register_forward_hook(lambda m, i, o, key=key: seen.update({key: o.detach()}))
        with torch.no_grad():
            network(x)
    tensor = name + ".weight"
    kept = plan.slices.get(tensor, {}).get(0, np.arange(seen["t"].shape[1]))
    teacher_kept = seen["t"][:, torch.as_tensor(kept)]
    expected = 2 * ((seen["s"] - teacher_kept) ** 2).sum() / (teacher_kept**2).sum()
    assert float(work.step((x, y))["features"]) == pytest.approx(float(expected), rel=1e-4)


def test_feature_that_cannot_be_matched_is_named() -> None:
    student, plan = cut(dense(), residual=True)
    del plan
    other = dense()
    work = tuning(student, other, compress.Plan({}, {}), distill={"features": ["stage1.0.unused"]})
    for model in (student, other):
        model.stage1[0].unused = nn.ReLU()
    with pytest.raises(
        ValueError, match=r"finetune.distill.features: stage1.0.unused is not called, or returns no tensor"
    ):
        work.step(first())
    with pytest.raises(ValueError, match=r"in the compact one, and it is not plain which of its features were kept"):
        matched("stage1", torch.randn(2, 3, 4, 4), torch.randn(2, 5, 4, 4))


@pytest.mark.parametrize(("scores", "kept"), [((0.5, 0.9, 0.7), 1), ((0.9, 0.9, 0.7), 1), ((0.5, 0.7, 0.9), 2)])
def test_best_weights_on_validation_are_kept(scores: tuple[float, ...], kept: int) -> None:
    """Of equally good ones the last, which were trained for longer."""

    class Scripted(compress.Classification):
        def evaluate(self, model: nn.Module, batches: Any) -> dict[str, float]:
            seen.append(copy.deepcopy(model.state_dict()))
            return {"score": scores[len(seen) - 1]}

    seen: list[Any] = []
    student = cut(dense())[0]
    task = Scripted(loaders(count=128)[0], [first()])
    work = engine()
    finetune(student, dense(), compress.Plan({}, {}), task, task.train or (), config(), work, 6)
    assert len(seen) == 3
    assert work.facts["kept"] == {"step": 2 * (kept + 1), "of": 6}
    for moment in range(3):
        assert all(torch.equal(v, seen[moment][k]) for k, v in student.state_dict().items()) is (moment == kept)


def test_last_weights_are_kept_where_best_is_off() -> None:
    class Scripted(compress.Classification):
        def evaluate(self, model: nn.Module, batches: Any) -> dict[str, float]:
            seen.append(copy.deepcopy(model.state_dict()))
            return {"score": -len(seen)}

    seen: list[Any] = []
    student = cut(dense())[0]
    task = Scripted(loaders(count=128)[0], [first()])
    work = engine()
    finetune(student, dense(), compress.Plan({}, {}), task, task.train or (), config(best=False), work, 6)
    assert "kept" not in work.facts
    assert all(torch.equal(v, seen[-1][k]) for k, v in student.state_dict().items())


def test_moving_average_is_the_recursion() -> None:
    student = cut(dense())[0]
    work = tuning(student, dense(), lr=0.1, ema=0.8, best=False)
    expected: dict[str, Tensor] = {}
    for step in range(4):
        work.step(first())
        now = {k: v.detach().double().clone() for k, v in student.named_parameters()}
        expected = now if step == 0 else {k: 0.8 * expected[k] + 0.2 * now[k] for k in now}
    assert work.product is not student
    for name, value in work.product.named_parameters():
        assert torch.allclose(value.double(), expected[name], atol=1e-6), name
    work.finish()
    assert all(torch.equal(v, work.product.state_dict()[k]) for k, v in student.state_dict().items())


def test_recalibration_gives_the_statistics_of_the_batches() -> None:
    """The first norm's input does not depend on other norms: its statistics are plain means."""
    model = dense()
    train = [(x, y) for x, y in loaders(count=256)[0]]
    task = compress.Classification(train)
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        inputs = [model.stem[0](x) for x, _ in train[:3]]
    recalibrate_(model, task, train, 3, engine())
    norm = model.stem[1]
    assert torch.allclose(norm.running_mean, torch.stack([i.mean((0, 2, 3)) for i in inputs]).mean(0), atol=1e-6)
    assert torch.allclose(norm.running_var, torch.stack([i.var((0, 2, 3)) for i in inputs]).mean(0), atol=1e-5)
    assert norm.momentum == 0.1
    assert not any(m.training for m in model.modules())
    after = model.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before if "running" not in k and "tracked" not in k)


@pytest.mark.parametrize(
    "settings", [{"mixup": 0.2}, {"cutmix": 1.0}, {"mixup": 0.2, "cutmix": 1.0}, {"label_smoothing": 0.1}]
)
@pytest.mark.parametrize("count", [7, 8])
def test_soft_targets_train(settings: dict[str, Any], count: int) -> None:
    work = tuning(cut(dense())[0], dense(), **settings, distill={})
    x, y = first()
    original = x.clone()
    assert all(np.isfinite(float(v)) for v in work.step((x[:count], y[:count])).values())
    assert torch.equal(x, original), "mixing changed the loader's own batch"


def test_label_smoothing_is_torchs() -> None:
    student = cut(dense())[0]
    work = tuning(student, dense(), lr=1e-12, label_smoothing=0.1)
    x, y = first()
    with torch.no_grad():
        expected = nn.functional.cross_entropy(copy.deepcopy(student)(x), y, label_smoothing=0.1)
    assert float(work.step((x, y))["task"]) == pytest.approx(float(expected), rel=1e-5)


def test_gradients_are_clipped() -> None:
    student = cut(dense())[0]
    work = tuning(student, dense(), clip=1e-3)
    work.step(first())
    total = torch.stack([p.grad.norm() for p in student.parameters()]).norm()  # type: ignore[union-attr]
    assert float(total) == pytest.approx(1e-3, rel=1e-3)


def training(**settings: Any) -> Training:
    return Training(epochs=Length.model_validate(1), **settings)


def test_schedules_against_the_formulas() -> None:
    cosine = [rate(training(), t, 100) for t in range(100)]
    assert cosine == pytest.approx([(1 + np.cos(np.pi * t / 100)) / 2 for t in range(100)])
    steps = [rate(training(schedule="step", milestones=(0.3, 0.6)), t, 10) for t in range(10)]
    assert steps == pytest.approx([1, 1, 1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01, 0.01])
    assert {rate(training(schedule="constant"), t, 10) for t in range(10)} == {1.0}
    warm = [rate(training(schedule="constant", warmup=0.5), t, 10) for t in range(10)]
    assert warm == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1, 1, 1])


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_weight_decay_is_on_weights_alone_and_rates_follow_the_schedule(kind: str) -> None:
    model = dense()
    scores = [model.stem[1].weight]
    optimizer = optimiser(training(optimizer=kind, weight_decay=0.3, lr=0.1), model.parameters(), scores)
    decayed, plain, scored = optimizer.param_groups
    assert {p.ndim for p in decayed["params"]} == {2, 4}
    assert (decayed["weight_decay"], plain["weight_decay"], scored["weight_decay"]) == (0.3, 0, 0.3)
    assert [id(p) for p in scored["params"]] == [id(p) for p in scores]
    count = sum(len(g["params"]) for g in optimizer.param_groups)
    assert count == len(list(model.parameters()))
    set_rate(optimizer, 0.5)
    assert [g["lr"] for g in optimizer.param_groups] == [0.05, 0.05, 0.05]
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        optimiser(training(), model.parameters())


def test_state_of_a_training_goes_round() -> None:
    student = cut(dense())[0]
    work = tuning(student, dense(), ema=0.9, optimizer="adamw", distill={})
    work.step(first())
    work.measure()
    saved = {k: v.clone() for k, v in work.state.tensors().items()}
    other = tuning(cut(dense())[0], dense(), ema=0.9, optimizer="adamw", distill={})
    other.state.restore_(saved, work.state.facts)
    other.done = work.done
    batch = first()
    work.step(batch)
    other.step(batch)
    again, expected = other.state.tensors(), work.state.tensors()
    assert again.keys() == expected.keys()
    assert all(torch.equal(again[k], expected[k]) for k in expected)
    assert isinstance(other.state, State)


class Shuffling(nn.Module):
    """Its features come out in another order than its weights lie in."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv(x)).unflatten(1, (2, 4)).transpose(1, 2).flatten(1, 2)


@pytest.mark.parametrize("name", ["0", "1", "2"])
def test_features_are_matched_through_shuffles_and_modules_without_weights(name: str) -> None:
    torch.manual_seed(0)
    teacher = nn.Sequential(Shuffling(), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.Flatten(), nn.Linear(6 * 36, 10)).eval()
    groups = compress.find_groups(teacher, torch.randn(1, 1, 8, 8))
    plan = compress.Plan.build(teacher, groups, {g.name: range(0, g.width, 2) for g in groups})
    student = plan.apply_(copy.deepcopy(teacher))
    work = tuning(student, plan.zero_(copy.deepcopy(teacher)), plan, lr=1e-12, distill={"features": [name]})
    assert float(work.step(first())["features"]) < 1e-10, "the sliced network's features are the zeroed one's"


def test_best_is_not_fooled_by_a_metric_that_is_not_a_number() -> None:
    class Scripted(compress.Classification):
        scores = iter([float("nan"), 0.4, 0.8])

        def evaluate(self, model: nn.Module, batches: Any) -> dict[str, float]:
            seen.append(copy.deepcopy(model.state_dict()))
            return {"score": next(self.scores)}

    seen: list[Any] = []
    student = cut(dense())[0]
    task = Scripted(loaders(count=128)[0], [first()])
    finetune(student, dense(), compress.Plan({}, {}), task, task.train or (), config(), engine(), 6)
    assert all(torch.equal(v, seen[2][k]) for k, v in student.state_dict().items())


def test_teacher_sees_the_input_as_the_student_does_even_if_the_model_changes_it() -> None:
    class Shifting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
            self.seen: list[float] = []

        def forward(self, x: Tensor) -> Tensor:
            x.sub_(0.5)
            self.seen.append(float(x.mean()))
            return self.net(x)

    student, teacher = Shifting(), Shifting()
    work = tuning(student, teacher, distill={})
    work.step((torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.long)))
    assert student.seen == teacher.seen == [-0.5]
