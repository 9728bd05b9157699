"""Fine-tuning: each term of the loss, the weights that are kept, moving averages."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import compress
from compress.data.micro_batches import AccumulatedBatch
from compress.progress import ProgressDisplay
from compress.recipe import Finetune
from compress.storage.checkpoint import TrainingState
from compress.training.distillation_losses import match_kept_features
from compress.training.engine import Engine
from compress.training.fine_tuning import FineTuneJob, FineTuner, fine_tune
from helpers.digits import dense, loaders


def engine() -> Engine:
    return Engine(torch.device("cpu"), 0, ProgressDisplay(quiet=True))


def config(**settings: Any) -> Finetune:
    return Finetune.model_validate({"epochs": "6 steps", **settings})


def cut(model: nn.Module, residual: bool = False) -> tuple[nn.Module, compress.Plan]:
    recipe = {"budget": {"dims": "60%"}, "target": {"residual": residual}, "timing": {"repeats": 3}}
    pruned = compress.prune(model, recipe, example_inputs=torch.randn(1, 1, 8, 8), quiet=True)
    return pruned.model, pruned.plan


def tuning(student: nn.Module, teacher: nn.Module, plan: Any = None, **settings: Any) -> FineTuner:
    task = compress.Classification(*loaders(count=256))
    task.classes = 10
    plan = plan or compress.Plan({}, {})
    return FineTuner(FineTuneJob(student.train(), teacher.eval(), plan, config(**settings), engine(), 6), task)


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
    work = FineTuner(FineTuneJob(model, dense(), compress.Plan({}, {}), config(distill={}), engine(), 6), task)
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
    with pytest.raises(ValueError, match=r"in the compact one, and it is unclear which of its features were kept"):
        match_kept_features("stage1", torch.randn(2, 3, 4, 4), torch.randn(2, 5, 4, 4))


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
    fine_tune(FineTuneJob(student, dense(), compress.Plan({}, {}), config(), work, 6), task, task.train or ())
    assert len(seen) == 3
    assert work.run_state.kept_step == {"step": 2 * (kept + 1), "of": 6}
    for moment in range(3):
        assert all(torch.equal(v, seen[moment][k]) for k, v in student.state_dict().items()) is (moment == kept)


@pytest.mark.parametrize(("start", "kept"), [(0.95, 0), (0.9, 6), (float("nan"), 6)])
@pytest.mark.parametrize("ema", [None, 0.5])
def test_training_that_makes_it_worse_gives_the_weights_it_started_from(
    start: float, kept: int, ema: float | None
) -> None:
    class Scripted(compress.Classification):
        def evaluate(self, model: nn.Module, batches: Any) -> dict[str, float]:
            return {"score": 0.9}

    student, task, work = cut(dense())[0], Scripted(loaders(count=128)[0], [first()]), engine()
    before = copy.deepcopy(student.state_dict())
    work.run_state.sliced_metrics = {"score": start, "loss": 1.0}
    fine_tune(FineTuneJob(student, dense(), compress.Plan({}, {}), config(ema=ema), work, 6), task, task.train or ())
    assert work.run_state.kept_step == {"step": kept, "of": 6}
    assert all(torch.equal(value, before[name]) for name, value in student.state_dict().items()) is (kept == 0)


def test_a_loader_of_one_batch_is_not_validated_after_each_step() -> None:
    class Counted(compress.Classification):
        def evaluate(self, model: nn.Module, batches: Any) -> dict[str, float]:
            count.append(1)
            return {"score": 0.5}

    count: list[int] = []
    task = Counted([tuple(t[:4] for t in first())], [first()])
    job = FineTuneJob(cut(dense())[0], dense(), compress.Plan({}, {}), config(), engine(), 60)
    fine_tune(job, task, task.train or ())
    assert len(count) == 20


def test_last_weights_are_kept_where_best_is_off() -> None:
    class Scripted(compress.Classification):
        def evaluate(self, model: nn.Module, batches: Any) -> dict[str, float]:
            seen.append(copy.deepcopy(model.state_dict()))
            return {"score": -len(seen)}

    seen: list[Any] = []
    student = cut(dense())[0]
    task = Scripted(loaders(count=128)[0], [first()])
    work = engine()
    fine_tune(FineTuneJob(student, dense(), compress.Plan({}, {}), config(best=False), work, 6), task, task.train or ())
    assert work.run_state.kept_step is None
    assert all(torch.equal(v, seen[-1][k]) for k, v in student.state_dict().items())


def test_moving_average_is_the_recursion() -> None:
    student = cut(dense())[0]
    work = tuning(student, dense(), lr=0.1, ema=0.8, best=False)
    expected: dict[str, Tensor] = {}
    for step in range(4):
        work.step(first())
        now = {k: v.detach().double().clone() for k, v in student.named_parameters()}
        expected = now if step == 0 else {k: 0.8 * expected[k] + 0.2 * now[k] for k in now}
    assert work.evaluated_model is not student
    for name, value in work.evaluated_model.named_parameters():
        assert torch.allclose(value.double(), expected[name], atol=1e-6), name
    work.load_best_weights_()
    assert all(torch.equal(v, work.evaluated_model.state_dict()[k]) for k, v in student.state_dict().items())


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


def test_best_is_not_fooled_by_a_metric_that_is_not_a_number() -> None:
    class Scripted(compress.Classification):
        scores = iter([float("nan"), 0.4, 0.8])

        def evaluate(self, model: nn.Module, batches: Any) -> dict[str, float]:
            seen.append(copy.deepcopy(model.state_dict()))
            return {"score": next(self.scores)}

    seen: list[Any] = []
    student = cut(dense())[0]
    task = Scripted(loaders(count=128)[0], [first()])
    fine_tune(FineTuneJob(student, dense(), compress.Plan({}, {}), config(), engine(), 6), task, task.train or ())
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


def test_state_of_a_training_goes_round() -> None:
    student = cut(dense())[0]
    work = tuning(student, dense(), ema=0.9, optimizer="adamw", distill={})
    work.step(first())
    work.evaluate()
    saved = {k: v.clone() for k, v in work.state.tensors().items()}
    other = tuning(cut(dense())[0], dense(), ema=0.9, optimizer="adamw", distill={})
    other.state.restore_(saved, work.state.values)
    other.done = work.done
    batch = first()
    work.step(batch)
    other.step(batch)
    again, expected = other.state.tensors(), work.state.tensors()
    assert again.keys() == expected.keys()
    assert all(torch.equal(again[k], expected[k]) for k in expected)
    assert isinstance(other.state, TrainingState)


@pytest.mark.parametrize("division", ["one batch", "micro-batches", "accumulated batches"])
def test_feature_loss_is_the_relative_distance_over_the_whole_step(division: str) -> None:
    """The oracle: the formula on the whole batch, with autograd; one sample has far larger features than the others."""
    torch.manual_seed(3)
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.GELU(), nn.Linear(6, 10)).double()
    student = copy.deepcopy(teacher)
    with torch.no_grad():
        for p in student.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
    x, y = first()[0][:12].double(), first()[1][:12]
    x[2] *= 50
    work = tuning(student, teacher, lr=1e-12, distill={"features": ["1", "3"], "feature_weight": 2, "weight": 0})
    free, features = copy.deepcopy(student), [teacher[: i + 1](x).detach() for i in (1, 3)]
    distances = [(free[:2](x) - features[0]).square().sum(), (free(x) - features[1]).square().sum()]
    feature_loss = sum(d / t.square().sum() for d, t in zip(distances, features, strict=True))  # the mean, times two
    loss = nn.functional.cross_entropy(free(x), y) + feature_loss
    expected = torch.autograd.grad(loss, list(free.parameters()))
    batch: Any = (x, y)
    if division == "accumulated batches":
        batch = AccumulatedBatch([(x[:3], y[:3]), (x[3:8], y[3:8]), (x[8:], y[8:])])
    work.engine.gradient_computer.num_micro_batches = 4 if division == "micro-batches" else 1
    terms = work.step(batch)
    assert terms["features"].item() == pytest.approx(torch.as_tensor(feature_loss).item(), rel=1e-12)
    for p, gradient in zip(student.parameters(), expected, strict=True):
        assert p.grad is not None
        assert torch.allclose(p.grad, gradient, rtol=1e-11, atol=1e-13)
