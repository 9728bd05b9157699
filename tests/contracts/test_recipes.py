"""Every packaged recipe runs, in shortened form, on a network of its kind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import pytest
import torch
import torchvision
import yaml
from torch import nn

import compress
from compress.recipe import Recipe, packaged_recipes, search_config
from compress.search import base as search_base
from helpers.shapes import small_deeplab

ROOT = Path(__file__).parents[2]


def _cifar() -> nn.Module:
    from benchmarks.models import CifarResNet

    return CifarResNet(8)


def _preresnet() -> nn.Module:
    from benchmarks.models import PreResNet

    return PreResNet(20)


def _digits() -> nn.Module:
    from compress.cli.quickstart import Network

    return Network(16)


def _swin() -> nn.Module:
    return torchvision.models.SwinTransformer([4, 4], 32, [1, 1], [2, 4], [4, 4], num_classes=10)


def _vit() -> nn.Module:
    return torchvision.models.VisionTransformer(32, 8, 2, 4, 64, 128, num_classes=10)


def _lenet() -> nn.Module:
    from benchmarks.lenet import LeNet5

    return LeNet5()


def _darts() -> nn.Module:
    return compress.cells.darts_network(4, 3, 10)


def _hugging_face(name: str) -> nn.Module:
    from helpers import hugging_face

    model: nn.Module = hugging_face.build(name)
    return model


def _batches(name: str, shape: tuple[int, ...], classes: int) -> list[Any]:
    """Return two batches; those of Hugging Face's models with labels of their own are dicts."""
    if model := {"segformer_half": "segformer", "detr_half": "detr"}.get(name):
        from helpers import hugging_face

        return hugging_face.batches(model, 2)
    return [(torch.randn(4, *shape), torch.randint(0, classes, (4,))) for _ in range(2)]


RUNS: dict[str, tuple[Any, tuple[int, ...], int]] = {
    **{f"darts_cifar10_{method}": (_darts, (3, 8, 8), 10) for method in ("rarts", "darts1", "darts2", "bayesnas")},
    "nats_cifar10_rarts": (lambda: compress.cells.nats_network(4, 1, 10), (3, 8, 8), 10),
    "cells_quickstart": (compress.cells.digits_network, (1, 8, 8), 10),
    "magnitude_half": (_cifar, (3, 32, 32), 10),
    "repair_half": (_cifar, (3, 32, 32), 10),
    "unet_half": (small_deeplab, (3, 32, 32), 3),
    "quickstart": (_digits, (1, 8, 8), 10),
    "lenet5_bayes_compress": (_lenet, (1, 28, 28), 10),
    "resnet18_bayes_compress": (_cifar, (3, 32, 32), 10),
    "resnet20_cifar10_aps": (_cifar, (3, 32, 32), 10),
    "resnet56_cifar10_aps": (_cifar, (3, 32, 32), 10),
    "default": (_cifar, (3, 32, 32), 10),
    "resnet_cifar_bayesnas": (_cifar, (3, 32, 32), 10),
    "resnet_cifar_netslim": (_cifar, (3, 32, 32), 10),
    "mobilenetv2_netslim": (lambda: torchvision.models.mobilenet_v2(num_classes=10), (3, 64, 64), 10),
    "mobilenetv2_rarts_auto": (lambda: torchvision.models.mobilenet_v2(num_classes=10), (3, 64, 64), 10),
    "preresnet164_cifar10_40": (_preresnet, (3, 32, 32), 10),
    "preresnet164_cifar10_60": (_preresnet, (3, 32, 32), 10),
    "preresnet164_cifar100_40": (_preresnet, (3, 32, 32), 10),
    "preresnet164_cifar100_60": (_preresnet, (3, 32, 32), 10),
    "deit_s_imagenet_50": (_vit, (3, 32, 32), 10),
    "segformer_half": (lambda: _hugging_face("segformer"), (3, 32, 32), 3),
    "detr_half": (lambda: _hugging_face("detr"), (3, 32, 32), 3),
    "vit_tiny_quickstart": (_vit, (3, 32, 32), 10),
    **{f"swin_t_{d}_{p}": (_swin, (3, 32, 32), 10) for d in ("cifar100", "imagenet20") for p in (20, 40, 60, 80)},
    "resnet50_imagenet_netslim": (lambda: torchvision.models.resnet50(num_classes=10), (3, 64, 64), 10),
}


