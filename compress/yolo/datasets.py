"""Datasets: a data YAML is checked before anything is read, and Ultralytics' own classes read the images."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader
from ultralytics.data.build import seed_worker
from ultralytics.data.utils import check_cls_dataset, check_det_dataset, img2label_paths
from ultralytics.utils import DATASETS_DIR, YAML
from ultralytics.utils.checks import check_file

from compress.modules import unwrap_model

from .families import Family
from .quiet import plain_text, quiet

LABELS_ADVICE = "The labels of images/a.jpg are in labels/a.txt, one line for each object"


def read_data(data: str | Path, family: Family) -> dict[str, Any]:
    """Return a data YAML (for classification a folder) as Ultralytics' trainers take it; nothing is downloaded.

    Raises:
        ValueError: it cannot be read, lacks a key, or the images are not where it says.
    """
    where = f"data {data}"
    if "://" in str(data):
        raise ValueError(f"{where}: expected a data YAML or a folder on this machine; nothing is downloaded")
    if family.task == "classify":
        if not (Path(data) / "train").is_dir():
            raise ValueError(f"{where}: expected a folder with train/CLASS/IMAGE and val/CLASS/IMAGE; found no train")
        with quiet():
            folders: dict[str, Any] = check_cls_dataset(data)
        _check_class_folders(folders, where)
        return folders
    try:
        with quiet():
            file = check_file(str(data), hard=False)
            content = YAML.load(file) if file else None
    except Exception as error:  # the type depends on the YAML
        raise ValueError(f"{where}: not a YAML file: {plain_text(error)}") from error
    if content is None:
        raise ValueError(f"{where}: no such file; expected a data YAML with train, val and names")
    missing = [
        key for key in ("train", "val") if not content.get(key) and not (key == "val" and "validation" in content)
    ]
    missing += ["names"] if content.get("names") is None and "nc" not in content else []
    missing += ["kpt_shape"] if family.task == "pose" and not content.get("kpt_shape") else []
    if missing:
        raise ValueError(
            f"{where}: expected train, val and names (poses: kpt_shape, too); it has no {', '.join(missing)}"
        )
    try:
        with quiet():
            settings: dict[str, Any] = check_det_dataset(file, autodownload=False)
    except FileNotFoundError as error:
        problem = plain_text(error).partition(" Note dataset")[0]
        raise ValueError(
            f"{where}: {problem}. Set its path: to where the images are, best from the root; Ultralytics looks up a "
            f"relative path in {DATASETS_DIR}"
        ) from error
    except (SyntaxError, TypeError) as error:
        raise ValueError(f"{where}: {plain_text(error)}") from error
    train = settings["train"] if isinstance(settings["train"], list) else [settings["train"]]
    if absent := [path for path in train if not Path(path).exists()]:
        raise ValueError(f"{where}: train: no such folder or file: {absent[0]}. Set its path: to where the images are")
    return settings


def build_loader(
    family: Family, network: nn.Module, settings: Any, data: dict[str, Any], mode: str
) -> DataLoader[dict[str, Any]]:
    """Return a loader of the images of a split, with Ultralytics' dataset and augmentation.

    It is a plain DataLoader, whose order and augmentation can be repeated, as a search needs that is resumed.
    Ultralytics' trainer makes its own loader.

    Raises:
        ValueError: the split has no images, or no labels.
    """
    where = f"data {settings.data}: {mode}"
    builder: Any = object.__new__(family.trainer)  # what its `build_dataset` reads, and nothing else
    builder.args, builder.data, builder.model = settings, data, unwrap_model(network)
    try:
        with quiet():
            dataset = builder.build_dataset(data[mode], mode, settings.batch)
    except (FileNotFoundError, RuntimeError, ValueError) as error:
        advice = "" if family.task == "classify" else f". {LABELS_ADVICE}"
        raise ValueError(f"{where}: {_shortened(plain_text(error))}{advice}") from error
    if not len(dataset):
        raise ValueError(f"{where}: expected at least one image; found none")
    if family.task != "classify":
        _check_labels(dataset, where)
    return DataLoader(
        dataset,
        batch_size=min(settings.batch, len(dataset)),
        shuffle=mode == "train",
        num_workers=settings.workers if next(network.parameters()).is_cuda else 0,
        collate_fn=getattr(dataset, "collate_fn", None),
        worker_init_fn=seed_worker,
    )


def _check_class_folders(folders: dict[str, Any], where: str) -> None:
    """Check that training and validation data have the same classes, which are numbered by their folders.

    Raises:
        ValueError: they have not, or there are no validation data.
    """
    if not folders["val"]:
        raise ValueError(f"{where}: expected a folder with train/CLASS/IMAGE and val/CLASS/IMAGE; found no val")
    train, val = ({path.name for path in Path(folders[part]).iterdir() if path.is_dir()} for part in ("train", "val"))
    if train != val:
        differing = ", ".join(sorted(train ^ val)[:3])
        raise ValueError(
            f"{where}: expected the same class folders in train and val; they have {len(train)} and {len(val)}, and "
            f"differ in {differing}. Classes are numbered by their folders; add the missing ones, with their images"
        )


def _check_labels(dataset: Any, where: str) -> None:
    """Check that a dataset has labels; warn about the images that Ultralytics leaves out.

    Raises:
        ValueError: no image has a label.
    """
    if not any(len(label["cls"]) for label in dataset.labels):
        raise ValueError(f"{where}: expected labels; found none for {len(dataset)} images. {LABELS_ADVICE}")
    found, used = dataset.label_files, set(img2label_paths(dataset.im_files))
    if dropped := [file for file in found if file not in used]:
        warnings.warn(
            f"{where}: {len(dropped)} of {len(found)} images are left out, the first with the labels {dropped[0]}: the "
            "image cannot be read, or its labels have other columns, boxes outside of the image, or a class that the "
            "data YAML does not name",
            stacklevel=2,
        )


def _shortened(text: str, length: int = 400) -> str:
    """Return the start of a text: Ultralytics lists every image."""
    return text if len(text) <= length else f"{text[:length].rstrip()} ..."


def with_settings(network: Any, settings: Any, data: dict[str, Any]) -> Any:
    """Return a copy of a network that shares its layers and has the settings that Ultralytics' losses read from it."""
    copied = copy.copy(network)
    vars(copied).update(args=settings, nc=data["nc"], names=data["names"], criterion=None)
    return copied
