"""One thread, since the networks of the tests are small; and the fixtures that several rooms use."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    import compress

torch.set_num_threads(1)

# Ultralytics reads these when it is imported: no search for updates, no installed packages, nothing in the home folder.
os.environ |= {"YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false", "YOLO_VERBOSE": "false"}
os.environ["YOLO_CONFIG_DIR"] = tempfile.mkdtemp()
atexit.register(shutil.rmtree, os.environ["YOLO_CONFIG_DIR"], ignore_errors=True)


@pytest.fixture
def checkpoint_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save a checkpoint behind every step, so that an interruption can fall between any two."""
    from helpers.interruption import save_at_every_step

    save_at_every_step(monkeypatch)


@pytest.fixture(scope="module")
def undisturbed() -> compress.Pruned:
    """The result of the run that other tests interrupt."""
    from helpers.interruption import uninterrupted_run

    return uninterrupted_run()


@pytest.fixture(scope="module")
def exported_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[compress.Pruned, Path]:
    """A pruned network with its files, and their folder."""
    from helpers.exported_runs import prune_and_export

    folder = tmp_path_factory.mktemp("run") / "out"
    return prune_and_export(folder), folder
