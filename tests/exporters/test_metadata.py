"""A file says what it is: shapes, normalization, classes, plan."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

import compress
from compress.exporters import onnx as exporter


def test_the_file_says_what_it_is(exported_run: tuple[compress.Pruned, Path]) -> None:
    pruned, folder = exported_run
    found = exporter.read_metadata(folder / "model.onnx")
    assert found["recipe"] == pruned.report.recipe
    assert found["inputs"] == {"input": {"shape": ["batch", 1, 8, 8]}}
    saved = compress.Plan.load(folder / "plan.json")
    assert found["plan"] == saved.digest() == pruned.plan.digest()
    saved.keep[next(iter(saved.keep))] = [0]
    assert saved.digest() != found["plan"]


def test_normalisation_and_class_names_come_from_the_loader() -> None:
    from torchvision import transforms

    class Pictures(TensorDataset):
        classes = ("cat", "dog")
        transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5, 0.4), (0.3, 0.2))])

    loader = DataLoader(Subset(Pictures(torch.randn(4, 2)), [0, 1]))
    about = exporter.ExportMetadata.from_loader(loader)
    entries = about.entries({"x": ["batch", 2]})
    assert json.loads(entries["compress.classes"]) == ["cat", "dog"]
    assert json.loads(entries["compress.inputs"]) == {
        "x": {"shape": ["batch", 2], "mean": [0.5, 0.4], "std": [0.3, 0.2]}
    }
    assert set(exporter.ExportMetadata.from_loader(None).entries({})) == {"compress.version", "compress.inputs"}
