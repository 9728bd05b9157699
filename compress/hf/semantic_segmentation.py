"""SemanticSegmentation: Hugging Face models with a class per pixel, such as SegFormer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.training import Segmentation

from .model_call import ModelCall


class SemanticSegmentation(Segmentation):
    """`compress.Segmentation` with the loss that the model returns itself.

    Args:
        model: the model, or one of the same class.
        train: loader of training batches: dicts of the model's arguments, with `labels` of (images, height, width).
        val: loader of validation batches.
    """

    def __init__(
        self, model: PreTrainedModel, train: Iterable[Any] | None = None, val: Iterable[Any] | None = None
    ) -> None:
        self._call = ModelCall(model)
        ignored = getattr(model.config, "semantic_loss_ignore_index", None)
        super().__init__(train, val, input=model.main_input_name, target="labels", ignore=ignored)

    def inputs(self, batch: Any) -> dict[str, Any]:
        """Return the arguments of the model without labels."""
        return self._call.inputs(batch)

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(**self._call.arguments(batch))

    def teach(self, model: nn.Module, batch: Any) -> Any:
        return model(**self._call.inputs(batch))

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return self._call.loss(outputs, batch)
