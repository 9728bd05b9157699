"""Providers of the compact forms of torchvision and timm, which are imported when one of their modules is met."""

from __future__ import annotations

from .compact_forms import register_form_provider


def _load_torchvision_forms() -> None:
    from . import torchvision_attention  # noqa: F401


def _load_timm_forms() -> None:
    from . import timm_attention, timm_norms  # noqa: F401


register_form_provider("torchvision", _load_torchvision_forms)
register_form_provider("timm", _load_timm_forms)
