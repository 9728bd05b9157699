"""Tasks: a user's own, by name, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

import compress
from compress.training.classification import Classification
from compress.training.task import as_task, load_task
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
