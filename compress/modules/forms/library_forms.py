"""Providers of the compact forms of other libraries, which are imported when one of their modules is met."""

from __future__ import annotations

import contextlib

from ..compact_forms import register_form_provider


def _load_torchvision_forms() -> None:
    from . import torchvision_attention  # noqa: F401


def _load_timm_forms() -> None:
    from . import timm_attention, timm_hybrid_attention, timm_norms  # noqa: F401


def _load_transformers_forms() -> None:
    with contextlib.suppress(ImportError, AttributeError):  # older versions lack some of the classes
        from . import transformers_attention  # noqa: F401


def _load_ultralytics_forms() -> None:
    with contextlib.suppress(ImportError):  # older versions lack some of the classes
        from . import ultralytics_attention  # noqa: F401


register_form_provider("torchvision", _load_torchvision_forms)
register_form_provider("timm", _load_timm_forms)
register_form_provider("transformers", _load_transformers_forms)
register_form_provider("ultralytics", _load_ultralytics_forms)
