"""Batches are divided into micro-batches where their samples can be told apart."""

from __future__ import annotations

import torch

from compress.data.micro_batches import batch_size_of, slice_batch, split_batch


def test_batches_are_split_if_their_samples_can_be_distinguished() -> None:
    x, y = torch.randn(5, 3), torch.arange(5)
    images, targets = [torch.rand(3, 4, 4) for _ in range(3)], [{"boxes": torch.rand(3, 4)} for _ in range(3)]
    assert [batch_size_of(b) for b in ((x, y), {"a": x}, (images, targets), (x, torch.ones(4)), "text")] == [
        5,
        5,
        3,
        None,
        None,
    ]
    parts = split_batch((x, y), 2)
    assert [len(part[1]) for part in parts] == [3, 2]
    assert torch.equal(torch.cat([part[0] for part in parts]), x)
    assert split_batch("text", 4) == ["text"]
    assert slice_batch((images, targets), 1, 3)[1] == targets[1:3]
    assert [len(p["inputs"]) for p in split_batch({"inputs": images, "data_samples": targets}, 2)] == [2, 1]


def test_labels_of_hugging_face_detectors_stay_with_their_images() -> None:
    """Two images with two boxes each: the boxes are not samples."""
    x = torch.randn(2, 3, 4, 4)
    labels = [{"class_labels": torch.tensor([i, i]), "boxes": torch.rand(2, 4)} for i in range(2)]
    first, second = split_batch({"pixel_values": x, "labels": labels}, 2)
    assert torch.equal(second["pixel_values"], x[1:])
    assert [first["labels"], second["labels"]] == [labels[:1], labels[1:]]
    labels[1] = {name: values[:1] for name, values in labels[1].items()}
    assert batch_size_of({"pixel_values": x, "labels": labels}) == 2
