"""Tasks: a user's own, by name, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compress
from compress.training.task import as_task, load_task
from compress.training.tasks.classification import Classification
from helpers.digits import FOUR_STEPS, dense
from helpers.own_task import RegressionFromProtocol


def test_a_users_own_task_is_enough() -> None:
    task = RegressionFromProtocol()
    pruned = compress.prune(dense(), FOUR_STEPS, task=task, quiet=True)
    assert pruned.report.pruned.metrics.keys() == {"quality"}
    assert task.distilled == 1 + 4  # once to see that it works
    assert isinstance(task, compress.Task)


def test_tasks_by_name_and_what_is_wrong_with_them() -> None:
    assert isinstance(load_task("compress.training:Classification"), Classification)
    with pytest.raises(
        ValueError, match=r"task nowhere:make: No module named 'nowhere'. Expected package.module:factory"
    ):
        load_task("nowhere:make")
    with pytest.raises(ValueError, match=r"task compress.training.task:nothing: .*has no attribute"):
        load_task("compress.training.task:nothing")
    with pytest.raises(TypeError, match=r"expected a compress.Task; dict has no train, val, inputs, forward, loss"):
        as_task({})  # type: ignore[arg-type]
    with pytest.raises(compress.NotReady, match="a task has its own data"):
        compress.prune(dense(), FOUR_STEPS, task=RegressionFromProtocol(), train=[], quiet=True)


def test_task_with_its_own_loop_is_one_class() -> None:
    """Hooks are found on objects that derive from `Task` and on objects that do not."""

    class OwnLoop(RegressionFromProtocol):
        def __init__(self) -> None:
            super().__init__()
            self.jobs: list[Any] = []

        def finetune(self, work: Any) -> None:
            self.jobs.append(work)

    class DerivedOwnLoop(OwnLoop, compress.Task):  # type: ignore[misc]
        pass

    for task in (OwnLoop(), DerivedOwnLoop()):
        adapted = as_task(task)
        assert (adapted is task) is isinstance(task, DerivedOwnLoop)
        assert adapted.has_own_fine_tuning and not adapted.can_draw and not adapted.can_soften
        assert not adapted.has_own_export and adapted.include == () and adapted.type_name == type(task).__name__
        compress.prune(dense(), FOUR_STEPS, task=task, quiet=True)
        (job,) = task.jobs
        assert job.total == 4 and job.folder is None


def test_derived_task_without_a_required_method_is_refused() -> None:
    class Incomplete(compress.Task):
        train = val = None

        def inputs(self, batch: Any) -> Any:
            return batch

    with pytest.raises(
        TypeError, match=r"expected a compress\.Task; Incomplete has no forward, loss, evaluate, distil$"
    ):
        as_task(Incomplete())


@pytest.mark.parametrize("derived", [False, True])
def test_accumulated_batches_of_an_own_task_are_as_one_batch_if_it_counts_its_targets(derived: bool) -> None:
    """A segmentation that ignores pixels, unevenly; in float64, to rounding."""

    class Segmentation:
        def __init__(self, size: int) -> None:
            random = torch.Generator().manual_seed(2)
            x = torch.randn(16, 3, 6, 6, generator=random, dtype=torch.float64)
            mask = torch.randint(0, 4, (16, 6, 6), generator=random)
            mask[torch.rand(mask.shape, generator=random) < torch.linspace(0, 0.9, 16)[:, None, None]] = -100
            mask[4:8] = -100
            self.train = [{"x": x[i : i + size], "mask": mask[i : i + size]} for i in range(0, 16, size)]
            self.val = None

        def inputs(self, batch: Any) -> Any:
            return batch["x"]

        def forward(self, model: nn.Module, batch: Any) -> Any:
            return model(batch["x"])

        def loss(self, outputs: Any, batch: Any) -> Tensor:
            return nn.functional.cross_entropy(outputs, batch["mask"])

        def evaluate(self, model: nn.Module, batches: Any) -> dict[str, float]:
            return {}

        def distil(self, outputs: Any, teacher: Any, temperature: float) -> Tensor:
            return (outputs - teacher).square().mean()

        def count_targets(self, batch: Any) -> Any:
            return (batch["mask"] != -100).sum()

    class DerivedSegmentation(Segmentation, compress.Task):  # type: ignore[misc]
        pass

    def weights(size: int, accumulate: int) -> list[Tensor]:
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 4, 3, padding=1)
        recipe = {
            "budget": {"dims": "50%"},
            "search": {"method": "netslim", "epochs": 2, "lr": 0.1},
            "finetune": {"epochs": 2, "lr": 0.1, "distill": {}},
            "engine": {"accumulate": accumulate},
            "timing": {"repeats": 3},
        }
        task = (DerivedSegmentation if derived else Segmentation)(size)
        pruned = compress.prune(nn.Sequential(*layers).double(), recipe, task=task, quiet=True)
        return list(pruned.model.parameters())

    for whole, parts in zip(weights(16, 1), weights(4, 4), strict=True):
        assert torch.allclose(whole, parts, rtol=1e-12, atol=1e-14)
