"""SemanticSegmentation: Hugging Face models with a class per pixel, such as SegFormer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
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
        self._outputs = len(model.config.id2label or ())
        super().__init__(train, val, input=model.main_input_name, target="labels", ignore=ignored)

    def inputs(self, batch: Any) -> dict[str, Any]:
        """Return the arguments of the model without labels."""
        return self._call.inputs(batch)

    def forward(self, model: nn.Module, batch: Any) -> Any:
        arguments = self._call.arguments(batch)
        if arguments.get("labels") is not None:
            self._check_classes(self.split(batch)[1], self._outputs)
            labels = arguments["labels"].long()  # the models take no other type and no channel
            arguments["labels"] = labels[:, 0] if labels.ndim == 4 else labels
        return model(**arguments)

    def teach(self, model: nn.Module, batch: Any) -> Any:
        return model(**self._call.inputs(batch))

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        """Return the loss of the model; 0 if all pixels are ignored, where the model's own is not a number."""
        loss = self._call.loss(outputs, batch)
        return torch.where(self.counted_pixels(batch).any(), loss, torch.zeros_like(loss))
