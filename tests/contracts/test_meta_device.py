"""Training steps and surgery run on the `meta` device: they mix no devices and read no value back from the device.

Tensors there have shapes and no values, so that whatever would make a GPU wait fails: `.item()`, `float(tensor)`,
`.tolist()`, `.cpu()`, `.nonzero()`, `if tensor`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compress.budget import choose_widths
from compress.progress import ProgressDisplay
from compress.recipe import Finetune, Recipe, Target
from compress.recipe.search_config import search_names
from compress.search.base import Job, search_class
from compress.surgery import Plan, compensate_, find_groups, fold_, slice_
from compress.surgery.repair.layer_problem import LayerProblem
from compress.surgery.repair.logit_fit import LogitMoments, split_images
from compress.training import Classification, Engine, FineTuneJob, FineTuner
from compress.training.recalibrate import recalibrate_

X = torch.zeros(16, 3, 8, 8)
STEPS = 8


class Network(nn.Module):
    """Convolutions with batch norms and a residual stream, attention, and an MLP with layer norms."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 8, 1))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = (x + self.body(x)).flatten(2).transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head((x + self.mlp(self.norm(x))).mean(1))  # type: ignore[no-any-return]


def meta_batch() -> tuple[Tensor, Tensor]:
    return X.to("meta"), torch.zeros(16, dtype=torch.long, device="meta")


def search_settings(method: str) -> dict[str, Any]:
    """Return short settings of any search; scores get a number as gamma, which needs no budget."""
    fields = search_class(method).Config.model_fields
    wanted = {"epochs": f"{STEPS} steps", "gamma": 1e-3, "samples": 1000, "clip": 1.0, "distill": {}}
    return {"method": method} | {name: value for name, value in wanted.items() if name in fields}


@pytest.mark.parametrize("method", search_names())
def test_every_search_steps_and_folds_on_the_meta_device(method: str) -> None:
    model = Network().eval()
    target = Target(channels=True, residual=True, attention=True, mlp=True)
    groups = find_groups(model, X, target)
    recipe = Recipe.load({"budget": {"macs": "50%"}, "search": search_settings(method)})
    dense, model = copy.deepcopy(model).to("meta"), model.to("meta").train()
    job = Job(model, groups, Classification(), STEPS, teacher=dense, steps_per_epoch=4)
    search = search_class(method)(recipe.search, job)
    if recipe.search.length is not None:
        for _ in range(3):
            terms = search.step((meta_batch(), meta_batch()) if search.batches_per_step == 2 else meta_batch())
            assert all(term.is_meta for term in terms.values())
    fold_(model)
    assert all(t.is_meta for t in model.state_dict().values())


def test_slicing_and_compensation_run_on_the_meta_device() -> None:
    model = Network().eval()
    target = Target(channels=True, attention=True, mlp=True)
    groups = find_groups(model, X, target)
    recipe = Recipe.load({"budget": {"macs": "60%"}})
    keep = choose_widths(groups, {g.name: torch.rand(g.width) for g in groups}, recipe.budget, target)
    plan = Plan.build(model, groups, keep)
    on_meta = copy.deepcopy(model).to("meta")
    compensate_(on_meta, groups, copy.deepcopy(plan), [X.to("meta")])
    slice_(on_meta, plan)
    slice_(model, plan)
    assert {n: t.shape for n, t in on_meta.named_parameters() if n in dict(model.named_parameters())} == {
        n: t.shape for n, t in model.named_parameters()
    }
    assert on_meta(X.to("meta")).shape == model(X).shape


def test_samples_for_least_squares_are_summed_on_the_meta_device() -> None:
    """Only the solution itself waits: the ridge is chosen by its error."""
    layers = nn.ModuleDict(
        {
            "linear": nn.Linear(6, 4),
            "taps": nn.Conv2d(6, 4, 3, padding=1),
            "depthwise": nn.Conv2d(6, 6, 3, groups=6),
            "wide": nn.Conv2d(400, 4, 3),
        }
    ).to("meta")
    for name, layer in layers.items():
        x = torch.zeros(16, layer.weight.shape[1] * getattr(layer, "groups", 1), 8, 8, device="meta")
        x = x if name != "linear" else x.flatten(2).mT
        problem = LayerProblem(name, layer, copy.deepcopy(layer), Plan({}, {}), 2)
        assert problem.predicts_channels == (name == "wide")
        for batch in range(2):
            problem.add_(batch, x, x, layer(x))
        assert all(part.is_meta for sums in problem._sums or () for part in vars(sums).values())
    queries = torch.zeros(5, 2, 7, 4, device="meta")
    for batch in range(2):
        for part in split_images(queries, queries, batch):
            LogitMoments.zeros(2, 4, queries.device).add_(*part)


@pytest.mark.parametrize("extra", [{}, {"ema": 0.9, "clip": 1.0, "optimizer": "adamw"}, {"recalibrate": 2}])
def test_fine_tuning_steps_run_on_the_meta_device(extra: dict[str, Any]) -> None:
    config = Finetune(epochs="4 steps", distill={}, **extra)
    engine = Engine(torch.device("meta"), 0, ProgressDisplay(True))
    student, teacher, task = Network().to("meta").train(), Network().to("meta").eval(), Classification()
    if config.recalibrate:
        recalibrate_(student, task, [meta_batch()] * 2, 2, engine)
    tuner = FineTuner(FineTuneJob(student, teacher, Plan({}, {}), config, engine, 4), task)
    for _ in range(3):
        assert all(term.is_meta for term in tuner.step(meta_batch()).values())
