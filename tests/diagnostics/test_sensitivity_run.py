"""Each point of a sensitivity is the network that a real cut of one group gives."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import compress
from compress import NotReady
from compress.recipe import Target
from compress.surgery import find_groups
from helpers.digits import dense
from helpers.digits import loaders as digit_loaders
from helpers.own_task import RegressionFromProtocol


def labelled(count: int = 24, shape: tuple[int, ...] = (3, 8, 8), seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(count, *shape, generator=random).double(), torch.randint(4, (count,), generator=random)


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.GELU(), nn.Conv2d(8, 12, 3), nn.GELU(), nn.Flatten(), nn.Linear(192, 4)
    return nn.Sequential(*layers).double()


def transformer() -> nn.Module:
    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(8, 4, 2, 2, 8, 16, num_classes=4).double()
    return nn.init.normal_(model.heads.head.weight) is not None and model  # type: ignore[return-value]


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float(F.cross_entropy(model.eval()(x), y))


def narrowed_by_hand(model: nn.Sequential, first: Any, second: Any) -> nn.Sequential:
    """A chain of two convolutions with these channels, put together from its tensors."""
    a, b, head = (copy.deepcopy(model[i]) for i in (0, 2, 5))
    new = convolutions()
    new[0], new[2] = nn.Conv2d(3, len(first), 3).double(), nn.Conv2d(len(first), len(second), 3).double()
    new[5] = nn.Linear(16 * len(second), 4).double()
    with torch.no_grad():
        new[0].weight.copy_(a.weight[first]), new[0].bias.copy_(a.bias[first])
        new[2].weight.copy_(b.weight[second][:, first]), new[2].bias.copy_(b.bias[second])
        new[5].weight.copy_(head.weight.view(4, 12, 16)[:, second].flatten(1)), new[5].bias.copy_(head.bias)
    return new


def test_points_are_the_losses_of_networks_that_are_put_together_by_hand() -> None:
    model, (x, y) = convolutions(), labelled()
    found = compress.sensitivity(model, [(x, y)], widths=[1, 0.75, "50%"], repair=False, quiet=True)
    norms = {
        "0": model[2].weight.square().sum((0, 2, 3)),
        "2": model[5].weight.view(4, 12, 16).square().sum((0, 2)),
    }
    assert found.dense.loss == pytest.approx(cross_entropy(model, x, y), rel=1e-12)
    for name, norm in norms.items():
        points = found[name].points
        assert [point.width for point in points] == [len(norm), 3 * len(norm) // 4, len(norm) // 2]
        assert points[0].cut == found.dense  # full width changes nothing, to the bit
        for point in points[1:]:
            kept = {n: torch.arange(len(values)) for n, values in norms.items()}
            kept[name] = norm.argsort(descending=True)[: point.width].sort().values
            narrow = narrowed_by_hand(model, kept["0"], kept["2"])
            assert point.cut.loss == pytest.approx(cross_entropy(narrow, x, y), rel=1e-12)
            assert point.cut.loss != found.dense.loss


NETWORKS: dict[str, tuple[Any, dict[str, Any]]] = {
    "streams": (lambda: dense().double(), {"channels": True, "residual": True, "round_to": 1}),
    "attention": (transformer, {"channels": False, "attention": True, "mlp": True, "round_to": 1}),
    "queries and keys": (transformer, {"channels": False, "attention": ["qk", "v"], "embedding": True}),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_points_equal_a_real_cut(name: str) -> None:
    """The plan of a group with the same widths, sliced: the loss is the same up to the rounding of doubles."""
    make, target = NETWORKS[name]
    model, (x, y) = make(), labelled(16, (1, 8, 8) if name == "streams" else (3, 8, 8))
    found = compress.sensitivity(model, [(x, y)], target=target, widths=["50%", "25%"], repair=False, quiet=True)
    groups = find_groups(model, x[:2], Target(**target))
    assert len(groups) == len(found) > 2
    for group in groups:
        for point in found[group.name].points:
            norms = compress.search.magnitude.squared_norms(model, [group])[group.name].view(group.num_heads, -1)
            best = norms.argsort(1, descending=True)[:, : point.width // group.num_heads]
            keep = (best + torch.arange(group.num_heads)[:, None] * norms.shape[1]).flatten().sort().values.numpy()
            sliced = compress.Plan.build(model, groups, {group.name: keep}).apply_(copy.deepcopy(model))
            assert point.cut.loss == pytest.approx(cross_entropy(sliced, x, y), rel=1e-9), group.name
            assert point.cut.loss != pytest.approx(found.dense.loss, rel=1e-9), group.name
            cost = groups.cost.macs([point.width if g.name == group.name else g.width for g in groups])
            assert point.macs_left == pytest.approx(int(cost) / int(groups.cost.macs(groups.cost.widths)))


def test_repair_brings_back_what_other_channels_know() -> None:
    """Every channel is there twice, and read with different weights: least squares needs one of each pair."""
    model, (x, y) = convolutions(), labelled(64)
    with torch.no_grad():
        for tensor in (model[0].weight, model[0].bias):
            tensor[4:] = tensor[:4]
        model[2].weight[:, :4] *= 3  # larger, so that magnitude keeps one of each pair
    found = compress.sensitivity(model, [(x, y)], widths=["50%"], calibration=labelled(64, seed=1)[0], quiet=True)
    (point,) = found["0"].points
    assert abs(point.cut.loss - found.dense.loss) > 1e-3
    assert point.repaired is not None
    assert point.repaired.loss == pytest.approx(found.dense.loss, abs=1e-6)


def test_repaired_points_are_those_of_a_run_with_least_squares() -> None:
    model, (train, val) = dense(), digit_loaders()
    x, images = torch.cat([x for x, _ in val]), torch.cat([x for x, _ in train])[:256]
    found = compress.sensitivity(
        model, val, calibration=images, widths=["50%"], batches=100, target={"include": ["stage2.1"]}, quiet=True
    )
    (group,) = found
    (point,) = group.points
    recipe = {
        "target": {"include": ["stage2.1"], "bounds": {group.name: {"least": point.width, "most": point.width}}},
        "budget": {"dims": "60%"},
        "search": "magnitude",
        "compensate": "least_squares",
        "timing": {"repeats": 3},
    }
    pruned = compress.prune(model, recipe, val=val, calibration=images, example_inputs=x[:2], quiet=True)
    assert point.repaired is not None
    assert point.repaired.metrics["accuracy"] == pytest.approx(pruned.report.pruned.metrics["accuracy"])
    assert point.repaired.loss == pytest.approx(pruned.report.pruned.metrics["loss"], rel=1e-5)


def test_the_model_is_not_changed() -> None:
    model, (x, y) = dense().train(), labelled(16, (1, 8, 8))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    compress.sensitivity(model, [(x.float(), y)], widths=["50%"], search="taylor", quiet=True)
    assert model.training
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_data_in_order_are_shuffled_and_two_measurements_are_equal() -> None:
    """The first batches of a loader in the order of the classes hold one class; the measured batches hold several."""
    x, y = labelled(64)
    y = y.sort().values
    model = convolutions()
    with torch.no_grad():
        model[5].weight.zero_()
        model[5].bias.copy_(torch.tensor([9.0, 0, 0, 0]))  # it always answers with class 0
    loader = DataLoader(TensorDataset(x, y), 8)
    found, again = (
        compress.sensitivity(model, loader, batches=2, widths=["50%"], repair=False, quiet=True) for _ in range(2)
    )
    assert found.dense.metrics["accuracy"] < 1 == float((y[:16] == 0).double().mean() > 0.9)
    assert found.to_json() == again.to_json()
    assert found.batches == 2


def test_fragile_group_comes_first_and_an_unread_one_last() -> None:
    model, (x, y) = convolutions(), labelled()
    with torch.no_grad():
        model[2].weight[:, 4:] *= 1e-9  # half of the channels of the first layer do nothing
        model[5].weight *= 50
        y = model(x).argmax(1)
    found = compress.sensitivity(model, [(x, y)], widths=["50%"], repair=False, quiet=True)
    assert [group.name for group in found] == ["2", "0"]
    assert found.fragility(found["0"]) == pytest.approx(0, abs=1e-6)
    assert found.fragility(found["2"]) > 1e-3


def test_search_with_data_ranks_within_a_group() -> None:
    """A channel that is large but constant zero behind the activation has no Taylor importance; magnitude keeps it."""
    model, (x, y) = convolutions(), labelled()
    model[1] = nn.ReLU()
    with torch.no_grad():
        model[0].bias[:4] = -1e3
        model[2].weight[:, :4] *= 1e3
    options: dict[str, Any] = {"widths": ["50%"], "repair": False, "target": {"include": ["0"]}, "quiet": True}
    by_size = compress.sensitivity(model, [(x, y)], **options)
    by_loss = compress.sensitivity(model, [(x, y)], search={"method": "taylor", "epochs": "1 step"}, **options)
    assert by_loss["0"].points[0].cut.loss == pytest.approx(by_loss.dense.loss, rel=1e-12)
    assert by_size["0"].points[0].cut.loss != pytest.approx(by_size.dense.loss, rel=1e-3)
    assert "ranked by taylor" in by_loss.bounds("100%") or "no bounds" in by_loss.bounds("100%")


def test_images_without_labels_show_the_agreement_with_the_dense_network() -> None:
    model, (x, _) = convolutions().float(), labelled(64)
    found = compress.sensitivity(model, x.float(), widths=["25%"], quiet=True)
    assert found.dense.metrics["accuracy"] == 1
    assert all(group.points[0].cut.metrics["accuracy"] < 1 for group in found)


class OwnEvaluation(RegressionFromProtocol):
    """Evaluates on data of its own only, as mmdet's evaluators do."""

    can_test = False

    def evaluate(self, model: nn.Module, batches: Any) -> dict[str, float]:
        raise AssertionError


