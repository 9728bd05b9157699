"""Checkpoints of the Runner are read as data only."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer

import compress.mmdet  # noqa: F401  (allows the classes of the checkpoints)


def test_checkpoints_of_the_runner_are_read_and_what_else_asks_for_getattr_is_not(tmp_path: Path) -> None:
    log = HistoryBuffer()
    log.update(0.5)
    torch.save({"state_dict": {"a": torch.ones(2)}, "message_hub": {"log_scalars": {"loss": log}}}, tmp_path / "a.pth")
    found = torch.load(tmp_path / "a.pth", weights_only=True)
    assert found["message_hub"]["log_scalars"]["loss"].mean() == 0.5

    class Evil:
        def __reduce__(self) -> Any:
            return getattr, (HistoryBuffer, "__init__")

    torch.save({"state_dict": Evil()}, tmp_path / "b.pth")
    with pytest.raises((ValueError, pickle.UnpicklingError), match="which mmengine does not write; it is not loaded"):
        torch.load(tmp_path / "b.pth", weights_only=True)


def test_checkpoints_are_read_after_another_library_allowed_and_forgot_the_same_classes(tmp_path: Path) -> None:
    log = HistoryBuffer()
    log.update(0.5)
    torch.save({"loss": log}, tmp_path / "a.pth")
    dtypes = [type(np.dtype(kind)) for kind in (np.float32, np.float64, np.int32, np.int64, np.bool_)]
    with torch.serialization.safe_globals([HistoryBuffer, np.ndarray, np.dtype, *dtypes]):
        pass
    assert torch.load(tmp_path / "a.pth", weights_only=True)["loss"].mean() == 0.5
