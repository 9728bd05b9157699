"""Ultralytics' trainers, given a network that is there already: they would build the dense one from its YAML."""

from __future__ import annotations

from typing import Any

from torch import nn
from ultralytics.nn.tasks import load_checkpoint


def keep_network(trainer: type[Any], network: nn.Module) -> type[Any]:
    """Return a trainer class that trains this network, at its widths, and continues from checkpoints of it."""
    return type(f"Pruned{trainer.__name__}", (_KeepsNetwork, trainer), {"network": network})


class _KeepsNetwork:
    """The methods of a trainer in which Ultralytics builds a network from the YAML of the model."""

    network: nn.Module
    resume: bool
    model: Any
    data: dict[str, Any]
    ddp: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.ddp:  # other processes would build the network from its YAML
            raise ValueError("device: a pruned network is trained on one device here; got several. Give one, such as 0")
        classes, images = len(self.network.names), self.data["nc"]  # type: ignore[arg-type]
        if classes != images:
            raise ValueError(
                f"data {self.data.get('yaml_file', '')}: expected {classes} classes, those of the network; got "
                f"{images}. Train the dense network on these data first, then prune it"
            )

    def get_model(self, cfg: Any = None, weights: Any = None, verbose: bool = True) -> nn.Module:
        """Return the network; there is nothing to build."""
        return self.network

    def setup_model(self) -> Any:
        """Train the network; if a training is resumed, the one in its checkpoint."""
        checkpoint = None
        self.model = self.network
        if self.resume:
            self.model, checkpoint = load_checkpoint(self.args.model)  # type: ignore[attr-defined]
        for parameter in self.model.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        return checkpoint
