"""Puts `mmcv._ext` in place where mmcv has no compiled ops; a compiled one is left as it is."""

from __future__ import annotations

import importlib
import importlib.util
import sys

HOW = 'install the extra: pip install "compress[mmdet-lite]" (or, beside an mmcv of your own, "compress[mmdet]")'


def install() -> bool:
    """Make mmdet importable; returns whether the ops are those of torchvision.

    Raises:
        ImportError: mmdet, mmengine or mmcv is not installed.
    """
    for name in ("mmengine", "mmcv", "mmdet"):
        if importlib.util.find_spec(name) is None:
            raise ImportError(f"compress.mmdet: {name} is not installed; {HOW}")
    from .ext import Extension

    if "mmcv._ext" not in sys.modules and importlib.util.find_spec("mmcv._ext") is None:
        sys.modules["mmcv._ext"] = Extension()
        importlib.import_module("mmcv")._ext = sys.modules["mmcv._ext"]  # type: ignore[attr-defined]
    return isinstance(sys.modules.get("mmcv._ext"), Extension)
