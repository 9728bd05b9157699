"""Structural compression: table S3 by hand, proximal steps, planted filters, channels and kernel rows."""

from __future__ import annotations

import copy
import math
import warnings
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compress
from compress.search.base import Job, search_class
from compress.search.bayes.layer_groups import LayerGroups
from compress.search.bayes.structures import STRUCTURES, group_families
from helpers.digits import TIMING, dense, loaders
from helpers.regression import RegressionTask, with_useless_features


def layer(structure: str) -> tuple[LayerGroups, Tensor]:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 3, 3, 2).double())
    made = LayerGroups(weight, group_families(structure, weight))
    for f in made.families:
        made.omega[f].uniform_(0.5, 2.0)
    return made, torch.rand_like(weight.detach()) * 5


def test_channel_wise_rules_of_table_s3_by_hand() -> None:
    made, h = layer("channel")
    before, w = made.omega["c"].clone(), made.weight.detach().clone()
    made.update_(h, prune=False)
    for c in range(3):
        gamma = math.sqrt(sum(float(v) ** 2 for v in w[:, c].flatten())) / float(before[0, c, 0, 0])
        total = 0.0
        for x in h[:, c].flatten().tolist():
            variance = 1 / (1 / gamma + x)  # (B.0.3)
            total += abs(-variance / gamma**2 + 1 / gamma)  # (B.0.4)
        assert float(made.omega["c"][0, c, 0, 0]) == pytest.approx(math.sqrt(total), rel=1e-10)


def test_row_and_column_wise_rules_of_table_s3_by_hand() -> None:
    made, h = layer("row_column")
    before, w = {f: o.clone() for f, o in made.omega.items()}, made.weight.detach().clone()
    assert made.families == ["cm", "ck"]
    made.update_(h, prune=False)
    for c, i in product(range(3), range(3)):
        for f, size in (("cm", 3), ("ck", 2)):
            if i >= size:
                continue
            mine = (slice(None), c, i) if f == "cm" else (slice(None), c, slice(None), i)
            place = (0, c, i, 0) if f == "cm" else (0, c, 0, i)
            gamma = float(w[mine].norm() / before[f][place])
            alpha = 1 / gamma - 1 / (1 / gamma + h[mine]) / gamma**2
            assert float(made.omega[f][place]) == pytest.approx(float(alpha.sum().sqrt()), rel=1e-10)


def test_group_that_no_data_bend_goes_and_leaves_numbers() -> None:
    """An input that is always zero has no curvature, and no weight omega either."""
    made, h = layer("channel")
    h[:, 1] = 0
    for _ in range(3):
        made.update_(h * 1e4, prune=True)
        made.shrink_(1e-3, 1.0)
        assert torch.isfinite(made.weight).all()
        assert all(torch.isfinite(v).all() for v in made.tensors())
    assert not made.weight[:, 1].any()
    assert made.weight[:, [0, 2]].any()


@pytest.mark.parametrize("structure", ["filter", "shape", "group_row"])
def test_proximal_step_minimises_the_group_lasso(structure: str) -> None:
    """0 = x - w + t omega x / ||x|| where x is not zero, and ||w|| <= t omega where it is."""
    made, _ = layer(structure)
    (f,) = made.families
    w, t = made.weight.detach().clone(), 0.8
    made.shrink_(t, 1.0)
    x = made.weight.detach()
    axes = [i for i, a in enumerate("ncmk") if a not in f]
    norm, size = (v.square().sum(axes, keepdim=True).sqrt() for v in (x, w))
    slope = x - w + t * made.omega[f] * x / norm.clamp_min(1e-12)
    assert torch.allclose(slope * (norm > 0), torch.zeros_like(x), atol=1e-12)
    assert bool(((norm > 0) | (size <= t * made.omega[f])).all())


def test_structure_that_fits_no_layer_is_refused_with_those_that_do() -> None:
    model, data, _ = with_useless_features(False, 0)
    recipe = {"budget": "auto", "search": {"method": "bayes_compress", "epochs": 1, "structure": "group_row"}}
    match = r"structure: group_row fits no layer of the model; those that fit one are shape, row, column, row_column"
    with pytest.raises(ValueError, match=match):
        compress.prune(model, recipe, train=data, quiet=True)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("budget", ["auto", {"dims": "75%"}])
