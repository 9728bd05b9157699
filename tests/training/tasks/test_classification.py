"""Classification: batches in all common forms, targets, evaluation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import compress
from compress.errors import BatchError
from compress.training.tasks.classification import Classification, logits_of
from helpers.digit_batches import EndlessDataset, digit_batches
from helpers.digits import FOUR_STEPS, dense, loaders
from helpers.regression import RegressionTask
from helpers.weights import same_weights


def forms() -> dict[str, Any]:
    pairs = digit_batches()
    return {
        "a list of pairs": pairs,
        "lists instead of tuples": [[x, y] for x, y in pairs],
        "a dict with image and label": [{"image": x, "label": y} for x, y in pairs],
        "a dict of Hugging Face": [{"pixel_values": x, "labels": y} for x, y in pairs],
        "more than two items": [(x, y, ["name"] * len(y)) for x, y in pairs],
        "targets as a column": [(x, y[:, None]) for x, y in pairs],
        "targets as bytes": [(x, y.to(torch.uint8)) for x, y in pairs],
        "rows of probabilities": [(x, nn.functional.one_hot(y, 10).float()) for x, y in pairs],
        "a stream without length": DataLoader(EndlessDataset(pairs), batch_size=None),
        "workers": DataLoader(TensorDataset(*(torch.cat(t) for t in zip(*pairs, strict=True))), 64, num_workers=1),
    }


@pytest.mark.parametrize("name", forms())
def test_common_loaders_work(name: str) -> None:
    loader = forms()[name]
    pruned = compress.prune(dense(), FOUR_STEPS, train=loader, val=loader, quiet=True)
    assert pruned.report.pruned.metrics.keys() == {"accuracy", "loss"}


def test_named_keys_and_functions_say_where_things_lie() -> None:
    pairs = digit_batches()
    odd = [{"picture": x, "meta": {"kind": y}} for x, y in pairs]
    task = Classification(odd, odd, input="picture", target=lambda batch: batch["meta"]["kind"])
    pruned = compress.prune(dense(), FOUR_STEPS, task=task, quiet=True)
    plain = compress.prune(dense(), FOUR_STEPS, train=pairs, val=pairs, quiet=True)
    assert same_weights(pruned.model, plain.model)
    assert pruned.report.pruned.metrics == plain.report.pruned.metrics


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
    recipe = {**FOUR_STEPS, "budget": {"macs": "70%"}}
    pruned = compress.prune(model, recipe, train=loader, val=loader, quiet=True)
    assert "accuracy" in pruned.report.pruned.metrics


def test_loader_of_torchvisions_reference_with_mixed_targets() -> None:
    """The reference scripts mix in the collate function: targets are rows of probabilities."""
    from torch.utils.data import default_collate
    from torchvision.transforms import v2

    from compress.data.named_loaders import digits_datasets

    mix = v2.RandomChoice([v2.MixUp(num_classes=10), v2.CutMix(num_classes=10)])
    loader = DataLoader(digits_datasets()[0], 64, shuffle=True, collate_fn=lambda batch: mix(*default_collate(batch)))
    pruned = compress.prune(dense(), FOUR_STEPS, train=loader, val=loaders()[1], quiet=True)
    last = pruned.report.history[-2]
    assert last["task"] > 0.5, "mixed targets cannot be met: their entropy is left"


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (
            {"picture": torch.zeros(4, 1, 8, 8), "label": torch.zeros(4)},
            r"got a dict of 'picture': .*KeyError: 'image'",
        ),
        (("names", torch.zeros(4)), "got a tuple of str, tensor.*input and target must be tensors"),
        ((torch.zeros(4, 1, 8, 8), torch.zeros(3)), "one class number, or one row of probabilities, per image"),
    ],
)
def test_other_batches_are_described_with_two_lines_that_fix_it(batch: Any, text: str) -> None:
    with pytest.raises(compress.NotReady, match=text) as caught:
        compress.prune(dense(), FOUR_STEPS, train=[batch], quiet=True)
    assert "task = compress.Classification(train, val, input=lambda batch: ..., target=lambda batch: ...)" in str(
        caught.value
    )
    assert "compress.prune(model, recipe, task=task)" in str(caught.value)


@pytest.mark.parametrize("target", [10, -1])
def test_targets_outside_the_classes_are_named(target: int) -> None:
    pairs = [(torch.zeros(4, 1, 8, 8), torch.tensor([0, target, 1, 2]))]
    with pytest.raises(
        compress.NotReady, match=rf"expected classes 0 to 9, because the model has 10 outputs; got {target}\."
    ):
        compress.prune(dense(), FOUR_STEPS, train=pairs, quiet=True)


def test_targets_outside_the_classes_are_found_in_later_batches_too() -> None:
    good = (torch.zeros(4, 1, 8, 8), torch.tensor([0, 1, 2, 3]))
    bad = (torch.zeros(4, 1, 8, 8), torch.tensor([0, 1, 2, 33]))
    with pytest.raises(BatchError, match=r"expected classes 0 to 9.*got 33"):
        compress.prune(dense(), FOUR_STEPS, train=[good, good, bad], quiet=True)
    with pytest.raises(BatchError, match="expected rows of 10 probabilities, got rows of 7"):
        Classification().loss(torch.zeros(4, 10), (torch.zeros(4, 1), torch.zeros(4, 7)))


def test_model_that_returns_something_else_needs_a_task() -> None:
    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 4, 3)

        def forward(self, x: Tensor) -> Any:
            return {"masks": self.conv(x)}

    with pytest.raises(
        compress.NotReady, match=r"expected one row of class scores per image, got a dict of 'masks'.*task"
    ):
        compress.prune(Dense(), FOUR_STEPS, train=digit_batches(), quiet=True)
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


def test_ignored_targets_are_not_counted_and_the_loss_over_none_is_zero() -> None:
    task, logits = compress.Classification(), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    images = torch.zeros(3, 2)
    some, none = torch.tensor([1, -100, 3]), torch.full((3,), -100)
    assert [task.count_targets((images, y)) for y in (some, none, torch.rand(3, 4))] == [2, 0, 3]
    exact = -(logits.log_softmax(1)[0, 1] + logits.log_softmax(1)[2, 3]) / 2
    assert task.loss(logits, (images, some)).item() == pytest.approx(exact.item(), rel=1e-12)
    empty = task.loss(logits, (images, none))
    (gradient,) = torch.autograd.grad(empty, logits)
    assert empty.item() == 0 and not bool(gradient.any())
    softened = task.soften((images, none), 4, 0.1)
    assert task.count_targets(softened) == 0 and len(softened.input) == 3
    assert task.count_targets(task.soften((images, some), 4, 0.1)) == 2


def test_losses_and_entropies_of_samples_are_those_of_the_softmax_also_at_certainty() -> None:
    task, images = compress.Classification(), torch.zeros(4, 2)
    logits = torch.tensor([[2.0, 1, 0], [0, 3, 0], [0, 0, 0], [0, -torch.inf, -torch.inf]], dtype=torch.float64)
    found = task.sample_losses(logits, (images, torch.tensor([1, 1, -100, 0])))
    z = [math.exp(2) + math.exp(1) + 1, math.exp(3) + 2]
    assert found.loss.tolist()[:2] == pytest.approx([math.log(z[0]) - 1, math.log(z[1]) - 3])
    p = [[math.exp(value) / z[i] for value in logits[i].tolist()] for i in range(2)]
    entropies = [-sum(q * math.log(q) for q in row) for row in p]
    assert found.entropy.tolist() == pytest.approx([*entropies, math.log(3), 0])
    assert found.right.tolist()[:2] == [False, True] and found.right[3]
    assert found.counted.tolist() == [True, True, False, True]
    rows = torch.tensor([[0.5, 0.5, 0], [0, 1, 0], [0, 0, 0], [1, 0, 0]], dtype=torch.float64)
    soft = task.sample_losses(logits[:3], (images[:3], rows[:3]))
    assert soft.loss.tolist() == pytest.approx([math.log(z[0]) - 1.5, math.log(z[1]) - 3, 0])
    assert soft.counted.tolist() == [True, True, False]
    assert task.sample_losses(logits.half(), (images, torch.zeros(4))).loss.dtype == torch.float32


def test_tasks_that_cannot_tell_right_from_wrong_return_none() -> None:
    assert RegressionTask().sample_losses(torch.zeros(2, 1), (torch.zeros(2, 1), torch.zeros(2, 1))) is None
