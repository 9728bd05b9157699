"""Providers of the compact forms of other libraries, which are imported when one of their modules is met."""

from __future__ import annotations

import contextlib
import importlib
from functools import partial

from ..compact_forms import register_form_provider


def _load_torchvision_forms() -> None:
    from . import torchvision_attention  # noqa: F401


def _load_timm_forms() -> None:
    from . import timm_attention, timm_davit, timm_hybrid_attention, timm_norms  # noqa: F401


# Files of forms for models of transformers, which are many and slow to import: each file loads with one of its models.
TRANSFORMERS_FORMS = {
    "transformers_attention": "vit deit dinov2 dinov2_with_registers ijepa beit vivit swin",
    "transformers_clip": "clip siglip siglip2",
    "transformers_detection": "detr yolos",
    "transformers_norms": "convnextv2",
    "transformers_rotary": "dinov3_vit",
    "transformers_video": "videomae timesformer",
}


def _load_transformers_forms(file: str) -> None:
    with contextlib.suppress(ImportError, AttributeError):  # older versions lack some of the classes
        importlib.import_module(f".{file}", __package__)


def _load_ultralytics_forms() -> None:
    with contextlib.suppress(ImportError):  # older versions lack some of the classes
        from . import ultralytics_attention  # noqa: F401


register_form_provider("torchvision", _load_torchvision_forms)
register_form_provider("timm", _load_timm_forms)
for _file, _models in TRANSFORMERS_FORMS.items():
    for _model in _models.split():
        register_form_provider(f"transformers.models.{_model}", partial(_load_transformers_forms, _file))
register_form_provider("ultralytics", _load_ultralytics_forms)