def test_planted_useless_channels_go(budget: Any, seed: int) -> None:
    model, data, useless = with_useless_features(False, seed)
    search = {"method": "bayes_compress", "structure": "channel", "epochs": 8, "lr": 0.1, "gamma": 1e-3}
    recipe = {"budget": budget, "search": search, "timing": {"repeats": 3}, "seed": seed}
    pruned = compress.prune(model, recipe, train=data, quiet=True)
    assert set(range(12)) - set(pruned.plan.keep["0"]) == useless


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(2, 6, 5, padding=2), nn.Conv2d(6, 4, 3, padding=1), nn.Linear(256, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.relu(self.b(torch.relu(self.a(x)))).flatten(1))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_planted_kernel_rows_and_columns_are_cut_exactly(seed: int, tmp_path: Any) -> None:
    """Labels come from kernels without some rows and columns at the rim; they start small, and go."""
    torch.manual_seed(seed)
    model = Rows()
    with torch.no_grad():
        model.a.weight[:, :, 0], model.a.weight[:, :, :, 3:] = 0, 0
        model.b.weight[:, :, [0, 2]] = 0
        x = torch.randn(512, 2, 8, 8)
        scale = 3 / model(x).std(0)  # logits that are told apart alike, whatever the seed
        model.head.weight.mul_(scale[:, None])
        model.head.bias.copy_(model.head.bias - model(x).mean(0))
        y = model(x).argmax(-1)
        for layer in (model.a, model.b):
            layer.weight.add_(1e-3 * torch.randn_like(layer.weight))
    data = list(zip(x.split(32), y.split(32), strict=True))
    search = {"method": "bayes_compress", "structure": "group_row_column", "epochs": 3, "lr": 5e-4, "gamma": 3e-3}
    pruned = compress.prune(
        model, {"budget": "auto", "search": search, "timing": {"repeats": 3}}, train=data, quiet=True
    )
    assert pruned.model.a.kernel_size == (4, 3)
    assert pruned.model.b.kernel_size == (1, 3)
    assert "smaller kernels: a 4x3, b 1x3" in pruned.report.notes
    dense_macs = 64 * (6 * 2 * 25 + 4 * 6 * 9) + 768
    assert pruned.report.dense.macs == dense_macs
    assert pruned.report.pruned.macs == 64 * (6 * 2 * 12 + 4 * 6 * 3) + 768
    pruned.save(tmp_path / "small")
    again = compress.load(Rows(), tmp_path / "small").eval()
    assert torch.equal(again(x), pruned.model.eval()(x))
    wide = Rows().double()
    mine = {n: p.double() for n, p in pruned.model.state_dict().items()}
    zeros = pruned.plan.zero_(wide).state_dict()
    zeros["a.weight"].zero_()[:, :, 1:, :3] = mine["a.weight"]
    zeros["b.weight"].zero_()[:, :, 1:2] = mine["b.weight"]
    wide.load_state_dict(zeros | {n: v for n, v in mine.items() if n not in ("a.weight", "b.weight")})
    assert torch.allclose(wide(x.double()), copy.deepcopy(pruned.model).double()(x.double()), rtol=0, atol=1e-12)


@pytest.mark.parametrize("structure", [*STRUCTURES, ["shape", "filter"]])
def test_every_structure_runs_end_to_end_and_the_report_counts_its_zeros(structure: Any) -> None:
    train, val = loaders(count=256)
    search = {"method": "bayes_compress", "epochs": "4 steps", "structure": structure, "gamma": 1e-6, "samples": 16}
    with warnings.catch_warnings(action="ignore"):  # so short a search may leave a group empty
        pruned = compress.prune(
            dense(), {"budget": "auto", "search": search, "timing": TIMING}, train=train, val=val, quiet=True
        )
    zeros = sum(int((p == 0).sum()) for p in pruned.model.parameters() if p.ndim > 1)
    assert any(note.startswith(f"{zeros} of ") and "save no time in dense" in note for note in pruned.report.notes)
    assert "curvature of the weights: Gauss-Newton, by random signs" in pruned.report.notes


def test_budget_needs_a_structure_that_cuts_dimensions() -> None:
    train, val = loaders(count=256)
    search = {"method": "bayes_compress", "epochs": "2 steps", "structure": "group_row"}
    with pytest.raises(ValueError, match=r"structure: group_row prunes no dimensions, so it cannot meet a budget"):
        compress.prune(dense(), {"budget": {"macs": 0.5}, "search": search}, train=train, val=val, quiet=True)


