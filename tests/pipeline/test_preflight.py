"""Checks before a run report all problems at once, before time is spent."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import compress
from helpers.digits import RECIPE, dense, loaders
from helpers.refusals import refused
from helpers.weights import same_weights


def test_training_data_that_are_missing_are_asked_for() -> None:
    refused(r"train: search netslim and finetune need training data, and there is none\. Give train=LOADER")
    refused("train: finetune needs training data", {"budget": {"macs": 0.5}, "finetune": {"epochs": 1}})
    refused("example_inputs: expected the arguments of the model", {"budget": {"macs": 0.5}})


def test_empty_loader_is_named() -> None:
    refused("train: expected at least one batch; the loader gave none", train=[])
    train, _ = loaders()
    refused("val: expected at least one batch; the loader gave none", train=train, val=[])


def test_what_gives_no_batches_is_named() -> None:
    def generator() -> Any:
        yield from loaders()[0]

    refused(
        "train: expected a loader that gives batches; got function. Call it, if it returns a loader", train=generator
    )
    refused("val: expected a loader that gives batches; got function. Call it", train=loaders()[0], val=generator)
    refused("train: expected a loader that gives batches; got int. Give a torch.utils.data.DataLoader", train=64)


@pytest.mark.parametrize(
    ("found", "came"),
    [(None, "NoneType"), (0.9, "float"), ({1: 0.9}, "1: float"), ({"accuracy": "high"}, "'accuracy': str")],
)
def test_measurements_that_are_no_numbers_by_name_are_refused_at_the_start(found: Any, came: str) -> None:
    class Measuring(compress.Classification):
        def evaluate(self, model: nn.Module, batches: Any) -> Any:
            return found

    match = rf"Measuring\.evaluate: expected a dict of numbers by name, such as \{{'accuracy': 0\.9\}}; got {came}\b"
    refused(match, error=TypeError, task=Measuring(*loaders()))


def test_validation_data_that_an_option_needs_are_asked_for() -> None:
    train, _ = loaders()
    recipe = {**RECIPE, "finetune": {"epochs": 1, "best": True}}
    refused("val: finetune.best needs validation data, and there is none", recipe, train=train)
    refused("val: expected a loader that can be read more than once", train=train, val=iter([]))


def test_all_problems_are_reported_at_once() -> None:
    recipe = {**RECIPE, "finetune": {"epochs": 1, "best": True, "distill": {"features": ["stage9", "stage1.0.conv3"]}}}
    text = refused("4 problems", recipe, train=[torch.zeros(3)])
    for part in (
        "finetune.best needs validation data",
        "has no module 'stage9'; the nearest are stage",
        "has no module 'stage1.0.conv3'; the nearest are stage1.0.conv",
        "expected batches of (input, target)",
    ):
        assert part in text, text


def test_model_that_does_not_run_on_the_data_is_named() -> None:
    bad = [(torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.long))]
    refused("the model does not run on the first training batch: RuntimeError: .*channels", train=bad)
    refused("model: expected a torch.nn.Module; got dict", model={"weights": 1}, train=bad)


def test_dataset_in_place_of_a_loader_is_named() -> None:
    pairs = [(torch.zeros(1, 8, 8), torch.tensor(1)), (torch.zeros(1, 8, 8), torch.tensor(0))]
    text = r"expected batches; got single samples, the first a tuple of tensor\[1, 8, 8\], {}\. Wrap .*DataLoader"
    refused(text.format(r"tensor\[\]"), train=pairs)
    refused(text.format("int"), train=[(x, int(y)) for x, y in pairs])
    refused("got single samples, the first a dict of 'image'.*DataLoader", train=[{"image": pairs[0][0], "label": 1}])


def test_name_in_place_of_a_model_is_refused_by_every_call(tmp_path: Path) -> None:
    x = torch.randn(1, 1, 8, 8)
    compress.prune(dense(), {"budget": {"macs": 0.5}}, example_inputs=x, workdir=tmp_path, quiet=True)
    text = r"model: expected a torch\.nn\.Module; got str"
    refused(text, model="resnet18", train=loaders()[0])
    wrong: Any = "resnet18"
    with pytest.raises(compress.NotReady, match=text):
        compress.load(wrong, tmp_path)
    with pytest.raises(compress.NotReady, match=text):
        compress.preview(wrong, RECIPE, example_inputs=x)


def test_data_with_nan_are_found_at_the_first_batch() -> None:
    bad = [(torch.full((4, 1, 8, 8), math.nan), torch.zeros(4, dtype=torch.long))]
    refused("the loss of the first training batch is nan", train=bad)


def test_attention_is_not_looked_for_in_a_network_without() -> None:
    train, _ = loaders()
    recipe = {**RECIPE, "target": {"attention": True, "channels": False}}
    refused(
        r"target.attention: no attention was found in the model; it has channels and residual\.",
        recipe,
        train=train,
    )
    with pytest.raises(compress.NotReady, match=r"target\.attention: no attention was found"):
        compress.preview(dense(), recipe, example_inputs=torch.randn(1, 1, 8, 8))


def test_budget_out_of_reach_is_found_before_the_search() -> None:
    class Counting(compress.Classification):
        steps = 0

        def loss(self, outputs: Any, batch: Any) -> Tensor:
            self.steps += 1
            return super().loss(outputs, batch)

    task = Counting(*loaders())
    refused(
        "budget.macs: 1% .*cannot be reached",
        {**RECIPE, "budget": {"macs": "1%"}},
        error=compress.BudgetError,
        task=task,
    )
    assert task.steps <= 1 + len(list(task.val or ()))


def test_loss_that_is_not_one_number_is_named() -> None:
    class Rows(compress.Classification):
        def loss(self, outputs: Any, batch: Any) -> Tensor:
            return nn.functional.cross_entropy(outputs, batch[1], reduction="none")

    refused("task.loss: expected a tensor with one number", task=Rows(*loaders()))


def test_mixing_needs_a_task_that_can() -> None:
    from helpers.own_task import RegressionFromProtocol

    recipe = {**RECIPE, "finetune": {"epochs": 1, "mixup": 0.2}}
    refused(
        "finetune.mixup: needs soft targets, and Regression.* has no method `soften`",
        recipe,
        task=RegressionFromProtocol(),
    )


@pytest.mark.parametrize(
    ("finetune", "match"),
    [
        (
            {"distill": {"features": ["stage1.0.unused"]}},
            "stage1.0.unused is not called, or returns no tensor of features",
        ),
        ({"momentum": 1.0}, "finetune.momentum: input should be less than 1"),
    ],
)
def test_finetuning_that_cannot_work_is_found_before_the_search(finetune: dict[str, Any], match: str) -> None:
    model = dense()
    model.stage1[0].unused = nn.ReLU()
    error = compress.RecipeError if "momentum" in finetune else compress.NotReady
    refused(match, {**RECIPE, "finetune": {"epochs": 1, **finetune}}, model, error, train=loaders()[0])


def test_frozen_models_and_batches_of_one_are_found_before_the_search() -> None:
    model = dense()
    for p in model.parameters():
        p.requires_grad_(False)
    refused("no parameter that requires a gradient", model=model, train=loaders()[0])
    search_only = {**RECIPE, "search": {"method": "rarts", "epochs": "2 steps"}, "finetune": None}
    refused("^the model has no parameter that requires a gradient", search_only, model, train=loaders()[0])
    tiny = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    refused(
        "Does the batch have only one image\\? Give the loader drop_last=True", model=tiny, train=loaders(batch=1)[0]
    )


def test_ignored_targets_serve_with_every_option() -> None:
    pairs = [(torch.randn(8, 1, 8, 8), torch.tensor([0, 1, -100, 3, 4, -100, 6, 7])) for _ in range(2)]
    for option in ({"label_smoothing": 0.1}, {"mixup": 0.2}, {}):
        recipe = {**RECIPE, "search": {"method": "magnitude"}, "finetune": {"epochs": "2 steps", **option}}
        pruned = compress.prune(dense(), recipe, train=pairs, val=pairs, quiet=True)
        assert round(6 * 2 * pruned.report.dense.metrics["accuracy"], 6).is_integer()


def test_regression_is_not_taken_for_classes() -> None:
    pairs = [(torch.randn(8, 1, 8, 8), torch.rand(8))]
    refused("targets: expected class numbers; got fractions. If the network predicts numbers, give", train=pairs)


def test_mixing_of_mixed_targets_is_refused() -> None:
    pairs = [(torch.randn(8, 1, 8, 8), torch.softmax(torch.randn(8, 10), 1))]
    recipe = {**RECIPE, "finetune": {"epochs": 1, "mixup": 0.2}}
    refused("mixup, cutmix: the targets of the loader are probabilities already", recipe, train=pairs)


def test_nothing_to_cut_is_an_error() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    recipe = {**RECIPE, "budget": {"macs": "100%"}}
    refused(
        "target: there is nothing to cut; refused groups: 1; reasons: its dimension is an output of the network",
        recipe,
        model,
        train=loaders()[0],
    )


def test_outputs_and_batches_of_hugging_face_serve() -> None:
    from collections import UserDict

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = dense()

        def forward(self, x: Tensor) -> Any:
            return {"logits": self.net(x)}

    pairs = list(loaders(count=128)[0])
    named = [UserDict({"pixel_values": x, "labels": y}) for x, y in pairs]
    recipe = {**RECIPE, "search": {"method": "magnitude"}, "finetune": {"epochs": "2 steps", "label_smoothing": 0.1}}
    pruned = compress.prune(Named(), recipe, train=named, quiet=True)
    plain = compress.prune(dense(), recipe, train=pairs, quiet=True)
    assert same_weights(pruned.model.net, plain.model)  # type: ignore[arg-type]


def test_half_precision_brains_float_goes_through() -> None:
    pairs = [(x.bfloat16(), y) for x, y in list(loaders(count=128)[0])]
    recipe = {**RECIPE, "search": {"method": "netslim", "epochs": "2 steps"}, "finetune": None}
    pruned = compress.prune(dense().bfloat16(), recipe, train=pairs, quiet=True)
    assert pruned.report.pruned.macs <= pruned.report.dense.macs / 2


def test_costs_are_those_of_one_example_however_it_is_wrapped() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = dense()

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.net(batch["image"])

    x = torch.randn(16, 1, 8, 8)
    one = compress.prune(dense(), {"budget": {"macs": 0.5}}, example_inputs=x, quiet=True)
    other = compress.prune(Wrapped(), {"budget": {"macs": 0.5}}, example_inputs=({"image": x},), quiet=True)
    assert other.report.dense.macs == one.report.dense.macs


def test_rounding_waits_for_the_last_round() -> None:
    """A budget that is met tightly in one round is met as tightly in three."""
    x = torch.randn(1, 1, 8, 8)
    recipe = {"budget": {"macs": "50%"}, "target": {"round_to": 8, "min_keep": 8}, "timing": {"repeats": 3}}
    once = compress.prune(dense(), recipe, example_inputs=x, quiet=True).report.pruned.macs
    thrice = compress.prune(dense(), {**recipe, "steps": 3}, example_inputs=x, quiet=True).report.pruned.macs
    assert thrice >= 0.85 * once


def test_models_that_cannot_be_copied_or_cut_are_named() -> None:
    masked = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 2, 3))
    prune.l1_unstructured(masked[0], "weight", 0.5)  # type: ignore[no-untyped-call]
    with pytest.warns(FutureWarning):
        script = torch.jit.script(nn.Conv2d(1, 4, 3))
    for model, text in (
        (script, "model: TorchScript cannot be cut; pass the Python module"),
        (nn.Sequential(nn.LazyConv2d(4, 3)), "model: 0.weight has no shape yet .*; run the model on one batch first"),
        (nn.Conv2d(1, 4, 3, device="meta"), "model: weight is on the meta device and has no values"),
        (masked, r"model: 0.weight is computed from other tensors.*prune\.remove"),
        (
            nn.Sequential(nn.ReLU(), nn.Flatten()),
            "model: the model has no linear layer or convolution",
        ),
    ):
        with pytest.raises(compress.NotReady, match=text):
            compress.prune(model, {"budget": {"macs": 0.5}}, example_inputs=torch.randn(2, 1, 8, 8), quiet=True)
