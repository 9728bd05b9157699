"""Classification from whatever loaders people have; the distillation loss against hand-computed numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from digits import dense, loaders
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import compress
from compress.task import BatchError, Classification, check_task, distillation, logits_of, task_from

RECIPE: dict[str, Any] = {
    "budget": {"macs": "60%"},
    "search": {"method": "netslim", "epochs": "4 steps"},
    "finetune": {"epochs": "4 steps", "distill": {}},
    "timing": {"repeats": 3},
}


def softmax(row: list[float], temperature: float) -> list[float]:
    numbers = [math.exp(value / temperature) for value in row]
    return [n / sum(numbers) for n in numbers]


def test_distillation_is_the_formula_on_hand_computed_numbers() -> None:
    student, teacher, t = [[1.0, 2.0, 0.5], [0.0, -1.0, 3.0]], [[2.0, 0.0, 1.0], [1.0, 1.0, 1.0]], 4.0
    total = 0.0
    for s, h in zip(student, teacher, strict=True):
        p, q = softmax(h, t), softmax(s, t)
        total += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    got = distillation(torch.tensor(student, dtype=torch.float64), torch.tensor(teacher, dtype=torch.float64), t)
    assert float(got) == pytest.approx(total / 2, rel=1e-12)


def test_distillation_on_numbers_worked_out_on_paper() -> None:
    """T = 1, teacher (1/2, 1/2), student (1/4, 3/4): 1/2 ln 2 + 1/2 ln 2/3."""
    student = torch.tensor([[0.0, math.log(3.0)]], dtype=torch.float64)
    teacher = torch.zeros(1, 2, dtype=torch.float64)
    expected = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert float(distillation(student, teacher, 1.0)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("temperature", [0, -1.0, math.nan, math.inf])
def test_distillation_refuses_a_temperature_that_is_not_positive(temperature: float) -> None:
    with pytest.raises(ValueError, match=f"expected a positive temperature, such as 4; got {temperature}"):
        distillation(torch.randn(2, 3), torch.randn(2, 3), temperature)


def test_distillation_refuses_a_teacher_that_would_be_stretched() -> None:
    wanted = r"expected logits of one shape; got tensor\[8, 10\] of the student and tensor\[1, 10\] of the teacher"
    with pytest.raises(ValueError, match=wanted):
        distillation(torch.randn(8, 10), torch.randn(1, 10))


def test_teacher_as_its_own_student_has_no_loss() -> None:
    logits = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    loss = distillation(logits, logits.detach(), 4.0)
    assert abs(float(loss.detach())) < 1e-15
    (gradient,) = torch.autograd.grad(loss, logits)
    assert float(gradient.abs().max()) < 1e-15


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_gradient_of_distillation_agrees_with_finite_differences_and_the_closed_form(temperature: float) -> None:
    student = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(3, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda s: distillation(s, teacher, temperature), (student,))
    (gradient,) = torch.autograd.grad(distillation(student, teacher, temperature), student)
    p, q = (teacher / temperature).softmax(1), (student / temperature).softmax(1)
    assert torch.allclose(gradient, (q - p) / temperature / 3, atol=1e-14)


class Endless(IterableDataset[Any]):
    """No length, as of a stream."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


def batches() -> list[Any]:
    return [(x, y) for x, y in loaders(count=256)[0]]


def forms() -> dict[str, Any]:
    pairs = batches()
    return {
        "a list of pairs": pairs,
        "lists instead of tuples": [[x, y] for x, y in pairs],
        "a dict with image and label": [{"image": x, "label": y} for x, y in pairs],
        "a dict of Hugging Face": [{"pixel_values": x, "labels": y} for x, y in pairs],
        "more than two items": [(x, y, ["name"] * len(y)) for x, y in pairs],
        "targets as a column": [(x, y[:, None]) for x, y in pairs],
        "targets as bytes": [(x, y.to(torch.uint8)) for x, y in pairs],
        "rows of probabilities": [(x, nn.functional.one_hot(y, 10).float()) for x, y in pairs],
        "a stream without length": DataLoader(Endless(pairs), batch_size=None),
        "workers": DataLoader(TensorDataset(*(torch.cat(t) for t in zip(*pairs, strict=True))), 64, num_workers=1),
    }


@pytest.mark.parametrize("name", forms())
def test_loaders_that_people_have(name: str) -> None:
    loader = forms()[name]
    pruned = compress.prune(dense(), RECIPE, train=loader, val=loader, quiet=True)
    assert pruned.report.pruned.metrics.keys() == {"accuracy", "loss"}


