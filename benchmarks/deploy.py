"""What is left of a cut in milliseconds: exported files in onnxruntime, dense and compact in turn.

    python -m benchmarks.deploy [--quick] [--only resnet50] [--repeats 30]

ResNet-50 and MobileNetV2 (inner channels), Swin-T and ViT-S (queries, keys, values and MLPs), untrained, cut to 50 %
and 35 % of their MACs by magnitude relative to the group's mean, with `round_to` 1 and 8; batch of one, 224 x 224.
Every file has passed the parity gate. Of each network all five files are run in turn, with one thread and with two: the
speed-up is the median over neighbouring runs of dense and compact, and what counts is its part of the MAC reduction.
The operators' times are onnxruntime's own profile with one thread.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import onnxruntime as ort
import timm
import torch
import torchvision
from torch import nn

from compress import search
from compress.budget import choose
from compress.discover import find_groups
from compress.exporters import onnx as exporter
from compress.plan import Plan
from compress.recipe import Recipe, Target, Timing
from compress.slicing import slice_
from compress.timing import compare, ratio

from . import results

INNER = {"channels": True}
BLOCKS = {"channels": False, "attention": True, "mlp": True}
NETWORKS: dict[str, tuple[Any, dict[str, bool]]] = {
    "resnet50": (lambda: torchvision.models.resnet50(), INNER),
    "mobilenet_v2": (lambda: torchvision.models.mobilenet_v2(), INNER),
    "swin_t": (lambda: timm.create_model("swin_tiny_patch4_window7_224"), BLOCKS),
    "vit_s": (lambda: timm.create_model("vit_small_patch16_224"), BLOCKS),
}
LEFT = ("50%", "35%")
ROUND_TO = (1, 8)
MAGNITUDE = Recipe.load({"budget": {"macs": "50%"}, "search": {"method": "magnitude"}})
BAR = 0.7
QUICK = ("mobilenet_v2",)


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = NETWORKS[name][0]()
    return model.eval()


def cuts(name: str, x: torch.Tensor) -> Iterator[tuple[str, nn.Module]]:
    """The dense network, and what is left of it, by label."""
    model = build(name)
    groups = find_groups(model, x, Target(**NETWORKS[name][1]))
    importance = search.importance(MAGNITUDE.search, model, groups, 0)
    yield "dense", model
    for left in LEFT:
        for round_to in ROUND_TO:
            target = Target(**NETWORKS[name][1], round_to=round_to)
            budget = Recipe.load({"budget": {"macs": left}}).budget
            keep = choose(groups, importance, budget, target, ranking="group")
            yield f"{left} by {round_to}", slice_(copy.deepcopy(model), Plan.build(model, groups, keep))


def profile(path: Path, x: torch.Tensor, folder: Path, runs: int = 10) -> dict[str, float]:
    """Milliseconds of one run by operator: of every node the median over runs."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.enable_profiling = 1, True
    options.profile_file_prefix = str(folder / "profile")
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    for _ in range(runs):
        session.run(None, {session.get_inputs()[0].name: x.numpy()})
    nodes: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in json.loads(Path(session.end_profiling()).read_text()):
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            nodes[event["args"]["op_name"], event["name"]].append(event["dur"] / 1e3)
    spent: dict[str, float] = defaultdict(float)
    for (operator, _), times in nodes.items():
        spent[operator] += median(times)
    return dict(spent)


def measure(name: str, repeats: int) -> dict[str, Any]:
    """One network: five files, in turn, with one thread and with two."""
    x = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        files: dict[str, dict[str, Any]] = {}
        for label, model in cuts(name, x):
            path = folder / f"{label.replace('%', '').replace(' ', '_')}.onnx"
            report = exporter.export(model, path, x, timing=Timing(repeats=3))
            files[label] = {"path": path, "macs": report.file.macs, "bytes": report.file.bytes}
            files[label] |= {"nodes": report.file.nodes, "max_rel_diff": report.max_rel_diff, "threads": {}}
        for threads in (1, 2):
            runners = [exporter.Runner(found["path"], threads) for found in files.values()]
            times = compare(runners, x, repeats)
            for found, time in zip(files.values(), times, strict=True):
                part = ratio(times[0], time)
                reduction = files["dense"]["macs"] / found["macs"]
                found["reduction"] = reduction
                found["threads"][threads] = {
                    "latency_ms": time.median,
                    "spread_ms": time.spread,
                    "speedup": 1 / part.value,
                    "speedup_interval": [1 / part.high, 1 / part.low],
                    "realised": 1 / part.value / reduction,
                }
        for found in files.values():
            found["operators_ms"] = profile(found.pop("path"), x, folder)
    return files


def sheets(content: dict[str, Any]) -> list[results.Sheet]:
    lines = []
    for name, files in content["networks"].items():
        dense = files["dense"]
        for label, found in files.items():
            if label == "dense":
                continue
            sides = [found["threads"].get(t) or found["threads"][str(t)] for t in (1, 2)]
            cells = [f"{s['realised']:.2f} ({s['speedup']:.2f}x)" for s in sides]
            before = dense["threads"].get(1) or dense["threads"]["1"]
            costs = [f"{1 / found['reduction']:.1%}", *cells, f"{before['latency_ms']:.1f} ms", laggards(dense, found)]
            lines.append([name, label, *costs])
    head = ("network", "left, round_to", "MACs left", "1 thread", "2 threads", "1 thread, dense", "slowest to shrink")
    return [results.Sheet(head, lines, "The speed-up as a part of the MAC reduction, and in brackets the speed-up")]


def laggards(dense: dict[str, Any], found: dict[str, Any]) -> str:
    """The operators that take the most time beyond what the MAC reduction would leave of it."""
    lost = {
        op: ms - dense["operators_ms"].get(op, 0.0) / found["reduction"] for op, ms in found["operators_ms"].items()
    }
    worst = sorted(lost, key=lambda op: -lost[op])[:3]
    return ", ".join(f"{op} +{lost[op]:.1f} ms" for op in worst if lost[op] > 0)


def main() -> None:
    parser = results.options_of(__doc__)
    parser.add_argument("--only", nargs="*", choices=NETWORKS)
    parser.add_argument("--repeats", type=int, default=30)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    file, repeats = results.named("deploy", asked.quick), 5 if asked.quick else asked.repeats
    networks = results.load(file).get("networks", {}) if asked.only else {}
    for name in asked.only or (QUICK if asked.quick else NETWORKS):
        networks[name] = measure(name, repeats)
        versions = {package: metadata.version(package) for package in ("onnx", "onnxruntime", "onnxslim", "onnxscript")}
        content = {"versions": versions, "repeats": repeats, "bar": BAR, "networks": networks, "seed": 0}
        results.save(file, content)
        print(f"{name} done", flush=True)
    results.show(file, sheets({"networks": networks}))


if __name__ == "__main__":
    main()
