"""Build YOLO objects from a YAML, and read checkpoints of Ultralytics without running code that is in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from ultralytics import RTDETR, YOLO
from ultralytics.engine.model import Model
from ultralytics.nn import tasks

from .families import family_of, family_of_head
from .quiet import plain_text, quiet

YAML_SUFFIXES = (".yaml", ".yml")


def build(
    spec: str | Path | Model,
    *,
    classes: int | None = None,
    keypoints: Sequence[int] | None = None,
    trust_pickle: bool = False,
) -> Model:
    """Return the YOLO (or RTDETR) object of a YAML, with random weights, or of a checkpoint; nothing is downloaded.

    A checkpoint (.pt) is a pickle, which can run any code. It is read by Ultralytics' own restricted loader, which
    allows known layers and plain data only.

    Args:
        spec: name or path of a YAML such as `yolo11n.yaml`, path of a .pt file, or a YOLO object, which is returned.
        classes: number of classes, if it is not that of the YAML.
        keypoints: `kpt_shape` of a network for poses, if it is not that of the YAML: [17, 3] for 17 points with x, y
            and visibility.
        trust_pickle: read a checkpoint that the restricted loader refuses; the code in it is run.

    Raises:
        ValueError: there is no such file, it cannot be read without running its code, or the head is not known.
    """
    if isinstance(spec, Model):
        family_of(spec.model)
        return spec
    path = Path(spec)
    if path.suffix.lower() in YAML_SUFFIXES:
        return _from_yaml(str(spec), classes, keypoints)
    if path.suffix.lower() != ".pt":
        raise ValueError(f"yolo {spec}: expected a YAML such as yolo11n.yaml, or a checkpoint such as weights.pt")
    if not path.is_file():
        raise ValueError(f"yolo {spec}: no such file; expected a checkpoint on this machine, nothing is downloaded")
    return _from_checkpoint(path, trust_pickle)


def _from_yaml(spec: str, classes: int | None, keypoints: Sequence[int] | None) -> Model:
    """Build the network of a YAML, with random weights.

    Raises:
        ValueError: there is no such YAML, it is not that of a network, or its head is not known.
    """
    try:
        with quiet():
            content: Any = tasks.yaml_model_load(spec)
        head = content["head"][-1][2]
    except FileNotFoundError:
        raise ValueError(
            f"yolo {spec}: no such YAML; expected a path, or one that comes with Ultralytics, such as yolo11n.yaml"
        ) from None
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"yolo {spec}: expected the YAML of a network, with backbone and head") from error
    family = family_of_head(head, f"yolo {spec}")
    with quiet():
        model = RTDETR(spec) if family.network is tasks.RTDETRDetectionModel else YOLO(spec)
        changes: dict[str, Any] = {} if classes is None else {"nc": classes}
        if keypoints is not None and family.task == "pose":
            changes["kpt_shape"] = list(keypoints)
        if any(content.get(key) != value for key, value in changes.items()):
            network: Any = family.network({**content, **changes}, nc=classes, verbose=False)
            network.args, network.task = model.model.args, model.model.task
            model.model = network
    return model


def _from_checkpoint(path: Path, trust_pickle: bool) -> Model:
    """Read the network of a checkpoint.

    Raises:
        ValueError: the restricted loader refuses the file, it holds no network, or one that is not known.
    """
    if not trust_pickle:
        try:
            with quiet():
                tasks.torch_safe_load(path, safe_only=True)
        except Exception as error:  # the type depends on what is wrong with the file
            foreign = _foreign_classes(path)
            holds = f"holds {', '.join(foreign[:3])}, which" if foreign else "is no checkpoint of a network, or"
            raise ValueError(
                f"yolo {path}: {holds} cannot be read without running code that is in the file, because a .pt file is "
                "a pickle. If you know where it comes from, say so: --trust-pickle, or trust_pickle=True. Otherwise "
                "give the YAML of the network, and its weights as .safetensors"
            ) from error
    try:
        with quiet(), _restricted_loader(not trust_pickle):
            model = YOLO(str(path))
    except Exception as error:  # the type depends on what is in the file
        raise ValueError(
            f"yolo {path}: expected a checkpoint that Ultralytics saved, which holds a network; it cannot be used: "
            f"{plain_text(error)[:200]}. If it holds weights alone, give the YAML of the network, and the file as "
            "--weights"
        ) from error
    family_of(model.model, f"yolo {path}")
    unfreeze_(model.model)
    return model


def unfreeze_(network: nn.Module) -> None:
    """Let a network be trained if all of its parameters are frozen, as Ultralytics saves them after a training.

    The integral over box sides (`dfl`) stays frozen, as in Ultralytics' own trainers.
    """
    if not any(parameter.requires_grad for parameter in network.parameters()):
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(parameter.is_floating_point() and ".dfl" not in name)


def _foreign_classes(path: Path) -> list[str]:
    """Return the classes and functions that unpickling would call, other than those of torch and Ultralytics."""
    try:
        names: list[str] = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    except Exception:  # not a file written by torch.save
        return []
    return sorted(name for name in names if not name.startswith(("torch.", "ultralytics.")))


@contextmanager
def _restricted_loader(enabled: bool) -> Iterator[None]:
    """Let Ultralytics read checkpoints with its restricted loader, or without it, during the block."""
    before, tasks.SAFE_LOAD = tasks.SAFE_LOAD, enabled
    try:
        yield
    finally:
        tasks.SAFE_LOAD = before