def test_intensity_that_leaves_nothing_is_refused_with_one_to_try() -> None:
    train, val = loaders(count=256)
    search = {"method": "bayes_compress", "epochs": "4 steps", "gamma": 1e6, "structure": "channel"}
    with pytest.raises(ValueError, match=r"gamma: 1e\+06 leaves nothing: .* With gamma [\d.e-]+ about half") as caught:
        compress.prune(dense(), {"budget": "auto", "search": search}, train=train, val=val, quiet=True)
    assert float(str(caught.value).split("With gamma ")[1].split()[0]) > 0


def test_search_resumes_to_the_same_bits(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from compress.training import engine as engine_module
    from helpers.interruption import Interrupted, InterruptedLoader
    from helpers.weights import same_weights

    monkeypatch.setattr(engine_module, "SAVE_INTERVAL", -1.0)
    search = {"method": "bayes_compress", "epochs": "6 steps", "iterations": 2, "gamma": 1e-6, "samples": 8}
    recipe = {"budget": {"macs": "50%"}, "search": search, "timing": TIMING}
    train = loaders(count=512)[0]
    whole = compress.prune(dense(), recipe, train=InterruptedLoader(train, -1), quiet=True)
    with pytest.raises(Interrupted):
        compress.prune(dense(), recipe, train=InterruptedLoader(train, 4), workdir=tmp_path, quiet=True)
    again = compress.prune(
        dense(), recipe, train=InterruptedLoader(train, -1), workdir=tmp_path, resume=True, quiet=True
    )
    assert again.plan.keep == whole.plan.keep
    assert same_weights(again.model, whole.model)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"structure": "rows"}, r"search\.structure: expected one of shape, row, .*, or a list of them; got 'rows'"),
        ({"structure": []}, r"search\.structure: expected one of shape"),
        ({"structure": ["filter", 3]}, r"got 3"),
        ({"gamma": 0}, r"search\.gamma: "),
    ],
)
def test_impossible_settings_are_named(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(compress.RecipeError, match=match):
        compress.Recipe.load({"budget": {"macs": 0.5}, "search": {"method": "bayes_compress", "epochs": 1, **settings}})


def test_task_without_draws_gets_the_empirical_fisher_and_a_teacher_has_to_be_there() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    groups, cls = compress.find_groups(model, torch.randn(2, 6).double()), search_class("bayes_compress")
    settings = {"method": "bayes_compress", "epochs": 1, "structure": "channel"}
    batch = torch.randn(4, 6).double(), torch.randn(4, 3).double()
    search: Any = cls(
        cls.Config.model_validate(settings), Job(model, groups, RegressionTask(), 2, schedule=lambda *_: {})
    )
    for _ in range(2):
        search.step(batch)
    assert search.notes() == ["curvature of the weights: empirical Fisher"]
    taught: Any = cls(cls.Config.model_validate(settings | {"distill": {}}), Job(model, groups, RegressionTask(), 9))
    with pytest.raises(ValueError, match="there is no dense model to learn from"):
        taught.step(batch)


def test_curvature_that_is_nan_drops_nothing_and_is_noted() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    groups, cls = compress.find_groups(model, torch.randn(2, 6).double()), search_class("bayes_compress")
    settings = {"method": "bayes_compress", "epochs": 1, "structure": "channel", "gamma": 1e-9}
    search: Any = cls(
        cls.Config.model_validate(settings), Job(model, groups, RegressionTask(), 1, schedule=lambda *_: {})
    )
    search.count.add_(1)
    search.layers["2.weight"].squared_gradients.fill_(2.0)[:, 0] = math.nan
    search.layers["0.weight"].squared_gradients.fill_(2.0)
    search._update()
    assert bool((search.importance()["0"] > 0).all())
    assert "0 values were negative and taken as zero, 3 were not finite" in search.notes()[1]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_groups_of_a_structure_are_the_slices_that_the_table_names(structure: str) -> None:
    made, _ = layer(structure)
    for f in made.families:
        assert list(made.omega[f].shape) == [s if a in f else 1 for a, s in zip("ncmk", (4, 3, 3, 2), strict=True)]
        index = [0 if a in f else slice(None) for a in "ncmk"]
        with torch.no_grad():
            made.weight[tuple(index)] = 0
    before = made.weight.detach().clone()
    made.shrink_(0.05, 1.0)
    same = (made.weight == 0) == (before == 0)
    assert same.all(), "a small step takes no group to zero, and what is zero stays"
