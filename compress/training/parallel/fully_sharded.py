"""FSDP2: a student whose weights, gradients and optimizer state are divided among the processes.

The launcher's settings (`accelerate config`, fsdp_version 2) choose the modules that are gathered one at a time. A
checkpoint holds whole tensors, so it has the same content as that of a student which is not sharded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.distributed import rank, sum_numbers, world_size
from compress.recipe import Finetune
from compress.storage import TrainingState, load_training_tensors_, state_tensors, training_tensors

from .reduction import Loss, ReducedGradients
from .student import Student


class FullyShardedStudent(Student):
    """A network in training of which every process holds a part of each tensor."""

    def __init__(self, network: nn.Module, config: Finetune, device: torch.device) -> None:
        model = copy.deepcopy(network)
        self.network = network
        self._free_network_()  # before the copy is divided, to keep the peak of memory low
        fully_shard_(model, device)
        super().__init__(model, config)
        self.network = network
        self.reduction = ShardedGradients(model, self.weights)

    def copy_of_weights(self) -> dict[str, Tensor]:
        """Return a copy in the main memory of rank 0, and nothing on the others."""
        return _whole_on_rank_zero(state_tensors(self.model))

    def training_state(
        self, further: Mapping[str, nn.Module], extra_tensors: Callable[[], dict[str, Tensor]], values: dict[str, Any]
    ) -> TrainingState:
        return ShardedState({"student": self.model, **further}, [self.optimizer], extra_tensors, values)

    @contextmanager
    def whole(self) -> Iterator[None]:
        self._gather_()
        try:
            yield
        finally:
            self._free_network_()

    def finish_(self) -> None:
        self._gather_()

    @torch.no_grad()
    def _gather_(self) -> None:
        whole = {name: _whole(t) for name, t in training_tensors(self.model).items()}
        for name, parameter in self.network.named_parameters():
            parameter.data = whole[name]
        load_training_tensors_(self.network, whole)

    def _free_network_(self) -> None:
        for parameter in self.network.parameters():
            parameter.data = parameter.data.new_empty(0)


class ShardedGradients:
    """Gradients of a sharded model: FSDP2 gathers weights and scatters gradients in all processes at once.

    So all processes make the same passes, and none can repeat its own.
    """

    in_lockstep = True

    def __init__(self, model: Any, weights: Sequence[nn.Parameter]) -> None:
        self.model, self.weights = model, list(weights)

    def begin(self) -> None:
        """Start a step."""
        for weight in self.weights:
            weight.grad = None

    def add(self, loss: Loss, is_last: bool) -> None:
        """Add the gradients of a micro-batch; scatter them with the last."""
        self.model.set_requires_gradient_sync(is_last)
        self.model.set_is_last_backward(is_last)
        value = loss()
        assert value is not None  # `in_lockstep`: each micro-batch has a loss, even if it counts nothing
        value.backward()  # type: ignore[no-untyped-call]

    def finish(self, failed: bool = False) -> ReducedGradients | None:
        """Return this process's part of the gradients."""
        gradients = [weight.grad for weight in self.weights]
        filled = [torch.zeros_like(w) if g is None else g for w, g in zip(self.weights, gradients, strict=True)]
        return ReducedGradients(filled, [gradient is None for gradient in gradients])


@dataclass
class ShardedState(TrainingState):
    """State of a sharded training: all processes gather whole tensors for a checkpoint, and take their part of them."""

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by their names in a checkpoint on rank 0, and nothing on the others."""
        return _whole_on_rank_zero(super().tensors())

    def is_finite(self) -> bool:
        own = all(bool(_local(p).isfinite().all()) for m in self.modules.values() for p in m.parameters())
        return sum_numbers([float(not own)])[0] == 0

    def restore_(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        shards = dict(tensors)
        like = {name: t for name, t in super().tensors().items() if _is_sharded(t)}
        for k, optimizer in enumerate(self.optimizers):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for name, tensor in tensors.items():
                prefix, _, rest = name.partition("/")
                if prefix != f"optimizer{k}" or not tensor.ndim:
                    continue
                if (p := parameters[int(rest.partition("/")[0])]).shape == tensor.shape:
                    like[name] = p
        for name, pattern in like.items():
            shards[name] = _shard_like(tensors[name], pattern)
        super().restore_(shards, values)


def fully_shard_(model: nn.Module, device: torch.device) -> None:
    """Let FSDP2 shard a network over all processes, as the launcher's settings divide it."""
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    settings = FullyShardedDataParallelPlugin()
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()
    settings.set_auto_wrap_policy(model)
    is_unit = fsdp2_prepare_auto_wrap_policy(settings, model) or (lambda module: False)
    mesh = init_device_mesh(device.type, (world_size(),))
    options = {"mesh": mesh, "reshard_after_forward": settings.reshard_after_forward}
    if settings.cpu_offload is not None and device.type != "cpu":
        options["offload_policy"] = settings.cpu_offload
    inner = [m for m in model.modules() if m is not model and any(True for _ in m.parameters())]
    for module in reversed(inner):  # children before their parents
        if is_unit(module):
            fully_shard(module, **options)
    fully_shard(model, **options)


def fully_shard_problems(network: nn.Module) -> list[str]:
    """Return what the launcher's settings ask for and fine-tuning does not support."""
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy

    try:
        settings = FullyShardedDataParallelPlugin()
        if settings.fsdp_version != 2:
            return [
                f"fsdp_version: expected 2; the launcher asks for {settings.fsdp_version}. Set `fsdp_version: 2` with "
                "accelerate config, or launch with --fsdp_version 2"
            ]
        settings.set_auto_wrap_policy(network)
        fsdp2_prepare_auto_wrap_policy(settings, network)
    except ValueError as error:
        return [f"FSDP settings of the launcher: {error}"]
    return []


def _whole_on_rank_zero(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of whole tensors in the main memory of rank 0, gathered one after the other."""
    copies = {}
    for name, tensor in tensors.items():
        whole = _whole(tensor.detach())
        if rank() == 0:
            copies[name] = whole.to("cpu", copy=True)
    return copies


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if _is_sharded(tensor) else tensor  # type: ignore[no-any-return]


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if _is_sharded(tensor) else tensor  # type: ignore[no-any-return]


def _is_sharded(tensor: Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _shard_like(tensor: Tensor, like: Any) -> Tensor:
    """Return this process's part of a tensor that all processes have."""
    from torch.distributed.tensor import distribute_tensor

    on_device = tensor.to(device=like.device, dtype=like.dtype)
    return distribute_tensor(on_device, like.device_mesh, like.placements, src_data_rank=None)