@pytest.mark.parametrize("length", ["2 epochs", 0.5])
def test_epochs_of_a_stream_without_length_are_counted(length: Any) -> None:
    loader = DataLoader(Endless(batches()), batch_size=None)
    recipe = {**RECIPE, "search": {"method": "netslim", "epochs": length}, "finetune": None}
    pruned = compress.prune(dense(), recipe, train=loader, quiet=True)
    assert pruned.report.history[-1]["step"] == (8 if length == "2 epochs" else 2)


def test_generator_is_read_as_far_as_the_steps_go() -> None:
    pairs = batches() * 3
    pruned = compress.prune(dense(), RECIPE, train=iter(pairs), quiet=True)
    assert [r["step"] for r in pruned.report.history][-1] == 4
    with pytest.raises(BatchError, match="finetune: expected 1 batches more; the iterator ended"):
        compress.prune(dense(), RECIPE, train=iter(pairs[:7]), quiet=True)
    with pytest.raises(BatchError, match=r'read only once and has no length; give a DataLoader, or say .* "500 steps"'):
        compress.prune(dense(), {**RECIPE, "finetune": {"epochs": 1}}, train=iter(pairs), quiet=True)


def test_named_keys_and_functions_say_where_things_lie() -> None:
    odd = [{"picture": x, "meta": {"kind": y}} for x, y in batches()]
    task = Classification(odd, odd, input="picture", target=lambda batch: batch["meta"]["kind"])
    pruned = compress.prune(dense(), RECIPE, task=task, quiet=True)
    assert pruned.report.pruned.metrics["accuracy"] > 0


def test_loader_of_timm() -> None:
    from timm.data import create_loader

    class Images(torch.utils.data.Dataset[Any]):
        transform: Any = None

        def __len__(self) -> int:
            return 16

        def __getitem__(self, i: int) -> Any:
            from PIL import Image

            return self.transform(Image.new("RGB", (40, 40), (10 * i, 0, 90))), i % 10

    loader = create_loader(
        Images(),
        (3, 16, 16),
        8,
        is_training=True,
        use_prefetcher=False,
        num_workers=0,
        no_aug=True,
        persistent_workers=False,
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten())
    model.append(nn.Linear(8 * 12 * 12, 10))
    recipe = {**RECIPE, "budget": {"macs": "70%"}}
    pruned = compress.prune(model, recipe, train=loader, val=loader, quiet=True)
    assert "accuracy" in pruned.report.pruned.metrics


def test_loader_of_torchvisions_reference_with_mixed_targets() -> None:
    """The reference scripts mix in the collate function: targets are rows of probabilities."""
    from torch.utils.data import default_collate
    from torchvision.transforms import v2

    from compress.data import digits

    mix = v2.RandomChoice([v2.MixUp(num_classes=10), v2.CutMix(num_classes=10)])
    loader = DataLoader(digits()[0], 64, shuffle=True, collate_fn=lambda batch: mix(*default_collate(batch)))
    pruned = compress.prune(dense(), RECIPE, train=loader, val=loaders()[1], quiet=True)
    last = pruned.report.history[-2]
    assert last["task"] > 0.5, "mixed targets cannot be met: their entropy is left"


class Regression:
    """A task of one's own, from the protocol alone."""

    def __init__(self) -> None:
        self.train = [torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(4)]
        self.val = self.train[:1]
        self.distilled = 0

    def inputs(self, batch: Tensor) -> Any:
        return batch

    def forward(self, model: nn.Module, batch: Tensor) -> Any:
        return {"out": model(batch)}

    def loss(self, outputs: Any, batch: Tensor) -> Tensor:
        return outputs["out"].square().mean()

    def evaluate(self, model: nn.Module, batches: Any) -> dict[str, float]:
        assert not model.training
        return {"quality": -float(sum(self.loss(self.forward(model, b), b) for b in batches))}

    def distil(self, outputs: Any, teacher: Any, temperature: float) -> Tensor:
        self.distilled += 1
        assert not teacher["out"].requires_grad
        return (outputs["out"] - teacher["out"]).square().mean()


def test_task_of_ones_own_is_enough() -> None:
    task = Regression()
    pruned = compress.prune(dense(), RECIPE, task=task, quiet=True)
    assert pruned.report.pruned.metrics.keys() == {"quality"}
    assert task.distilled == 1 + 4  # once to see that it works
    assert isinstance(task, compress.Task)


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (torch.zeros(4, 1, 8, 8), r"got tensor\[4, 1, 8, 8\] \(TypeError: neither a pair nor a dict\)"),
        ([torch.zeros(4, 1, 8, 8)], r"got a list of tensor\[4, 1, 8, 8\]"),
        (
            {"picture": torch.zeros(4, 1, 8, 8), "label": torch.zeros(4)},
            r"got a dict of 'picture': .*KeyError: 'image'",
        ),
        (("names", torch.zeros(4)), "got a tuple of str, tensor.*input and target are to be tensors"),
        ((torch.zeros(4, 1, 8, 8), torch.zeros(3)), "one class number, or one row of probabilities, an image"),
        ((torch.zeros(4, 1, 8, 8), torch.zeros(4, 8, 8)), "one class number"),
    ],
)
def test_other_batches_are_described_with_the_two_lines_that_mend_it(batch: Any, text: str) -> None:
    with pytest.raises(compress.NotReady, match=text) as caught:
        compress.prune(dense(), RECIPE, train=[batch], quiet=True)
    assert "task = compress.Classification(train, val, input=lambda batch: ..., target=lambda batch: ...)" in str(
        caught.value
    )
    assert "compress.prune(model, recipe, task=task)" in str(caught.value)


