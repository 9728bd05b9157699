"""DeepSpeed ZeRO: a student whose optimizer state, gradients and weights DeepSpeed divides among the processes.

Stage 1 divides the optimizer state, stage 2 the gradients, too, stage 3 also the weights. DeepSpeed clips and steps by
itself, so gradients never leave it. A checkpoint holds whole weights, and the parts of the optimizer state of all
processes one above the other.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.distributed import all_gather_tensor, rank, sum_numbers, world_size
from compress.recipe import Finetune
from compress.storage import TrainingState, load_training_tensors_, tensors_under, training_tensors

from ..gradients import GradientResult
from ..optimizers import make_optimizer
from .reduction import Loss, ReducedGradients
from .student import Student


class ZeroStudent(Student):
    """A network in training that DeepSpeed divides among the processes."""

    def __init__(self, network: nn.Module, config: Finetune, device: torch.device) -> None:
        self.network, self.config, self.device = network, config, device
        self.weights = []  # DeepSpeed keeps their gradients
        self._start(network)
        self.reduction = ZeroGradients(self)
        self._free_network_()

    def _start(self, network: nn.Module) -> None:
        """Let DeepSpeed divide a copy of a network."""
        import deepspeed

        self.module = copy.deepcopy(network)
        self.optimizer = make_optimizer(self.config, self.module.parameters())
        settings = deepspeed_settings(self.config)
        self.stage = settings["zero_optimization"]["stage"]
        if self.device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        self.engine, self.zero_optimizer, *_ = deepspeed.initialize(
            model=self.module, optimizer=self.optimizer, config=settings
        )
        self.model = self.engine

    @property
    def modules(self) -> nn.Module:
        return self.module

    @property
    def partitions(self) -> list[Tensor]:
        """Return this process's parts of the weights, on which the optimizer steps."""
        zero = self.zero_optimizer
        parts: list[Tensor] = (
            zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups
        )
        return parts

    def step(self, result: GradientResult) -> None:
        self.engine.step()

    def copy_of_weights(self) -> dict[str, Tensor]:
        """Return a copy in the main memory of rank 0, and nothing on the others."""
        names = set(self.network.state_dict())
        return {name: t for name, t in self.whole_tensors().items() if name in names}

    def training_state(
        self, further: Mapping[str, nn.Module], extra_tensors: Callable[[], dict[str, Tensor]], values: dict[str, Any]
    ) -> TrainingState:
        state = ZeroState(further, (), extra_tensors, values)
        state.student = self
        return state

    @contextmanager
    def whole(self) -> Iterator[None]:
        self.finish_()
        try:
            yield
        finally:
            self._free_network_()

    @torch.no_grad()
    def finish_(self) -> None:
        whole = self._tensors(lambda tensor: tensor.clone())
        for name, parameter in self.network.named_parameters():
            parameter.data = whole[name]
        load_training_tensors_(self.network, whole)

    def restart_(self, tensors: Mapping[str, Tensor]) -> None:
        """Start again from whole weights."""
        for name, parameter in self.network.named_parameters():
            parameter.data = tensors[name].to(parameter.device, copy=True)
        load_training_tensors_(self.network, tensors)
        self.engine.destroy()
        self._start(self.network)
        self._free_network_()

    def whole_tensors(self) -> dict[str, Tensor]:
        """Return copies of whole tensors in the main memory of rank 0, and nothing on the others."""
        copies = self._tensors(lambda tensor: tensor.to("cpu", copy=True) if rank() == 0 else torch.empty(0))
        return copies if rank() == 0 else {}

    def _tensors(self, copy_of: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return copies of all tensors that training changes; weights are gathered one after the other."""
        import deepspeed

        copies = {name: copy_of(tensor) for name, tensor in training_tensors(self.module).items()}
        if self.stage == 3:
            for name, parameter in self.module.named_parameters(remove_duplicate=False):
                with deepspeed.zero.GatheredParameters(parameter):
                    copies[name] = copy_of(parameter.data)
        return copies

    def _free_network_(self) -> None:
        for parameter in self.network.parameters():
            parameter.data = parameter.data.new_empty(0)


class ZeroGradients:
    """Backward passes through DeepSpeed, which keeps the gradients."""

    in_lockstep = True

    def __init__(self, student: ZeroStudent) -> None:
        self.student = student

    def begin(self) -> None:
        """Start a step."""

    def add(self, loss: Loss, is_last: bool) -> None:
        """Add the gradients of a micro-batch."""
        engine = self.student.engine
        engine.set_gradient_accumulation_boundary(is_last)
        value = loss()
        assert value is not None  # `in_lockstep`: each micro-batch has a loss, even if it counts nothing
        engine.backward(value)

    def finish(self, failed: bool = False) -> ReducedGradients | None:
        """Return no gradients: DeepSpeed has them."""
        return ReducedGradients([], [])


@dataclass
class ZeroState(TrainingState):
    """State of a training by DeepSpeed: whole weights, and the optimizer's parts of all processes."""

    student: ZeroStudent | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by their names in a checkpoint on rank 0, and nothing on the others."""
        assert self.student is not None
        tensors = super().tensors() | {f"student/{n}": t for n, t in self.student.whole_tensors().items()}
        state = self.student.optimizer.state
        for i, partition in enumerate(self.student.partitions):
            for name, value in state.get(partition, {}).items():
                if isinstance(value, Tensor):
                    parts = all_gather_tensor(value)
                    tensors[f"optimizer0/{i}/{name}"] = parts if value.ndim == 0 else parts.cpu()
        return tensors if rank() == 0 else {}

    def is_finite(self) -> bool:
        assert self.student is not None
        own = all(bool(partition.isfinite().all()) for partition in self.student.partitions)
        return sum_numbers([float(not own)])[0] == 0

    def restore_(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint.

        Raises:
            ValueError: the checkpoint is of another number of processes.
        """
        optimizer_state = tensors_under(tensors, "optimizer0/")
        for parts in optimizer_state.values():
            if len(parts) != world_size():
                raise ValueError(
                    f"resume: DeepSpeed's optimizer state is of {len(parts)} processes, and there are {world_size()}; "
                    "resume with as many"
                )
        assert self.student is not None
        super().restore_(tensors, values)
        self.student.restart_(tensors_under(tensors, "student/"))
        partitions, state = self.student.partitions, self.student.optimizer.state
        for path, parts in optimizer_state.items():
            number, _, name = path.partition("/")
            partition = partitions[int(number)]
            value = parts[rank()].clone()
            state.setdefault(partition, {})[name] = value.to(partition.device) if value.ndim else value


def deepspeed_settings(config: Finetune) -> dict[str, Any]:
    """Return DeepSpeed's configuration: that of the launcher, with the recipe's clipping; the engine accumulates."""
    from accelerate.utils import DeepSpeedPlugin

    settings = copy.deepcopy(DeepSpeedPlugin().deepspeed_config)
    settings.pop("train_batch_size", None)
    return _without_auto(settings) | {
        "train_micro_batch_size_per_gpu": 1,  # only for DeepSpeed's own statistics
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.clip or 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
    }


def zero_problems(network: nn.Module) -> list[str]:
    """Return what the launcher asks DeepSpeed for and fine-tuning does not support."""
    try:
        import deepspeed
        from accelerate.utils import DeepSpeedPlugin
    except ImportError:
        return ["ACCELERATE_USE_DEEPSPEED: deepspeed is not installed: pip install deepspeed"]
    del deepspeed
    settings, problems = DeepSpeedPlugin().deepspeed_config, []
    if settings["zero_optimization"]["stage"] not in (1, 2, 3):
        problems.append("zero_stage: expected 1, 2 or 3; for 0, launch without DeepSpeed")
    problems += [
        f"DeepSpeed's configuration: {section} is not supported, because the recipe's finetune section sets it; "
        "leave it out"
        for section in ("optimizer", "scheduler")
        if section in settings
    ]
    problems += [
        f"DeepSpeed's configuration: {section} is not supported; use engine.precision: bf16"
        for section in ("fp16", "bf16")
        if str(settings.get(section, {}).get("enabled", False)).lower() == "true"
    ]
    dtypes = sorted({str(p.dtype) for p in network.parameters() if p.requires_grad} - {"torch.float32"})
    if dtypes:
        problems.append(f"model: expected weights in float32, which DeepSpeed steps in; got {', '.join(dtypes)}")
    return problems


def _without_auto(settings: dict[str, Any]) -> dict[str, Any]:
    """Leave out the values that DeepSpeed has defaults for."""
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in settings.items()
        if value != "auto" and value is not None
    }
