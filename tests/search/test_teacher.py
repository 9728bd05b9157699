"""Searches with distillation call `task.teach` on the dense model, which may return something else than `forward`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compress
from compress.search.base import Job, search_class
from helpers.bilevel import TWO_BATCH_METHODS
from helpers.regression import RegressionTask


class TeachingTask(RegressionTask):
    """A task whose teacher returns a dict, as mmdet's does, while `forward` returns a tensor."""

    def __init__(self) -> None:
        self.distances: list[float] = []

    def teach(self, model: nn.Module, batch: Any) -> Any:
        return {"teacher": self.forward(model, batch)}

    def distil(self, outputs: Any, teacher: Any, temperature: float) -> Tensor:
        distance = super().distil(outputs, teacher["teacher"], temperature)
        self.distances.append(float(distance.detach()))
        return distance


def started(method: str, teacher: nn.Module | None) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    groups = compress.find_groups(model, torch.randn(2, 3))
    settings = {"method": method, "epochs": 1, "gamma": 1e-3, "distill": {"weight": 0.5}}
    config = search_class(method).Config.model_validate(settings)
    job = Job(model, groups, TeachingTask(), 4, schedule=lambda *_: {}, teacher=teacher)
    return search_class(method)(config, job)


@pytest.mark.parametrize("method", ["netslim", *TWO_BATCH_METHODS, "bayesnas", "bayes_compress"])
def test_distillation_goes_by_teach(method: str) -> None:
    teacher = nn.Linear(3, 2)
    search = started(method, teacher)
    batch = (torch.randn(4, 3), torch.randn(4, 2))
    with torch.no_grad():
        distance = float((search.job.model(batch[0]) - teacher(batch[0])).square().mean())
    for _ in range(4):
        terms = search.step((batch, batch) if search.batches_per_step == 2 else batch)
        assert torch.isfinite(terms["loss"])
    assert search.job.task.distances[0] == pytest.approx(distance, rel=1e-5)


@pytest.mark.parametrize("method", ["netslim", "bayes_compress"])
def test_distillation_without_a_dense_model_is_refused(method: str) -> None:
    with pytest.raises(ValueError, match=r"distill: there is no dense model to learn from; use compress\.prune"):
        started(method, None).step((torch.randn(4, 3), torch.randn(4, 2)))
