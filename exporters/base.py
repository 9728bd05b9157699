"""Base class and registry of exporters: the handlers of a recipe's `export.format`.

A new exporter is a subclass of `Exporter` in its own file, decorated with `register_exporter("NAME")` and imported in
`exporters/__init__.py`. Its name is added to `ExportFormat` in compress/recipe/sections.py and its files to
`EXPORT_FILES` in compress/storage/files.py, which cannot import this package; a test compares all three.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from torch import nn

from compress.recipe import Export, Timing
from compress.surgery import Plan
from compress.training import Task

from .export_report import ExportReport


@dataclass(frozen=True)
class ExportJob:
    """A compact network to be exported, with all that the file is compared with and described by."""

    dense: nn.Module
    compact: nn.Module
    settings: Export
    task: Task
    example_inputs: Any
    plan: Plan
    recipe: dict[str, Any]  # as plain data; stored in the file's metadata
    timing: Timing
    path: Path
    int8_path: Path | None = None  # a quantized file is written if there is a path for it


class Exporter(ABC):
    """Writes networks to files of one format."""

    file_name: ClassVar[str]  # in the working directory
    int8_file_name: ClassVar[str]

    @abstractmethod
    def check_installed(self) -> None:
        """Check that the packages that an export needs are installed.

        Raises:
            MissingExtra: some are not.
        """

    @abstractmethod
    def try_export(self, model: nn.Module, settings: Export, example_inputs: Any) -> None:
        """Translate a model without writing a file, to find problems before a long run.

        Raises:
            ExportError: the model cannot be exported with these settings.
        """

    @abstractmethod
    def export(self, job: ExportJob) -> ExportReport:
        """Write the compact network, compare the file with it and measure both.

        Raises:
            ExportError: the model cannot be exported with these settings, or the file computes something else.
            OSError: a file cannot be written.
        """


_EXPORTERS: dict[str, type[Exporter]] = {}
ExporterClass = TypeVar("ExporterClass", bound=type[Exporter])


def register_exporter(name: str) -> Callable[[ExporterClass], ExporterClass]:
    """Return a class decorator that makes an exporter available as `export: {format: NAME}`."""

    def add(cls: ExporterClass) -> ExporterClass:
        _EXPORTERS[name] = cls
        return cls

    return add


def get_exporter(name: str) -> Exporter:
    """Return the exporter of a format; recipes are validated, so the name is known."""
    return _EXPORTERS[name]()


def exporter_names() -> list[str]:
    """Return the names of the registered exporters, sorted."""
    return sorted(_EXPORTERS)