@pytest.mark.parametrize("target", [10, -1])
def test_targets_outside_the_classes_are_named(target: int) -> None:
    pairs = [(torch.zeros(4, 1, 8, 8), torch.tensor([0, target, 1, 2]))]
    with pytest.raises(
        compress.NotReady, match=rf"expected classes 0 to 9, as the model has 10 outputs; got {target}\."
    ):
        compress.prune(dense(), RECIPE, train=pairs, quiet=True)


def test_targets_outside_the_classes_are_found_in_later_batches_too() -> None:
    good = (torch.zeros(4, 1, 8, 8), torch.tensor([0, 1, 2, 3]))
    bad = (torch.zeros(4, 1, 8, 8), torch.tensor([0, 1, 2, 33]))
    with pytest.raises(BatchError, match=r"expected classes 0 to 9.*got 33"):
        compress.prune(dense(), RECIPE, train=[good, good, bad], quiet=True)
    with pytest.raises(BatchError, match="expected rows of 10 probabilities, got rows of 7"):
        Classification().loss(torch.zeros(4, 10), (torch.zeros(4, 1), torch.zeros(4, 7)))


def test_model_that_returns_something_else_is_told_of_tasks() -> None:
    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 4, 3)

        def forward(self, x: Tensor) -> Any:
            return {"masks": self.conv(x)}

    with pytest.raises(
        compress.NotReady, match=r"expected a row of class scores an image, got a dict of 'masks'.*task"
    ):
        compress.prune(Dense(), RECIPE, train=batches(), quiet=True)
    with pytest.raises(BatchError, match=r"got a tensor of shape \[4, 4, 6, 6\]"):
        logits_of(torch.zeros(4, 4, 6, 6))


def test_logits_are_found_in_the_usual_outputs() -> None:
    logits = torch.randn(2, 3)

    class Output:
        pass

    output = Output()
    output.logits = logits  # type: ignore[attr-defined]
    for form in (logits, {"logits": logits}, output, (logits, torch.zeros(2, 3)), [logits]):
        assert logits_of(form) is logits


def test_evaluation_is_what_counting_gives() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 12)
    data = [(torch.randn(5, 6), torch.randint(0, 12, (5,))) for _ in range(3)]
    found = Classification(None, data).evaluate(model, data)
    x, y = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    logits = model(x)
    assert found["accuracy"] == float((logits.argmax(1) == y).float().mean())
    ranks = (logits > logits.gather(1, y[:, None])).sum(1)
    assert found["top5"] == pytest.approx(float((ranks < 5).float().mean()))
    assert found["loss"] == pytest.approx(float(nn.functional.cross_entropy(logits, y)), rel=1e-6)
    with pytest.raises(BatchError, match="val: expected at least one batch with targets"):
        Classification().evaluate(model, [])


def test_soft_targets_are_what_label_smoothing_makes() -> None:
    logits, y = torch.randn(6, 5), torch.randint(0, 5, (6,))
    soft = Classification().soften((torch.zeros(6, 1), y), 5, 0.1)
    expected = nn.functional.cross_entropy(logits, y, label_smoothing=0.1)
    assert float(Classification().loss(logits, soft)) == pytest.approx(float(expected), rel=1e-6)


def test_tasks_by_name_and_what_is_wrong_with_them() -> None:
    assert isinstance(task_from("compress.task:Classification"), Classification)
    with pytest.raises(
        ValueError, match=r"task nowhere:make: No module named 'nowhere'. Expected package.module:factory"
    ):
        task_from("nowhere:make")
    with pytest.raises(ValueError, match=r"task compress.task:nothing: .*has no attribute"):
        task_from("compress.task:nothing")
    with pytest.raises(TypeError, match=r"expected a compress.Task; dict has no train, val, inputs, forward, loss"):
        check_task({})
    with pytest.raises(compress.NotReady, match="a task brings its own data"):
        compress.prune(dense(), RECIPE, task=Regression(), train=[], quiet=True)
