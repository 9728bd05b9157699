"""Check that the packages of the `onnx` extra are installed."""

from __future__ import annotations

import importlib.util

PACKAGES = ("onnx", "onnxruntime", "onnxscript", "onnxslim")


class MissingExtra(ImportError):
    """A package of an optional extra is not installed."""


def need_onnx(*packages: str) -> None:
    """Check that the packages are installed; without arguments, all that an export needs.

    Raises:
        MissingExtra: one of them is not installed.
    """
    if missing := [name for name in packages or PACKAGES if importlib.util.find_spec(name) is None]:
        raise MissingExtra(f"ONNX needs {' and '.join(missing)}: install the extra with pip install 'compress[onnx]'")
