"""Checkpoints of the Runner are read as data only."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

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