def test_a_task_of_ones_own_is_measured_by_its_loss_and_its_metric() -> None:
    task, model = RegressionFromProtocol(), dense()
    found = compress.sensitivity(model, task=task, widths=["50%"], quiet=True)
    with torch.no_grad():
        assert found.dense.loss == pytest.approx(float(model(task.val[0]).square().mean()), rel=1e-5)
    assert found.metric == "quality"
    assert found.dense.metrics["quality"] == pytest.approx(-found.dense.loss, rel=1e-5)
    assert len(task.train) == 4 and len(task.val) == 1
    other = compress.sensitivity(model, task.train, task=OwnEvaluation(), widths=["50%"], repair=False, quiet=True)
    assert other.metric is None
    assert "OwnEvaluation evaluates on its own data only: the loss alone is measured" in other.notes
    with torch.no_grad():
        losses = [float(model(batch).square().mean()) for batch in task.train]
    assert other.dense.loss == pytest.approx(np.mean(losses), rel=1e-5)


def test_repair_takes_images_behind_the_measured_ones_and_says_if_there_are_none() -> None:
    model, (x, y) = convolutions(), labelled(32)
    few = compress.sensitivity(model, [(x, y)], widths=["50%"], quiet=True)
    assert "repaired on the measured batches themselves: give calibration=INPUTS, or more data" in few.notes
    enough = compress.sensitivity(model, [(x, y)] * 3, batches=1, widths=["50%"], quiet=True)
    assert not enough.notes
    assert enough.batches == 1


