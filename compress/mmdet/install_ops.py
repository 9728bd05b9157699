"""Install `mmcv._ext` on torchvision's kernels if mmcv has no compiled ops."""

from __future__ import annotations

import importlib.util
import sys

from .mmcv_ops import MmcvExtension

HOW_TO_INSTALL = (
    'install the extra: pip install "compress[mmdet-lite]" (or, next to an mmcv of your own, "compress[mmdet]")'
)


def install_mmcv_ops() -> bool:
    """Make mmdet importable; return whether the ops are those on torchvision's kernels.

    Compiled ops of mmcv are left unchanged.

    Raises:
        ImportError: mmdet, mmengine or mmcv is not installed.
    """
    for name in ("mmengine", "mmcv", "mmdet"):
        if importlib.util.find_spec(name) is None:
            raise ImportError(f"compress.mmdet: {name} is not installed; {HOW_TO_INSTALL}")
    if "mmcv._ext" not in sys.modules and importlib.util.find_spec("mmcv._ext") is None:
        sys.modules["mmcv._ext"] = MmcvExtension()
        importlib.import_module("mmcv")._ext = sys.modules["mmcv._ext"]  # type: ignore[attr-defined]
    return isinstance(sys.modules.get("mmcv._ext"), MmcvExtension)
