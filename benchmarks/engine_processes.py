"""Steps of two processes for benchmarks/engine.py: ours, with one message after the backward pass, and plain DDP."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import compress
from compress.distributed import all_reduce_mean, init_process_group, rank, world_size
from compress.progress import ProgressDisplay
from compress.recipe import Finetune, Target
from compress.search import Job, search_class
from compress.surgery import find_groups
from compress.training import Classification, Engine, FineTuneJob, FineTuner, make_optimizer
from compress.training.parallel.reduction import LocalGradients, ReducedGradients, Reduction, Reductions

from .models import CifarResNet

Step = Callable[[], Any]
CONFIG = Finetune.model_validate({"epochs": 1, "lr": 0.01})
ADAMW = Finetune.model_validate({"epochs": 1, "lr": 1e-4, "optimizer": "adamw"})


class OneMessageGradients(LocalGradients):
    """Gradients as they were averaged before: in one message, when the backward pass is over."""

    def finish(self, failed: bool = False) -> ReducedGradients | None:
        own = super().finish(failed)
        if own is None:
            return None
        flags = torch.tensor(own.unused, dtype=own.gradients[0].dtype)
        *gradients, flags = all_reduce_mean([*own.gradients, flags])
        return ReducedGradients(gradients, [flag == 1 for flag in flags.tolist()])


class OneMessageReductions(Reductions):
    """Reductions that send one message per step."""

    def of(self, tensors: Any) -> Reduction:
        return OneMessageGradients(tensors)


def make_network(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network, and this process's part of a batch."""
    torch.manual_seed(0)
    if name == "ResNet-20":
        network: nn.Module = CifarResNet(20)
        x, y = torch.randn(128, 3, 32, 32), torch.randint(0, 10, (128,))
    else:
        from torchvision.models import resnet18

        network = resnet18(num_classes=10)
        x, y = torch.randn(32, 3, 64, 64), torch.randint(0, 10, (32,))
    return network.train(), x, y


def make_engine(before: bool) -> Engine:
    """Return an engine that reduces gradients as it does now, or as it did before."""
    engine = Engine(torch.device("cpu"), 0, ProgressDisplay(quiet=True))
    if before:
        engine.gradient_computer._reductions = OneMessageReductions()
    return engine


def fine_tuning_step(name: str, before: bool) -> Step:
    """Return a step of fine-tuning without a teacher."""
    network, x, y = make_network(name)
    engine = make_engine(before)
    job = FineTuneJob(network, network, compress.Plan({}, {}), CONFIG, engine, 10**6)
    tuner, batch = FineTuner(job, Classification()), own_part(x, y)
    return lambda: float(tuner.step(batch)["loss"])


def search_step(name: str, method: str, before: bool) -> Step:
    """Return a step of a search; one with two halves of the data gets half of the batch for each."""
    network, x, y = make_network(name)
    engine = make_engine(before)
    config = compress.Recipe.model_validate(
        {"budget": {"dims": "50%"}, "search": {"method": method, "epochs": 1, "lr": 0.01, "gamma": 1e-4}}
    ).search
    groups = find_groups(network, x[:2], Target())
    network.train()
    job = Job(network, groups, Classification(), 10**6, gradient_computer=engine.gradient_computer)
    kind = search_class(method)
    search, (own_x, own_y) = kind(config, job), own_part(x, y)
    half = len(own_x) // 2
    pair = ((own_x[:half], own_y[:half]), (own_x[half:], own_y[half:]))
    batch: Any = pair if kind.batches_per_step == 2 else (own_x, own_y)
    return lambda: float(search.step(batch)["loss"])


def plain_step(name: str, processes: int) -> Step:
    """Return a step written by hand: with DistributedDataParallel, or alone on the whole batch."""
    network, x, y = make_network(name)
    model = DistributedDataParallel(network) if processes > 1 else network
    optimizer = make_optimizer(CONFIG, network.parameters())
    own_x, own_y = own_part(x, y) if processes > 1 else (x, y)

    def step() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(own_x), own_y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return float(loss.detach())

    return step


def own_part(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the part of a batch that this process reads."""
    return x[rank() :: world_size()].contiguous(), y[rank() :: world_size()].contiguous()


def measure_steps(rounds: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """Return seconds per step by network and variant; the variants take turns in every round."""
    init_process_group(cpu=True)
    seconds: dict[str, dict[str, list[float]]] = {}
    for name in ("ResNet-20", "ResNet-18"):
        variants = {
            "fine-tuning": fine_tuning_step(name, before=False),
            "fine-tuning, before": fine_tuning_step(name, before=True),
            "plain DDP": plain_step(name, 2),
            "one process": plain_step(name, 1),
            "netslim": search_step(name, "netslim", before=False),
            "netslim, before": search_step(name, "netslim", before=True),
            "rarts": search_step(name, "rarts", before=False),
            "rarts, before": search_step(name, "rarts", before=True),
        }
        seconds[name] = {variant: [] for variant in variants}
        for number in range(rounds + 1):
            for variant, step in variants.items():
                duration = time_steps(step, steps, alone=variant == "one process")
                if number:  # the first round warms up
                    seconds[name][variant].append(duration)
    return seconds


def time_steps(step: Step, count: int, alone: bool) -> float:
    """Return the seconds of a step; `alone`: rank 0 takes it with two threads, and the other process waits."""
    dist.barrier()
    start = time.perf_counter()
    if not alone:
        for _ in range(count):
            step()
    elif rank() == 0:
        torch.set_num_threads(2)
        for _ in range(count):
            step()
        torch.set_num_threads(1)
    dist.barrier()
    return (time.perf_counter() - start) / count


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def measure_memory(steps: int) -> dict[str, float]:
    """Return the weights of a network of MLP blocks and the peak memory of its fine-tuning in this process, in MB."""
    init_process_group(cpu=True)
    torch.manual_seed(0)
    warm_up = nn.Linear(8, 8)  # libraries and threads, before the memory is measured
    warm_up(torch.randn(2, 8)).sum().backward()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    network = nn.Sequential(*(_Block(768) for _ in range(12)), nn.Linear(768, 10)).train()
    weights = sum(p.numel() * p.element_size() for p in network.parameters())
    batch = (torch.randn(8, 768), torch.randint(0, 10, (8,)))
    teacher = nn.Identity()
    job = FineTuneJob(network, teacher, compress.Plan({}, {}), ADAMW, make_engine(before=False), 10**6)
    tuner = FineTuner(job, Classification())
    for _ in range(steps):
        tuner.step(batch)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"weights": weights / 2**20, "peak": peak / 1024}
