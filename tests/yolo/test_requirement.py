"""A version of ultralytics that is missing or too old is named, with the command that installs one."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

pytest.importorskip("ultralytics", reason="the extra yolo is not installed")
from compress.yolo import requirement


def test_version_that_is_too_old_is_named() -> None:
    assert requirement.check_ultralytics()
    with pytest.raises(ImportError, match=r"expected ultralytics 99\.0 or later; got 8\..*pip install -U"):
        requirement.check_ultralytics("99.0")


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(requirement, "version", version)
    with pytest.raises(ImportError, match=r"it is not installed: pip install -U 'compress\[yolo\]'"):
        requirement.check_ultralytics()


def test_setup_and_guide_ask_for_the_version_that_is_checked() -> None:
    root = Path(__file__).parents[2]
    assert f'"ultralytics>={requirement.OLDEST}"' in (root / "setup.py").read_text()
    assert f"version {requirement.OLDEST} or later" in (root / "docs" / "yolo.md").read_text()
