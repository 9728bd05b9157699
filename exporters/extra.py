"""The packages of the `onnx` extra: looked for when they are used, and missed by name."""

from __future__ import annotations

import importlib.util

PACKAGES = ("onnx", "onnxruntime", "onnxscript", "onnxslim")


class MissingExtra(ImportError):
    """A package that only some of the library needs."""


def need_onnx(*packages: str) -> None:
    """
    Raises:
        MissingExtra: one of the packages (default: all that an export needs) is not installed.
    """
    if missing := [name for name in packages or PACKAGES if importlib.util.find_spec(name) is None]:
        raise MissingExtra(f"ONNX needs {' and '.join(missing)}: install the extra with pip install 'compress[onnx]'")
