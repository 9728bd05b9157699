"""Collective operations of one step with several processes, as the code issues them: how many, and how many bytes.

    python -m benchmarks.communication [--quick]

The networks are on the `meta` device, in one process of a group of 8 that exists on paper only (torch's `fake`
backend). Steps of search and fine-tuning run as in a real run; instead of communicating, every bucket of
DistributedDataParallel and every other collective operation is recorded. docs/scale.md derives costs from the bytes.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import timm
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from compress.graph import Groups
from compress.progress import ProgressDisplay
from compress.recipe import Finetune, Recipe
from compress.search import Job, search_class
from compress.surgery import Plan, find_groups
from compress.training import Classification, Engine, FineTuneJob, FineTuner

from . import results

PROCESSES = 8
NETWORKS = {"ResNet-50": "resnet50", "ViT-L/16": "vit_large_patch16_224", "Swin-L": "swin_large_patch4_window7_224"}
SEARCHES = ("netslim", "taylor", "rarts", "bayesnas")
TARGETS = {"resnet50": {"channels": True}, "": {"attention": True, "mlp": True}}
# Assumptions of `scaling_table`: nodes of 8 GPUs with NVLink, 200 Gbit/s of network for each GPU, bf16.
NODE, NODE_BANDWIDTH, NETWORK_BANDWIDTH = 8, 200e9, 20e9  # bytes per second of a ring, as achieved
SUSTAINED_FLOPS = 125e12  # 40 % of an A100's peak
HOP_SECONDS = 30e-6  # of a small message over TCP
CALLS: Counter[str] = Counter()  # collective operations, by kind
BYTES: Counter[str] = Counter()


class FixedBuckets:
    """torch's reducer with one bucket: it makes those of 25 MB after the first step, for which it needs values."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


