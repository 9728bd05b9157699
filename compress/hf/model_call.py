"""ModelCall: a batch as the arguments of a Hugging Face model, and the loss that it returns."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from compress.errors import BatchError
from compress.formatting import describe_value


class ModelCall:
    """The arguments that a model takes; labels are those with "label" in their name.

    Args:
        model: the model, or one of the same class.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        parameters = inspect.signature(type(model).forward).parameters.values()
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self.names = [parameter.name for parameter in parameters if parameter.kind in named][1:]

    def arguments(self, batch: Any) -> dict[str, Any]:
        """Return what the model takes of a batch; other keys are left out.

        Raises:
            BatchError: the batch is not a dict of the model's arguments.
        """
        arguments = {name: batch[name] for name in self.names if name in batch} if isinstance(batch, Mapping) else {}
        if not any("label" not in name for name in arguments):
            raise BatchError(
                f"the loader: expected dicts of the model's arguments, such as {', '.join(self.names[:4])}; got "
                f"{describe_value(batch)}"
            )
        return arguments

    def inputs(self, batch: Any) -> dict[str, Any]:
        """Return the arguments without labels.

        Raises:
            BatchError: the batch is not a dict of the model's arguments.
        """
        return {name: value for name, value in self.arguments(batch).items() if "label" not in name}

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        """Return the loss in the outputs of the model.

        Raises:
            BatchError: there is none.
        """
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        if loss is None:
            labels = ", ".join(name for name in self.names if "label" in name) or "it takes none"
            raise BatchError(
                "the model: expected a loss, as Hugging Face's models return it for a batch with labels; got "
                f"none for {describe_value(batch)}. Name the labels as the model does ({labels}), or write a task "
                "with your own loss (see compress.Task). Without labels: search magnitude, and compensate: "
                "least_squares with calibration=INPUTS"
            )
        return loss.mean()  # type: ignore[no-any-return]
