"""The network that fine-tuning trains, with its optimizer: whole in every process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn, optim

from compress.recipe import Finetune
from compress.storage import TrainingState, state_tensors

from ..gradients import GradientResult
from ..optimizers import make_optimizer
from .reduction import Reduction


class Student:
    """A network in training whose weights are whole in every process.

    Attributes:
        network: the network whose weights are trained; with a sharded student it holds them in `whole` only.
        model: on which forward passes run.
        reduction: runs backward passes; None: as `GradientComputer` does by default.
    """

    reduction: Reduction | None = None

    def __init__(self, network: nn.Module, config: Finetune) -> None:
        self.network, self.model, self.config = network, network, config
        self.optimizer: optim.Optimizer = make_optimizer(config, network.parameters())
        self.weights = [p for p in network.parameters() if p.requires_grad]

    @property
    def modules(self) -> nn.Module:
        """Return the module whose submodules have the names of the network's."""
        return self.model

    def step(self, result: GradientResult) -> None:
        """Step the weights on the gradients of a step."""
        for weight, gradient, unused in zip(self.weights, result.gradients, result.unused, strict=True):
            weight.grad = None if unused else gradient
        if self.config.clip is not None:
            nn.utils.clip_grad_norm_([w for w in self.weights if w.grad is not None], self.config.clip)
        self.optimizer.step()

    def copy_of_weights(self) -> dict[str, Tensor]:
        """Return a copy of parameters and buffers, to keep the best ones in."""
        return {name: t.detach().clone() for name, t in state_tensors(self.network).items()}

    def training_state(
        self, further: Mapping[str, nn.Module], extra_tensors: Callable[[], dict[str, Tensor]], values: dict[str, Any]
    ) -> TrainingState:
        """Return what a checkpoint has to hold: the student under its name, and further modules."""
        return TrainingState({"student": self.model, **further}, [self.optimizer], extra_tensors, values)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Let `network` hold the current weights during the block."""
        yield

    @torch.no_grad()
    def finish_(self) -> None:
        """Let `network` hold the trained weights for good."""