class RecordedDDP(DistributedDataParallel):
    """DistributedDataParallel that records its buckets instead of reducing them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_comm_hook(None, record_bucket)
        self.reducer = FixedBuckets(self.reducer)


def record_bucket(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations, which are text here
    """Record a bucket of gradients and return it as it is."""
    record("gradient buckets", bucket.buffer())
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def record(kind: str, tensor: Tensor) -> None:
    """Count a collective operation and its bytes."""
    CALLS[kind] += 1
    BYTES[kind] += tensor.numel() * tensor.element_size()


@contextmanager
def recorded_operations() -> Iterator[None]:
    """Record collective operations during the block instead of executing them."""
    CALLS.clear()
    BYTES.clear()

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        record("numbers" if tensor.device.type == "cpu" else "loss terms", tensor)

    with (
        mock.patch("compress.training.parallel.reduction.DistributedDataParallel", RecordedDDP),
        mock.patch("compress.distributed._cpu_group", lambda: None),
        mock.patch("torch.distributed.all_reduce", all_reduce),
    ):
        yield


def meta_batch(size: int) -> tuple[Tensor, Tensor]:
    """Return a batch of two images; the bytes of a step do not depend on its size."""
    return torch.zeros(2, 3, size, size, device="meta"), torch.zeros(2, dtype=torch.long, device="meta")


def count_step(step: Any) -> dict[str, Any]:
    """Return calls and bytes of the third step: the first ones make buckets."""
    with recorded_operations():
        for _ in range(2):
            step()
        CALLS.clear()
        BYTES.clear()
        step()
        return {"calls": dict(CALLS), "bytes": dict(BYTES)}


class MetaTargets(Classification):
    """Classification whose targets have no values: none is ignored."""

    def count_targets(self, batch: Any) -> int:
        return len(batch[1])


def count_search(method: str, model: nn.Module, groups: Groups) -> dict[str, Any]:
    """Count a step of a search on a model, which is on the meta device and gets gates."""
    settings: dict[str, Any] = {"method": method, "epochs": "100 steps"}
    if method != "taylor":
        settings["gamma"] = 1e-4
    if method == "bayesnas":
        settings["samples"] = 1_000_000
    recipe = Recipe.load({"budget": {"macs": "50%"}, "search": settings})
    job = Job(model.train(), groups, MetaTargets(), 100, steps_per_epoch=50)
    search = search_class(method)(recipe.search, job)
    pair = search.batches_per_step == 2
    return count_step(lambda: search.step((meta_batch(224), meta_batch(224)) if pair else meta_batch(224)))


def count_finetuning(model: nn.Module, teacher: nn.Module) -> dict[str, Any]:
    """Count a step of fine-tuning of a whole network with its teacher."""
    engine = Engine(torch.device("meta"), 0, ProgressDisplay(True))
    config = Finetune(epochs="100 steps", distill={})
    tuner = FineTuner(FineTuneJob(model.train(), teacher, Plan({}, {}), config, engine, 100), MetaTargets())
    return count_step(lambda: tuner.step(meta_batch(224)))


def measure(title: str, name: str) -> list[dict[str, Any]]:
    """Return one row for fine-tuning and for each search."""
    model = timm.create_model(name).eval()
    groups = find_groups(
        model,
        torch.zeros(1, 3, 224, 224),
        Recipe.load({"budget": {"macs": "50%"}, "target": TARGETS.get(name, TARGETS[""])}).target,
    )
    macs = int(groups.cost.macs(groups.cost.widths))
    params = sum(p.numel() for p in model.parameters())
    common = {"network": title, "params": params, "macs": macs}
    del model
    rows = []
    for stage in ("finetune", *SEARCHES):
        with torch.device("meta"):
            student, teacher = timm.create_model(name), timm.create_model(name).eval()
        counted = count_finetuning(student, teacher) if stage == "finetune" else count_search(stage, student, groups)
        rows.append({**common, "stage": stage, **counted})
        print(title, stage, counted, flush=True)
    return rows


def tables(content: dict[str, Any]) -> list[results.ResultTable]:
    """Build the table of calls and bytes of a step."""
    lines = []
    for row in content["rows"]:
        calls, sizes = row["calls"], row["bytes"]
        small = sum(size for kind, size in sizes.items() if kind != "gradient buckets")
        lines.append(
            [
                row["network"],
                row["stage"],
                f"{4 * row['params'] / 1e6:.0f} MB",
                f"{sizes['gradient buckets'] / 1e6:.1f} MB in {calls['gradient buckets']}",
                f"{small} B in {sum(calls.values()) - calls['gradient buckets']}",
            ]
        )
    columns = ("network", "step of", "weights", "gradients, in reductions", "everything else, in calls")
    return [results.ResultTable(columns, lines)]


def scaling_table(content: dict[str, Any]) -> results.ResultTable:
    """Build the table of docs/scale.md: what the bytes of a step cost on more and more GPUs."""
    lines = []
    for row in (row for row in content["rows"] if row["stage"] == "finetune"):
        for gpus in (8, 64, 512):
            sent = 2 * (gpus - 1) / gpus * row["bytes"]["gradient buckets"]  # of a ring, by each GPU
            milliseconds = 1e3 * sent / (NODE_BANDWIDTH if gpus <= NODE else NETWORK_BANDWIDTH)
            backward = 1e3 * 4 * row["macs"] / SUSTAINED_FLOPS  # of one image: twice the forward pass
            numbers = 2e3 * 2 * (gpus - 1) * HOP_SECONDS  # two small messages in a ring
            lines.append(
                [
                    row["network"],
                    str(gpus),
                    f"{sent / 1e6:.0f} MB",
                    f"{milliseconds:.1f} ms",
                    f"{milliseconds / backward:.0f}",
                    f"{numbers:.1f} ms",
                ]
            )
    columns = ("network", "GPUs", "sent by each GPU", "takes", "hidden from images per GPU", "small messages")
    return results.ResultTable(columns, lines)


def main() -> int:
    options = results.make_parser(__doc__).parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=PROCESSES)
    networks = {"ResNet-50": "resnet50"} if options.quick else NETWORKS
    rows = [row for title, name in networks.items() for row in measure(title, name)]
    name = results.result_name("communication", options.quick)
    results.save(name, {"rows": rows})
    results.publish(name, tables({"rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
