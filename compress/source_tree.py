"""Find `compress.exporters` and `compress.recipes` in a source tree, where they lie beside the package.

Importing this module is enough; `compress/__init__.py` does it. In an installed package both lie inside it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).parent
NAMES = ("exporters", "recipes")  # as in `package_dir` of setup.py


class SourceTreeFinder:
    """Import finder of the packages of `compress` that lie beside it."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a package lies; None for any other module."""
        parent, _, name = fullname.rpartition(".")
        if parent != __package__ or name not in NAMES:
            return None
        folder = PACKAGE.parent / name
        return spec_from_file_location(fullname, folder / "__init__.py", submodule_search_locations=[str(folder)])


if not (PACKAGE / NAMES[0]).is_dir():
    sys.meta_path.append(SourceTreeFinder)
