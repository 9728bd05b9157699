"""Pictures for detectors, and the config of a small detector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def cfg(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from helpers.detectors import make_pictures, small_config

    return small_config(make_pictures(tmp_path_factory.mktemp("pictures"), count=4))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from helpers.detectors import make_pictures

    return make_pictures(tmp_path_factory.mktemp("pictures"), count=4)
