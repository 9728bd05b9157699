"""Three networks that became worse than they had to, the sign in the report, and the cure (docs/why_worse.md).

python examples/why_worse.py [rate | layer | mlps]
"""

import copy
import sys

import torch
import yaml
from torch import nn

import compress
from compress.cli.quickstart import train_network
from compress.data import loaders
from compress.recipe import Data

train, val = loaders(Data(source="digits", batch_size=64))
images = next(iter(val))[0]
QUICK = {"timing": {"repeats": 3}}


def too_high_a_rate() -> dict[str, compress.Pruned]:
    """Fine-tune the same cut with two learning rates."""
    model = train_network(epochs=5, width=16, quiet=True)
    recipe = {"budget": "40%", "search": "magnitude", **QUICK}
    return {
        f"lr {lr}": compress.prune(
            model, {**recipe, "finetune": {"epochs": 2, "lr": lr}}, train=train, val=val, quiet=True
        )
        for lr in (1.0, 0.01)
    }


def emptied_layer() -> tuple[dict[str, compress.Pruned], compress.Sensitivity]:
    """Cut a network in which the weights of one layer are small, without and with the bounds of its sensitivity."""
    model = train_network(epochs=5, width=16, quiet=True)
    block = model.stage1[0]
    with torch.no_grad():  # the norm behind the layer takes the factor back: the network computes the same
        block.conv2.weight *= 0.1
        block.bn2.running_mean *= 0.1
        block.bn2.running_var *= 0.01
    sensitivity = compress.sensitivity(model, val, repair=False, quiet=True)
    bounds = yaml.safe_load(sensitivity.bounds("5%"))["target"]["bounds"]
    recipe = {"budget": "75%", "search": {"method": "magnitude", "ranking": "global"}, **QUICK}
    results = {
        name: compress.prune(model, {**recipe, "target": target}, example_inputs=images, val=val, quiet=True)
        for name, target in (("global ranking", {}), ("with bounds", {"bounds": bounds}))
    }
    return results, sensitivity


class Transformer(nn.Module):
    """A vision transformer of two layers, for 16 patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.positions = nn.Conv2d(1, 64, 2, 2), nn.Parameter(0.1 * torch.randn(1, 16, 64))
        layer = nn.TransformerEncoderLayer(64, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.layers(tokens).mean(1))


def trained_transformer(epochs: int = 10) -> Transformer:
    """Train the transformer on the digits."""
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, epochs * len(train))
    for _ in range(epochs):
        for x, y in train:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def budget_for_mlps() -> tuple[dict[str, compress.Pruned], compress.api.Preview]:
    """Cut a transformer to budgets that the MLPs alone have to pay, and to one that the attention shares."""
    model = trained_transformer()
    mlps = {"channels": False, "mlp": True}
    recipe = {"search": {"method": "taylor", "epochs": "20 steps"}, "finetune": {"epochs": 2}, **QUICK}
    settings = {
        "MLPs, 72%": {"target": mlps, "budget": "72%"},
        "MLPs and attention, 72%": {"target": {**mlps, "attention": True}, "budget": "72%"},
        "MLPs, 85%": {"target": mlps, "budget": "85%"},
    }
    preview = compress.preview(model, {**recipe, **settings["MLPs, 72%"]}, example_inputs=images)
    results = {
        name: compress.prune(copy.deepcopy(model), {**recipe, **setting}, train=train, val=val, quiet=True)
        for name, setting in settings.items()
    }
    return results, preview


def show(results: dict[str, compress.Pruned]) -> None:
    """Print the accuracies and widths of each result."""
    for name, pruned in results.items():
        report = pruned.report
        after_cut, final = report.sliced["accuracy"], report.pruned.metrics["accuracy"]
        print(
            f"{name}: {report.dense.metrics['accuracy']:.1%} dense, {after_cut:.1%} after the cut, {final:.1%} at last"
        )
        print("   " + ", ".join(f"{row.name} {row.kept}/{row.width}" for row in report.groups))


if __name__ == "__main__":
    cases = sys.argv[1:] or ["rate", "layer", "mlps"]
    if "rate" in cases:
        rates = too_high_a_rate()
        show(rates)
        for name, pruned in rates.items():
            losses = [entry["loss"] for entry in pruned.report.history if "loss" in entry]
            print(f"   {name}: training loss {losses[0]:.2f} at the first step, {max(losses):.2f} at the worst")
    if "layer" in cases:
        results, sensitivity = emptied_layer()
        show(results)
        sensitivity.show()
        print(sensitivity.bounds("5%"))
    if "mlps" in cases:
        results, preview = budget_for_mlps()
        print(preview.message)
        show(results)
