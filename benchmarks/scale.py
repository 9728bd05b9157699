"""Time to find groups, preview, slice and make a search step as the network grows.

    python -m benchmarks.scale [--quick] [--repeats 3]

ResNet-18 to -152, ViT-Ti to -L, Swin-T to -B, one 224 x 224 image, one thread. Seconds are the minimum of the repeats.
The slope is that of a line through the logarithms of parameters and seconds: 1 is linear. `--quick` skips the two
largest networks of each family. The chart is benchmarks/results/scale.png.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import timm
import torch
import torchvision
from torch import nn

import compress
from compress.budget import choose_widths
from compress.recipe import Budget, Recipe, Target
from compress.search import Job, search_class

from . import results

CHANNELS = {"channels": True}
DIMENSIONS = {"channels": False, "attention": True, "mlp": True}
FAMILIES: dict[str, tuple[dict[str, bool], list[tuple[str, Callable[[], nn.Module]]]]] = {
    "ResNet": (CHANNELS, [(f"resnet{n}", getattr(torchvision.models, f"resnet{n}")) for n in (18, 34, 50, 101, 152)]),
    "ViT": (
        DIMENSIONS,
        [(n, lambda n=n: timm.create_model(f"vit_{n}_patch16_224")) for n in ("tiny", "small", "base", "large")],
    ),
    "Swin": (DIMENSIONS, [(f"swin_{n}", getattr(torchvision.models, f"swin_{n}")) for n in "tsb"]),
}
STAGES = ("groups", "preview", "slice", "step")


def measure(model: nn.Module, target: dict[str, bool], repeats: int) -> dict[str, Any]:
    """Return the parameters and the minimum seconds of each stage."""
    x = torch.randn(1, 3, 224, 224)
    recipe: dict[str, Any] = {"target": target, "budget": {"macs": "50%"}}
    seconds: dict[str, list[float]] = {stage: [] for stage in STAGES}
    model.eval()
    for _ in range(repeats):
        start = time.perf_counter()
        groups = compress.find_groups(model, x, Target(**target))
        seconds["groups"].append(time.perf_counter() - start)
        start = time.perf_counter()
        compress.preview(model, recipe, example_inputs=x)
        seconds["preview"].append(time.perf_counter() - start)
        keep = choose_widths(groups, {g.name: np.ones(g.width) for g in groups}, Budget(macs=0.5), Target(**target))
        compact = copy.deepcopy(model)
        plan = compress.Plan.build(compact, groups, keep)
        start = time.perf_counter()
        plan.apply_(compact)
        seconds["slice"].append(time.perf_counter() - start)
        del compact
    scored = copy.deepcopy(model)
    config = Recipe.load(recipe | {"search": {"method": "netslim", "epochs": "100 steps", "gamma": 1e-4}}).search
    groups = compress.find_groups(scored, x, Target(**target))
    search = search_class("netslim")(config, Job(scored, groups, compress.Classification(), 100))
    batch = (torch.randn(2, 3, 224, 224), torch.tensor([0, 1]))
    scored.train()
    for _ in range(repeats + 1):
        start = time.perf_counter()
        search.step(batch)
        seconds["step"].append(time.perf_counter() - start)
    return {"params": sum(p.numel() for p in model.parameters()), **{k: min(v) for k, v in seconds.items()}}


def loglog_slope(rows: list[dict[str, Any]], stage: str) -> float:
    """Fit a line to log(seconds) over log(parameters); return its slope."""
    x, y = (np.log([row[key] for row in rows]) for key in ("params", stage))
    return float(np.polyfit(x, y, 1)[0])


def draw_chart(rows: list[dict[str, Any]]) -> None:
    """Write scale.png: seconds over parameters for each stage and family."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(STAGES), figsize=(14, 3.6), sharex=True)
    for axis, stage in zip(axes, STAGES, strict=True):
        for family in FAMILIES:
            family_rows = [row for row in rows if row["family"] == family]
            axis.loglog([r["params"] for r in family_rows], [r[stage] for r in family_rows], marker="o", label=family)
        axis.set_title(f"{stage}, seconds")
        axis.set_xlabel("parameters")
        axis.grid(alpha=0.3, which="both")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(results.FOLDER / "scale.png", dpi=110)


def tables(content: dict[str, Any]) -> list[results.ResultTable]:
    """Return the table of seconds and slopes."""
    lines = [
        [row["network"], f"{row['params'] / 1e6:.1f}M", *(f"{row[stage]:.3g}" for stage in STAGES)]
        for row in content["rows"]
    ]
    slopes = content["slopes"].items()
    lines += [
        [f"slope of {family}", "", *(f"{family_slopes[stage]:.2f}" for stage in STAGES)]
        for family, family_slopes in slopes
    ]
    return [results.ResultTable(("network", "parameters", *(f"{stage}, s" for stage in STAGES)), lines)]


def main() -> None:
    parser = results.make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="measurements per network")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for family, (target, networks) in FAMILIES.items():
        for name, build in networks[: -2 if options.quick else None]:
            torch.manual_seed(0)
            rows.append({"family": family, "network": name, **measure(build(), target, options.repeats)})
            print(rows[-1], flush=True)
    families = {family: [row for row in rows if row["family"] == family] for family in FAMILIES}
    slopes = {
        family: {stage: loglog_slope(family_rows, stage) for stage in STAGES}
        for family, family_rows in families.items()
        if len(family_rows) > 1
    }
    file, content = results.result_name("scale", options.quick), {"rows": rows, "slopes": slopes}
    results.save(file, content)
    results.publish(file, tables(content))
    if not options.quick:
        draw_chart(rows)


if __name__ == "__main__":
    main()
