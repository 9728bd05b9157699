"""The architecture of a network as data: its YAML in a JSON file, which is checked before a network is built from it.

Ultralytics builds layers by the names in the YAML, looks these names up among all objects of a module, and evaluates
the activation as Python code. From a file in a saved directory only layers and activations are taken here, by name.
"""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from ultralytics import __version__
from ultralytics.nn import tasks

from compress.formatting import describe_value
from compress.storage import YOLO_FILE, isolated_random_state, read_json, write_atomic

from .families import family_of, family_of_head
from .quiet import plain_text, quiet

ACTIVATION = re.compile(r"(?:torch\.)?nn\.(\w+)\((?:(?:inplace=)?(?:True|False)|[0-9.e-]*)\)")
WITH_DOWNLOADS = ("TorchVision",)  # layers that fetch weights when they are built
ADVICE = 'Give the architecture yourself: compress.yolo.load(directory, "yolo11n.yaml")'


@dataclass(frozen=True)
class Architecture:
    """The YAML of a network, with the names of the classes and the image size it was trained at."""

    yaml: dict[str, Any]
    names: dict[int, str]
    image_size: int | None = None

    @classmethod
    def of(cls, network: Any, image_size: int | None = None) -> Architecture:
        """Return the architecture of the dense network that a network was, before it was pruned."""
        family_of(network)
        names = {int(number): str(name) for number, name in network.names.items()}
        return cls(copy.deepcopy(dict(network.yaml)), names, image_size)

    def build(self, where: str = "model") -> nn.Module:
        """Build the network with random weights.

        Raises:
            ValueError: the head is not known, or the layers and their arguments do not go together.
        """
        family = family_of_head(self.yaml["head"][-1][2], where)
        try:
            with quiet(), isolated_random_state():
                network: Any = family.network(copy.deepcopy(self.yaml), ch=self.yaml.get("channels", 3), verbose=False)
        except Exception as error:  # the type depends on the layer
            raise ValueError(
                f"{where}: the architecture cannot be built: {type(error).__name__}: {plain_text(error)}. {ADVICE}"
            ) from error
        network.names = dict(self.names)
        network.task = family.task
        return network  # type: ignore[no-any-return]

    def save(self, folder: Path) -> None:
        """Write the file; it appears completely or not at all."""
        content = {
            "ultralytics": __version__,
            "yaml": self.yaml,
            "names": [self.names[number] for number in sorted(self.names)],
            "image_size": self.image_size,
        }
        write_atomic(folder / YOLO_FILE, json.dumps(content, indent=1).encode())

    @classmethod
    def read(cls, folder: Path) -> Architecture:
        """Read the file of a saved directory; nothing in it is run.

        Raises:
            FileNotFoundError: the directory has none.
            ValueError: the file holds anything but layers of Ultralytics and torch, by name, and plain values.
        """
        path = folder / YOLO_FILE
        if not path.exists():
            raise FileNotFoundError(f"{path}: expected the architecture of the network; there is none. {ADVICE}")
        try:
            content = read_json(path)
            if not isinstance(content, dict):
                raise ValueError(f"expected a JSON object; got {describe_value(content)}")
            names, size = content["names"], content["image_size"]
            yaml = content["yaml"]
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise ValueError("names: expected a list of strings")
            if size is not None and (type(size) is not int or size < 1):
                raise ValueError(f"image_size: expected a number of pixels; got {size!r}")
            check_yaml(yaml)
        except (KeyError, TypeError, ValueError) as error:
            problem = f"{error.args[0]} is missing" if isinstance(error, KeyError) else error
            raise ValueError(f"{path}: {problem}. {ADVICE}") from error
        return cls(yaml, dict(enumerate(names)), size)


def check_yaml(yaml: Any) -> None:
    """Check that a YAML names only layers, and an activation of torch, so that building it runs no other code.

    Raises:
        ValueError: it names something else; the message says where.
    """
    if not isinstance(yaml, dict) or not all(
        isinstance(yaml.get(key), list) and yaml[key] for key in ("backbone", "head")
    ):
        raise ValueError("yaml: expected a dict with backbone and head, each a list of layers")
    activation = yaml.get("activation")
    if activation:
        match = ACTIVATION.fullmatch(activation) if isinstance(activation, str) else None
        if match is None or not _is_layer(getattr(nn, match[1], None)):
            raise ValueError(f"yaml.activation: expected one of torch such as nn.ReLU(); got {activation!r}")
    for part in ("backbone", "head"):
        for number, row in enumerate(yaml[part]):
            where = f"yaml.{part}[{number}]"
            if not isinstance(row, list) or len(row) != 4 or not isinstance(row[2], str):
                raise ValueError(f"{where}: expected [from, repeats, layer, arguments]; got {str(row)[:60]}")
            if not is_known_layer(row[2]):
                raise ValueError(f"{where}: expected a layer of Ultralytics or torch.nn; got {row[2]!r}")
            if type(row[1]) is not int or not isinstance(row[3], list) or not _is_plain(row[3]):
                raise ValueError(f"{where}: expected a number of repeats and a list of plain arguments")


def is_known_layer(name: str) -> bool:
    """Return whether a name in a YAML is that of a layer, and not of any other object.

    >>> is_known_layer("C3k2"), is_known_layer("nn.Upsample"), is_known_layer("load_checkpoint")
    (True, True, False)
    """
    if name.startswith("nn."):
        return _is_layer(getattr(nn, name[3:], None))
    layer = vars(tasks).get(name)
    return name not in WITH_DOWNLOADS and _is_layer(layer) and layer.__module__.startswith("ultralytics.nn.modules.")


def _is_layer(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)
