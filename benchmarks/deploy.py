"""Latency of exported ONNX files in onnxruntime: how much of the MAC reduction becomes speed-up.

    python -m benchmarks.deploy [--quick] [--only resnet50] [--repeats 30]

ResNet-50 and MobileNetV2 (inner channels), Swin-T and ViT-S (queries, keys, values and MLPs), untrained, cut to 50 %
and 35 % of their MACs by magnitude relative to the group's mean, with `round_to` 1 and 8; batch size 1, 224 x 224.
Every file has passed the parity check. The five files of a network run alternately, with one thread and with two. The
speed-up is the median over adjacent runs of dense and compact; the table shows it relative to the MAC reduction. The
times of the operators come from onnxruntime's profiler with one thread.
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

from compress.budget import choose_widths, compare_latency, latency_ratio
from compress.exporters import onnx as exporter
from compress.recipe import Recipe, Target, Timing
from compress.search import base as search
from compress.surgery import Plan, find_groups, slice_

from . import results

INNER = {"channels": True}
BLOCKS = {"channels": False, "attention": True, "mlp": True}
NETWORKS: dict[str, tuple[Any, dict[str, bool]]] = {
    "resnet50": (lambda: torchvision.models.resnet50(), INNER),
    "mobilenet_v2": (lambda: torchvision.models.mobilenet_v2(), INNER),
    "swin_t": (lambda: timm.create_model("swin_tiny_patch4_window7_224"), BLOCKS),
    "vit_s": (lambda: timm.create_model("vit_small_patch16_224"), BLOCKS),
}
MACS_LEFT = ("50%", "35%")
ROUND_TO = (1, 8)
MAGNITUDE = Recipe.load({"budget": {"macs": "50%"}, "search": {"method": "magnitude"}})
GOAL = 0.7  # of the MAC reduction as speed-up
QUICK_NETWORKS = ("mobilenet_v2",)


def build_network(name: str) -> nn.Module:
    """Return an untrained network in eval mode."""
    torch.manual_seed(0)
    model: nn.Module = NETWORKS[name][0]()
    return model.eval()


def cut_networks(name: str, x: torch.Tensor) -> Iterator[tuple[str, nn.Module]]:
    """Yield labels and networks: the dense one, then one per budget and `round_to`."""
    model = build_network(name)
    groups = find_groups(model, x, Target(**NETWORKS[name][1]))
    importance = search.data_free_importance(MAGNITUDE.search, model, groups, 0)
    yield "dense", model
    for macs_left in MACS_LEFT:
        for round_to in ROUND_TO:
            target = Target(**NETWORKS[name][1], round_to=round_to)
            budget = Recipe.load({"budget": {"macs": macs_left}}).budget
            keep = choose_widths(groups, importance, budget, target, ranking="group")
            yield f"{macs_left} by {round_to}", slice_(copy.deepcopy(model), Plan.build(model, groups, keep))


def profile_operators(path: Path, x: torch.Tensor, folder: Path, runs: int = 10) -> dict[str, float]:
    """Return the milliseconds of one run by operator, from the median time of each node over all runs."""
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
    operator_ms: dict[str, float] = defaultdict(float)
    for (operator, _), times in nodes.items():
        operator_ms[operator] += median(times)
    return dict(operator_ms)


def measure(name: str, repeats: int) -> dict[str, Any]:
    """Export the dense network and its cuts; time the files alternately with one thread and with two."""
    x = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        files: dict[str, dict[str, Any]] = {}
        for label, model in cut_networks(name, x):
            path = folder / f"{label.replace('%', '').replace(' ', '_')}.onnx"
            report = exporter.export(model, path, x, timing=Timing(repeats=3))
            files[label] = {"path": path, "macs": report.file.macs, "bytes": report.file.bytes}
            files[label] |= {"nodes": report.file.nodes, "max_rel_diff": report.max_rel_diff, "threads": {}}
        for threads in (1, 2):
            runners = [exporter.OnnxRunner(file["path"], threads) for file in files.values()]
            times = compare_latency(runners, x, repeats)
            for file, latency in zip(files.values(), times, strict=True):
                ratio = latency_ratio(times[0], latency)
                reduction = files["dense"]["macs"] / file["macs"]
                file["reduction"] = reduction
                file["threads"][threads] = {
                    "latency_ms": latency.median,
                    "spread_ms": latency.spread,
                    "speedup": 1 / ratio.value,
                    "speedup_interval": [1 / ratio.high, 1 / ratio.low],
                    "realised": 1 / ratio.value / reduction,
                }
        for file in files.values():
            file["operators_ms"] = profile_operators(file.pop("path"), x, folder)
    return files


def tables(content: dict[str, Any]) -> list[results.ResultTable]:
    """Return the table of speed-ups."""
    lines = []
    for name, files in content["networks"].items():
        dense = files["dense"]
        for label, file in files.items():
            if label == "dense":
                continue
            by_threads = [file["threads"].get(t) or file["threads"][str(t)] for t in (1, 2)]
            cells = [f"{s['realised']:.2f} ({s['speedup']:.2f}x)" for s in by_threads]
            dense_latency = dense["threads"].get(1) or dense["threads"]["1"]
            costs = [
                f"{1 / file['reduction']:.1%}",
                *cells,
                f"{dense_latency['latency_ms']:.1f} ms",
                slowest_to_shrink(dense, file),
            ]
            lines.append([name, label, *costs])
    head = ("network", "left, round_to", "MACs left", "1 thread", "2 threads", "1 thread, dense", "slowest to shrink")
    return [results.ResultTable(head, lines, "Speed-up divided by the MAC reduction; in brackets the speed-up")]


def slowest_to_shrink(dense: dict[str, Any], compact: dict[str, Any]) -> str:
    """List the operators that take the most time beyond dense time / MAC reduction."""
    excess = {
        op: ms - dense["operators_ms"].get(op, 0.0) / compact["reduction"] for op, ms in compact["operators_ms"].items()
    }
    worst = sorted(excess, key=lambda op: -excess[op])[:3]
    return ", ".join(f"{op} +{excess[op]:.1f} ms" for op in worst if excess[op] > 0)


def main() -> None:
    parser = results.make_parser(__doc__)
    parser.add_argument(
        "--only", nargs="*", choices=NETWORKS, help="measure only these networks; keep the other saved results"
    )
    parser.add_argument("--repeats", type=int, default=30, help="runs per file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    file, repeats = results.result_name("deploy", options.quick), 5 if options.quick else options.repeats
    networks = results.load(file).get("networks", {}) if options.only else {}
    for name in options.only or (QUICK_NETWORKS if options.quick else NETWORKS):
        networks[name] = measure(name, repeats)
        versions = {package: metadata.version(package) for package in ("onnx", "onnxruntime", "onnxslim", "onnxscript")}
        content = {"versions": versions, "repeats": repeats, "bar": GOAL, "networks": networks, "seed": 0}
        results.save(file, content)
        print(f"{name} done", flush=True)
    results.publish(file, tables({"networks": networks}))


if __name__ == "__main__":
    main()
