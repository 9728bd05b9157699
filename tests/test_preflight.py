"""What is wrong is said before an hour is spent, all of it at once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from digits import RECIPE, dense, loaders
from torch import Tensor, nn
from torch.nn.utils import prune

import compress
from compress.checkpoint import Store
from compress.data import loaders as loaders_by_name
from compress.recipe import Data


def refused(
    match: str, recipe: Any = RECIPE, model: Any = None, error: type[Exception] = compress.NotReady, **given: Any
) -> str:
    with pytest.raises(error, match=match) as caught:
        compress.prune(dense() if model is None else model, recipe, quiet=True, **given)
    return str(caught.value)


def test_training_data_that_are_missing_are_asked_for() -> None:
    refused(r"train: search netslim and finetune need training data, and there is none\. Give train=LOADER")
    refused("train: finetune needs training data", {"budget": {"macs": 0.5}, "finetune": {"epochs": 1}})
    refused("example_inputs: expected what the model is called with", {"budget": {"macs": 0.5}})


def test_empty_loader_is_named() -> None:
    refused("train: expected at least one batch; the loader gave none", train=[])
    train, _ = loaders()
    refused("val: expected at least one batch; the loader gave none", train=train, val=[])


def test_what_gives_no_batches_is_named() -> None:
    def generator() -> Any:
        yield from loaders()[0]

    refused("train: expected a loader, which gives batches; got function. Call it, if it makes one", train=generator)
    refused("val: expected a loader, which gives batches; got function. Call it", train=loaders()[0], val=generator)
    refused("train: expected a loader, which gives batches; got int. Give a torch.utils.data.DataLoader", train=64)


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


def test_everything_is_said_at_once() -> None:
    recipe = {**RECIPE, "finetune": {"epochs": 1, "best": True, "distill": {"features": ["stage9", "stage1.0.conv3"]}}}
    text = refused("4 things to mend", recipe, train=[torch.zeros(3)])
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


@pytest.mark.parametrize("stage", ["search", "finetune"])
def test_loss_that_stops_being_a_number_names_step_and_terms(stage: str, tmp_path: Path) -> None:
    train, _ = loaders()
    recipe = {**RECIPE, stage: {**RECIPE[stage], "lr": 1e12, "schedule": "constant"}}
    pattern = rf"{stage}, step \d+ of \d+: the loss is not finite \(loss .*task .*\)\. Lower its lr"
    text = refused(pattern, recipe, train=train, error=compress.Diverged, workdir=tmp_path)
    assert "start anew (in another workdir" in text


def test_every_term_of_a_bilevel_loss_is_named_and_the_last_good_checkpoint_stays(tmp_path: Path) -> None:
    """The second half of the data turns into NaN after five steps; what was saved before is whole, and can be read."""
    train, _ = loaders()
    images, labels = next(iter(train))
    good = [(images, labels)] * 10
    bad = [*good, (images, labels), (images * math.nan, labels)]

    class Saving(Store):
        def save(self, tensors: Any, facts: Any) -> None:
            assert all(bool(torch.isfinite(t).all()) for t in tensors.values() if t.is_floating_point())
            super().save(tensors, facts)

    recipe = {**RECIPE, "search": {"method": "rarts", "epochs": "6 steps", "lr": 0.01}}
    pattern = r"search, step 6 of 6: .*loss nan, primary [\d.]+, auxiliary nan, penalty"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compress.run.Store", Saving)
        patch.setattr("compress.engine.Engine._due", lambda self: True)
        refused(pattern, recipe, train=bad, error=compress.Diverged, workdir=tmp_path)
    found = Store(tmp_path).load()
    assert found is not None
    assert found[1]["done"] >= 1


def test_attention_is_not_looked_for_in_a_network_without() -> None:
    train, _ = loaders()
    recipe = {**RECIPE, "target": {"attention": True, "channels": False}}
    refused(
        r"target.attention: the model has no dimensions that pass .*; it has channels and residual\.",
        recipe,
        train=train,
    )
    with pytest.raises(compress.NotReady, match=r"target\.attention: the model has no dimensions"):
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


def test_loader_that_breaks_half_way_leaves_its_own_error() -> None:
    def broken() -> Any:
        yield from list(loaders()[0])[:5]
        raise OSError("the disk is gone")

    refused(
        "the disk is gone",
        {**RECIPE, "search": {"method": "netslim", "epochs": "9 steps"}, "finetune": None},
        train=broken(),
        error=OSError,
    )


def test_loss_that_is_not_one_number_is_named() -> None:
    class Rows(compress.Classification):
        def loss(self, outputs: Any, batch: Any) -> Tensor:
            return nn.functional.cross_entropy(outputs, batch[1], reduction="none")

    refused("task.loss: expected a tensor with one number", task=Rows(*loaders()))


def test_mixing_needs_a_task_that_can() -> None:
    from test_task import Regression

    recipe = {**RECIPE, "finetune": {"epochs": 1, "mixup": 0.2}}
    refused("finetune.mixup: Regression has no `soften`", recipe, task=Regression())


@pytest.mark.parametrize(
    ("source", "match", "error"),
    [
        ("digit", "data.source 'digit': expected digits, cifar10:FOLDER", ValueError),
        ("cifar10:", "expected digits, cifar10:FOLDER", ValueError),
        ("cifar10:nowhere", "found neither torchvision's cifar10 nor train.npz", FileNotFoundError),
        ("folder:nowhere", "expected train/ and val/ there; train/ is missing", FileNotFoundError),
        ("no.such.module:make", "No module named 'no'", ValueError),
        ("compress.data:nothing", "has no attribute", ValueError),
        ("builtins:dict", "expected \\(train, val\\) loaders; got dict", ValueError),
    ],
)
def test_sources_that_do_not_exist_are_named(source: str, match: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=match):
        loaders_by_name(Data(source=source))
    refused(match, {**RECIPE, "data": {"source": source}})


def test_folders_of_images_are_read(tmp_path: Path) -> None:
    from PIL import Image

    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(3):
                Image.new("RGB", (40, 30), (50 * i, 90, 20)).save(tmp_path / split / name / f"{i}.png")
    train, val = loaders_by_name(Data(source=f"folder:{tmp_path}", batch_size=2, size=16))
    x, _ = next(iter(train or ()))
    assert x.shape == (2, 3, 16, 16)
    assert len(list(val or ())) == 3
    assert set(torch.cat([y for _, y in val or ()]).tolist()) == {0, 1}


def test_archives_of_jpegs_are_read(tmp_path: Path) -> None:
    import io

    import numpy as np
    from PIL import Image

    for split in ("train", "test"):
        files = []
        for i in range(5):
            file = io.BytesIO()
            Image.new("RGB", (32, 32), (40 * i, 0, 0)).save(file, "JPEG")
            files.append(np.frombuffer(file.getvalue(), dtype=np.uint8))
        offset = np.cumsum([0, *map(len, files)])
        np.savez(tmp_path / f"{split}.npz", jpeg=np.concatenate(files), offset=offset, label=np.arange(5))
    train, val = loaders_by_name(Data(source=f"cifar10:{tmp_path}", batch_size=5))
    assert next(iter(train or ()))[0].shape == (5, 3, 32, 32)
    assert next(iter(val or ()))[1].tolist() == [0, 1, 2, 3, 4]


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
    tiny = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    refused("A batch of one image\\? Give the loader drop_last=True", model=tiny, train=loaders(batch=1)[0])


def test_ignored_targets_serve_with_every_option() -> None:
    pairs = [(torch.randn(8, 1, 8, 8), torch.tensor([0, 1, -100, 3, 4, -100, 6, 7])) for _ in range(2)]
    for option in ({"label_smoothing": 0.1}, {"mixup": 0.2}, {}):
        recipe = {**RECIPE, "search": {"method": "magnitude"}, "finetune": {"epochs": "2 steps", **option}}
        pruned = compress.prune(dense(), recipe, train=pairs, val=pairs, quiet=True)
        assert round(6 * 2 * pruned.report.dense.metrics["accuracy"], 6).is_integer()


def test_regression_is_not_taken_for_classes() -> None:
    pairs = [(torch.randn(8, 1, 8, 8), torch.rand(8))]
    refused("targets: expected class numbers; got fractions. Classification is not for regression", train=pairs)


def test_mixing_of_mixed_targets_is_refused() -> None:
    pairs = [(torch.randn(8, 1, 8, 8), torch.softmax(torch.randn(8, 10), 1))]
    recipe = {**RECIPE, "finetune": {"epochs": 1, "mixup": 0.2}}
    refused("mixup, cutmix: the loader gives rows of probabilities, mixed already", recipe, train=pairs)


def test_nothing_to_cut_is_said() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    recipe = {**RECIPE, "budget": {"macs": "100%"}}
    refused(
        "target: there is nothing to cut; 1 groups were refused: is an output of the network",
        recipe,
        model,
        train=loaders()[0],
    )


def test_wrappers_of_torch_are_taken_off() -> None:
    recipe = {"budget": {"macs": 0.5}, "timing": {"repeats": 3}}
    x = torch.randn(1, 1, 8, 8)
    plain = compress.prune(dense(), recipe, example_inputs=x, quiet=True)
    for wrapped in (nn.DataParallel(dense()), torch.compile(dense())):
        pruned = compress.prune(wrapped, recipe, example_inputs=x, quiet=True)
        assert pruned.plan.keep == plain.plan.keep
        assert type(pruned.model) is type(plain.model)


def test_outputs_and_batches_of_hugging_face_serve() -> None:
    from collections import UserDict

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = dense()

        def forward(self, x: Tensor) -> Any:
            return {"logits": self.net(x)}

    pairs = [UserDict({"pixel_values": x, "labels": y}) for x, y in list(loaders(count=128)[0])]
    recipe = {**RECIPE, "search": {"method": "magnitude"}, "finetune": {"epochs": "2 steps", "label_smoothing": 0.1}}
    compress.prune(Named(), recipe, train=pairs, quiet=True)


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
        (script, "model: TorchScript cannot be cut; give the module of Python code"),
        (nn.Sequential(nn.LazyConv2d(4, 3)), "model: 0.weight has no shape yet .*; run the model on a batch once"),
        (nn.Conv2d(1, 4, 3, device="meta"), "model: weight is on the meta device and has no numbers"),
        (masked, r"model: 0.weight is computed from other tensors.*prune\.remove"),
        (nn.Sequential(nn.ReLU(), nn.Flatten()), "model: there is nothing to cut: no layer was found"),
    ):
        with pytest.raises(compress.NotReady, match=text):
            compress.prune(model, {"budget": {"macs": 0.5}}, example_inputs=torch.randn(2, 1, 8, 8), quiet=True)


@pytest.mark.parametrize("method", ["netslim", "rarts", "darts1", "darts2", "milenas", "bayesnas"])
def test_every_search_says_that_it_diverged(method: str) -> None:
    train, _ = loaders()
    recipe = {**RECIPE, "search": {"method": method, "epochs": "20 steps", "lr": 1e9, "schedule": "constant"}}
    refused(r"search, step \d+ of 20: the loss is not finite", recipe, train=train, error=compress.Diverged)
