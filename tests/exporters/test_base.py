"""Exporters are registered by name, and recipes and working directories know the same names."""

from __future__ import annotations

from typing import get_args

import pytest

import compress
from compress.exporters import exporter_names, get_exporter
from compress.recipe import ExportFormat
from compress.storage import EXPORT_FILES


def test_recipes_name_every_registered_exporter() -> None:
    assert exporter_names() == sorted(get_args(ExportFormat))


def test_working_directories_know_the_files_of_every_exporter() -> None:
    exporters = [get_exporter(name) for name in exporter_names()]
    assert {file for e in exporters for file in (e.file_name, e.int8_file_name)} == set(EXPORT_FILES)


def test_unknown_format_is_an_error_of_the_recipe() -> None:
    with pytest.raises(compress.RecipeError, match=r"export\.format: expected one of onnx; got 'tflite'"):
        compress.Recipe.load({"budget": {"macs": 0.5}, "export": {"format": "tflite"}})