@pytest.mark.filterwarnings("ignore:no score reached zero")  # two steps are not enough for it
@pytest.mark.parametrize(
    "name",
    [n for n, path in packaged_recipes().items() if path.parent.name != "mmdet" and not n.startswith("yolo_")],
)  # tests/mmdet/test_commands.py and tests/yolo/test_yolo_commands.py run the others
def test_recipe_runs_in_shortened_form(name: str) -> None:
    make, shape, classes = RUNS[name]
    torch.manual_seed(0)
    model = make().eval()
    data = _batches(name, shape, classes)
    short = {"extends": name, "timing": {"repeats": 3}, "data": {"source": None}}
    full = Recipe.load(name)
    for section in ("search", "finetune"):
        if (full.search.length if section == "search" else full.finetune) is not None:
            short[section] = {"epochs": "2 steps"}
    if full.finetune is not None and full.finetune.cells is not None:
        short["finetune"] |= {"cells": 1, "channels": 4}
    inputs: dict[str, Any] = {"train": data, "val": data}
    if name == "unet_half":
        masks = [(x, torch.randint(0, classes, (len(x), *shape[1:]))) for x, _ in data]
        inputs = {"task": compress.Segmentation(masks, masks)}
    pruned = compress.prune(model, short, **inputs, quiet=True)
    report, unit = pruned.report, full.budget.unit
    if unit == "auto":
        assert report.pruned.macs <= report.dense.macs
    elif unit == "dims":
        assert sum(g.kept for g in report.groups) <= full.budget.limits[unit] * sum(g.width for g in report.groups)
    else:
        assert getattr(report.pruned, unit) <= full.budget.limits[unit] * getattr(report.dense, unit)
    shorter = Recipe.load(short)
    assert (
        shorter.model_copy(
            update={"search": full.search, "finetune": full.finetune, "timing": full.timing, "data": full.data}
        )
        == full
    )


@pytest.mark.parametrize("name", packaged_recipes())
def test_recipe_fits_the_schema_and_opens_with_a_line_and_its_command(name: str) -> None:
    text = packaged_recipes()[name].read_text()
    jsonschema.validate(yaml.safe_load(text), Recipe.schema_for_editors())
    lines = text.splitlines()
    assert lines[0].startswith("# ")
    assert lines[0][2].isupper()
    assert any(f"--recipe {name} " in line for line in lines if line.startswith("#"))
    assert len(lines[0]) <= 122


def test_schema_refuses_what_the_recipe_refuses() -> None:
    schema = Recipe.schema_for_editors()
    good = {"extends": "quickstart", "search": {"method": "netslim", "epochs": "5 steps", "gamma": "1e-4"}}
    jsonschema.validate(good, schema)
    for bad in (
        {"search": {"method": "netslim", "epochs": 5, "gama": 1}},
        {"budgets": {"macs": 0.5}},
        {"finetune": {"epochs": "soon"}},
        {"target": {"bounds": {"a": {"fewest": 3}}}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)
        with pytest.raises(compress.RecipeError):
            Recipe.load({"budget": {"macs": 0.5}, **bad})
    assert json.loads(json.dumps(schema)) == schema


@pytest.mark.parametrize(("script", "argument"), [("plain", "2"), ("timm_network", "3"), ("own_loop", "2")])
def test_example_runs(script: str, argument: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{script}.py"), argument],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    assert "MACs" in done.stdout
    assert not list(tmp_path.iterdir()), "an example leaves no files behind"


@mock.patch.dict(search_base._REGISTRY)
@mock.patch.dict(search_config._CONFIGS)
def test_a_users_own_search_runs_from_a_recipe() -> None:
    from pydantic import Field
    from torch import Tensor

    class BiasConfig(compress.SearchConfig):
        power: float = Field(1.0)

    @compress.register_search("first_come")
    class FirstCome(compress.Search):
        """Keeps the first dimensions of each group."""

        Config = BiasConfig

        def importance(self) -> dict[str, Tensor]:
            return {g.name: -(torch.arange(g.width).float() ** self.config.power) for g in self.job.groups}

    recipe = {"budget": {"dims": "50%"}, "search": {"method": "first_come", "power": 2.0}, "timing": {"repeats": 3}}
    pruned = compress.prune(_digits(), recipe, example_inputs=torch.randn(1, 1, 8, 8), quiet=True)
    assert all(kept == list(range(len(kept))) for kept in pruned.plan.keep.values())
    assert "search_first_come" in Recipe.schema_for_editors()["$defs"]
    with pytest.raises(compress.RecipeError, match=r"search\.powr: expected one of method, ranking, power"):
        Recipe.load({**recipe, "search": {"method": "first_come", "powr": 1}})
    with pytest.raises(ValueError, match="search first_come: the name is taken by"):

        @compress.register_search("first_come")
        class Other(compress.Search):
            def importance(self) -> dict[str, Tensor]:
                return {}

    with pytest.raises(TypeError, match=r"expected a class derived from compress.Search"):
        compress.register_search("no")(dict)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="expected Config to derive from SearchConfig"):
        compress.register_search("no")(type("No", (compress.Search,), {"Config": dict}))
    with pytest.raises(TypeError, match="FirstCome does not train"):
        FirstCome(BiasConfig(method="first_come"), None).step(None)  # type: ignore[arg-type]
