"""How finding groups, a preview, slicing and a search step grow with the network.

    python -m benchmarks.scale [--quick] [--repeats 3]

ResNet-18 to -152, ViT-Ti to -L, Swin-T to -B, one image of 224 x 224, one thread. Seconds are the least of the repeats.
The slope is that of a line through the logarithms of parameters and seconds: 1 is linear. `--quick` leaves out the two
largest of each family. The picture is benchmarks/results/scale.png.
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
from compress.budget import choose
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
    x = torch.randn(1, 3, 224, 224)
    recipe: dict[str, Any] = {"target": target, "budget": {"macs": "50%"}}
    found: dict[str, list[float]] = {stage: [] for stage in STAGES}
    model.eval()
    for _ in range(repeats):
        start = time.perf_counter()
        groups = compress.find_groups(model, x, Target(**target))
        found["groups"].append(time.perf_counter() - start)
        start = time.perf_counter()
        compress.preview(model, recipe, example_inputs=x)
        found["preview"].append(time.perf_counter() - start)
        keep = choose(groups, {g.name: np.ones(g.width) for g in groups}, Budget(macs=0.5), Target(**target))
        small = copy.deepcopy(model)
        plan = compress.Plan.build(small, groups, keep)
        start = time.perf_counter()
        plan.apply_(small)
        found["slice"].append(time.perf_counter() - start)
        del small
    scored = copy.deepcopy(model)
    config = Recipe.load(recipe | {"search": {"method": "netslim", "epochs": "100 steps", "gamma": 1e-4}}).search
    groups = compress.find_groups(scored, x, Target(**target))
    search = search_class("netslim")(config, Job(scored, groups, compress.Classification(), 100))
    batch = (torch.randn(2, 3, 224, 224), torch.tensor([0, 1]))
    scored.train()
    for _ in range(repeats + 1):
        start = time.perf_counter()
        search.step(batch)
        found["step"].append(time.perf_counter() - start)
    return {"params": sum(p.numel() for p in model.parameters()), **{k: min(v) for k, v in found.items()}}


def slope(rows: list[dict[str, Any]], stage: str) -> float:
    x, y = (np.log([row[key] for row in rows]) for key in ("params", stage))
    return float(np.polyfit(x, y, 1)[0])


def draw(rows: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(STAGES), figsize=(14, 3.6), sharex=True)
    for axis, stage in zip(axes, STAGES, strict=True):
        for family in FAMILIES:
            mine = [row for row in rows if row["family"] == family]
            axis.loglog([r["params"] for r in mine], [r[stage] for r in mine], marker="o", label=family)
        axis.set_title(f"{stage}, seconds")
        axis.set_xlabel("parameters")
        axis.grid(alpha=0.3, which="both")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(results.FOLDER / "scale.png", dpi=110)


def sheets(content: dict[str, Any]) -> list[results.Sheet]:
    lines = [
        [row["network"], f"{row['params'] / 1e6:.1f}M", *(f"{row[stage]:.3g}" for stage in STAGES)]
        for row in content["rows"]
    ]
    slopes = content["slopes"].items()
    lines += [[f"slope of {family}", "", *(f"{found[stage]:.2f}" for stage in STAGES)] for family, found in slopes]
    return [results.Sheet(("network", "parameters", *(f"{stage}, s" for stage in STAGES)), lines)]


def main() -> None:
    parser = results.options_of(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for family, (target, networks) in FAMILIES.items():
        for name, make in networks[: -2 if options.quick else None]:
            torch.manual_seed(0)
            rows.append({"family": family, "network": name, **measure(make(), target, options.repeats)})
            print(rows[-1], flush=True)
    families = {family: [row for row in rows if row["family"] == family] for family in FAMILIES}
    slopes = {
        family: {stage: slope(mine, stage) for stage in STAGES} for family, mine in families.items() if len(mine) > 1
    }
    file, content = results.named("scale", options.quick), {"rows": rows, "slopes": slopes}
    results.save(file, content)
    results.show(file, sheets(content))
    if not options.quick:
        draw(rows)


if __name__ == "__main__":
    main()