def test_groups_that_may_not_become_narrower_are_named() -> None:
    model, data = convolutions(), [labelled()]
    target = {"min_keep": 8, "round_to": 1}
    found = compress.sensitivity(model, data, widths=["50%"], target=target, repair=False, quiet=True)
    assert [(group.name, group.points[0].width) for group in found] == [("2", 8)]
    assert found.notes == ["no narrower width is allowed: 0"]
    with pytest.raises(NotReady, match=r"target.min_keep, round_to: no group may be narrowed; lower them"):
        compress.sensitivity(model, data, target={"min_keep": 12}, repair=False, quiet=True)


def test_bounds_of_the_target_do_not_hide_a_width() -> None:
    target = {"bounds": {"0": {"least": "100%"}}}
    found = compress.sensitivity(convolutions(), [labelled()], widths=["25%"], target=target, repair=False, quiet=True)
    assert found["0"].points[0].width == 2


def test_progress_counts_every_measurement(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COMPRESS_PROGRESS", "json")
    compress.sensitivity(convolutions(), [labelled()], widths=["75%", "50%"])
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    done = [line for line in lines if line.get("doing") == "sensitivity"]
    assert (done[-1]["done"], done[-1]["of"], done[-1]["left_s"]) == (8, 8, 0)


class RunsAtOneWidth(nn.Module):
    """Code that counts on the width when it is asked to: in eval mode and on more than two images."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h if len(x) < 3 else h.view(len(x), 8))


def test_network_that_does_not_run_after_the_cut_is_measured_by_zeros_and_named() -> None:
    x, y = labelled(16, (6,))
    found = compress.sensitivity(RunsAtOneWidth().double(), [(x, y)], example_inputs=x[:2], widths=["50%"], quiet=True)
    (point,) = found["a"].points
    assert math.isfinite(point.cut.loss)
    assert point.repaired is None
    assert any(note.startswith("a of 4: the sliced network does not run: RuntimeError") for note in found.notes)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"data": None}, r"data: expected a loader of batches; got none\. Give data=LOADER, or a task with val or train"),
    ({"data": iter([1])}, r"data: expected a loader that can be read more than once; got an iterator"),
    ({"data": 3}, r"data: expected a loader that gives batches; got int"),
    ({"data": []}, r"data: expected at least one batch; the loader gave none"),
    ({"widths": [0.5, "150%", 0]}, r"""widths: expected fractions of a width, as 0 < x <= 1 or "50%"; got '150%', 0"""),
    ({"widths": []}, r"widths: expected fractions of a width.*got none"),
    ({"widths": None}, r"widths: expected fractions of a width.*got None"),
    ({"batches": 0}, r"batches: expected the number of batches to measure on, 1 or more; got 0"),
    ({"search": "netslim"}, r"search: netslim changes the network, .* Give magnitude, taylor or random"),
    ({"search": "magic"}, r"search"),
    ({"target": {"chanels": True}}, r"chanels"),
    ({"target": {"operations": True}}, r"target.operations: operations have no widths; choose them first"),
    ({"target": {"channels": False, "mlp": True}}, r"target: there is nothing to narrow\."),
    ({"calibration": 3}, r"calibration: expected"),
    ({"model": 3}, r"model: expected a torch.nn.Module; got int"),
    ({"data": [(torch.zeros(2, 5), torch.zeros(2).long())]}, r"the model does not run on the first training batch"),
]


@pytest.mark.parametrize(("wrong", "message"), BAD, ids=lambda value: None if isinstance(value, dict) else value[:30])
def test_mistakes_are_explained(wrong: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"model": convolutions(), "data": [labelled(8)], "quiet": True, **wrong}
    with pytest.raises(ValueError, match=message):
        compress.sensitivity(**arguments)


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(NotReady, match=r"(?s)widths: .*batches: .*search: "):
        compress.sensitivity(convolutions(), [labelled()], widths=[], batches=-1, search="rarts")


def test_batch_that_cannot_be_evaluated_is_explained() -> None:
    x, y = labelled(8)
    with pytest.raises(NotReady, match=r"data: the batches cannot be evaluated: RuntimeError"):
        compress.sensitivity(convolutions(), [(x, y), (x[:, :, :4], y)], repair=False, quiet=True)
    with pytest.raises(compress.BatchError, match=r"class"):
        compress.sensitivity(convolutions(), [(x, y), (x, y + 90)], repair=False, quiet=True)
