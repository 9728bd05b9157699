"""`import compress` loads torch and its own code, and no library that is slow to import and needed only sometimes."""

from __future__ import annotations

import subprocess
import sys

import pytest

SLOW_LIBRARIES = (
    *("accelerate", "matplotlib", "sklearn", "timm", "torchvision", "torch_pruning", "transformers", "ultralytics"),
    *("mmcv", "mmdet", "mmengine", "onnx", "onnxruntime", "onnxscript"),
    *("PIL", "triton", "typer"),
)


@pytest.fixture(scope="module")
def loaded_modules() -> set[str]:
    """Return the names in `sys.modules` after `import compress` in a new process, less those of `import torch`."""
    program = "import sys, torch; before = {*sys.modules}; import compress; print(*{*sys.modules} - before)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


@pytest.mark.parametrize("library", SLOW_LIBRARIES)
def test_import_does_not_load_a_library_that_is_needed_only_sometimes(library: str, loaded_modules: set[str]) -> None:
    assert library not in loaded_modules


def test_import_does_not_load_rooms_that_are_needed_only_sometimes(loaded_modules: set[str]) -> None:
    rooms = ("compress.cli", "compress.exporters", "compress.hf", "compress.mmdet", "compress.yolo")
    assert "compress.api" in loaded_modules
    assert not {name for name in loaded_modules if name.startswith(rooms)}
