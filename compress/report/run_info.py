"""Describe the origin of a run and the machine it ran on, for the report."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

import torch
from torch import nn

from compress.version import __version__


def run_origin(model: nn.Module, seed: int) -> dict[str, Any]:
    """Return model, seed, date and library version: what distinguishes a run from others.

    Taken when a run starts; a resumed run keeps it.
    """
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return {"model": _model_name(model), "seed": seed, "date": date, "version": __version__}


def _model_name(model: nn.Module) -> str:
    """Return the architecture name of a timm model, or the class name of any other."""
    configs = [getattr(model, name, None) for name in ("pretrained_cfg", "default_cfg")]
    names = [config.get("architecture") for config in configs if isinstance(config, Mapping)]
    return next((name for name in names if isinstance(name, str) and name), type(model).__name__)


def describe_machine(device: torch.device, batch_size: int | str) -> dict[str, Any]:
    """Return what the latencies were measured on: device, threads, batch size and PyTorch version."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    threads = {"threads": torch.get_num_threads(), "cores": os.cpu_count()} if device.type == "cpu" else {}
    return {"device": f"{device.type} ({name})", **threads, "batch size": batch_size, "torch": torch.__version__}
