"""Torch-Pruning, used as its own scripts use it: all parameters trainable, classifier left alone, one global step.

Transformers as its script for ViTs has them with `--bottleneck`: what attention and MLPs have inside is cut, the stream
is not; every layer alike, and the dimensions of all heads alike. Tables of position biases are left alone, or it would
cut no attention that has one.

Its cut is checked like ours: in a copy of the dense network every layer that had inputs cut off gets zeros there
instead. The pruned network is exact if it computes the same.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
import torch_pruning as tp
from timm.layers import Mlp
from timm.models.vision_transformer import Attention
from torch import Tensor, nn
from torch_pruning._helpers import to_plain_idxs

from . import zoo

READERS = (nn.modules.conv._ConvNd, nn.Linear)


def options(name: str) -> dict[str, Any]:
    """How Torch-Pruning's own scripts build this network: auxiliary heads off."""
    return {"aux_logits": False} if name in ("googlenet", "inception_v3") else {}


def ignored(name: str, model: nn.Module) -> list[nn.Module]:
    """The layers that its scripts leave alone: classifiers, and what comes behind the backbone of a detector."""
    if name == "maskrcnn_resnet50_fpn":
        return [
            model.get_submodule(p) for p in ("rpn.head.cls_logits", "rpn.head.bbox_pred", "backbone.fpn", "roi_heads")
        ]
    if name == "fcos_resnet50_fpn":
        return [model.get_submodule(p) for p in ("backbone.fpn", "head")]
    classes = 21 if name in zoo.SEGMENTERS else 1000
    return [m for m in model.modules() if isinstance(m, READERS) and m.weight.shape[0] == classes]


def heads(model: nn.Module) -> dict[nn.Module, int]:
    """The fused projections of queries, keys and values, and how many heads each is for."""
    found = [m for m in model.modules() if isinstance(getattr(m, "qkv", None), (nn.Linear, nn.Conv2d))]
    return {m.qkv: m.num_heads for m in found}


def set_widths_(model: nn.Module) -> None:
    """Tell attention its new width, as its script does after the cut."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.attn_dim = module.qkv.out_features // 3
            module.head_dim = module.attn_dim // module.num_heads


def pruner(name: str, model: nn.Module, inputs: Any) -> tp.pruner.BasePruner:
    """The pruner and its graph of dependencies; fresh dicts, since its default ones are shared between calls."""
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    transformer = name in zoo.TRANSFORMERS
    left: list[Any] = ignored(name, model)
    if transformer:
        left += [m.fc2 for m in model.modules() if isinstance(m, Mlp)]
        left += [p for n, p in model.named_parameters() if n.endswith("relative_position_bias_table")]
    forward = (lambda m, x: m(x)) if isinstance(inputs, list) else None
    return tp.pruner.MagnitudePruner(
        model,
        example_inputs=inputs,
        importance=tp.importance.MagnitudeImportance(p=2),
        global_pruning=not transformer,
        pruning_ratio=0.5,
        ignored_layers=left,
        in_channel_groups={},
        out_channel_groups={},
        num_heads=heads(model) if transformer else {},
        forward_fn=forward,
    )


class Masks:
    """The input positions, numbered as in the dense network, that each reading layer has lost.

    Queries and keys are read by no layer but by their product: of their projections it is the outputs.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(m): n for n, m in model.named_modules() if isinstance(m, READERS)}
        self.left = {n: torch.arange(_inputs(m)) for n, m in model.named_modules() if isinstance(m, READERS)}
        self.rows = {self.names[id(m)]: torch.arange(len(m.weight)) for m in heads(model)}

    def note(self, graph: tp.DependencyGraph, group: Any) -> None:
        """Remember what is about to be cut."""
        for dep, indices in group:
            module = dep.target.module
            gone = torch.tensor(to_plain_idxs(indices), dtype=torch.long)
            name = self.names.get(id(module), "")
            if name in self.rows and graph.is_out_channel_pruning_fn(dep.handler):
                self.rows[name] = _without(self.rows[name], gone)
            depthwise = isinstance(module, READERS[0]) and module.groups == module.out_channels > 1
            if id(module) not in self.names or depthwise or not graph.is_in_channel_pruning_fn(dep.handler):
                continue
            self.left[name] = _without(self.left[name], gone)

    def zero_(self, dense: nn.Module) -> nn.Module:
        """Let every reader of the dense network see zeros where its inputs were cut."""
        for name, left in self.left.items():
            module = dense.get_submodule(name)
            if len(left) < _inputs(module):
                module.register_forward_pre_hook(_masked(left, _inputs(module), isinstance(module, nn.Linear)))
        for name, left in self.rows.items():
            module = dense.get_submodule(name)
            hear = _masked(left, len(module.weight), isinstance(module, nn.Linear))
            module.register_forward_hook(lambda m, _, out, hear=hear: hear(m, (out,))[0])
        return dense


def _without(left: Tensor, gone: Tensor) -> Tensor:
    stays = torch.ones(len(left), dtype=torch.bool)
    stays[gone] = False
    return left[stays]


def _inputs(module: nn.Module) -> int:
    return module.in_features if isinstance(module, nn.Linear) else module.in_channels


def _masked(left: Tensor, width: int, last: bool) -> Callable[..., Any]:
    mask = torch.zeros(width, dtype=torch.float64)
    mask[left] = 1

    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = inputs[0]
        return (x * mask.view(-1) if last else x * mask.view(-1, *[1] * (x.ndim - 2)), *inputs[1:])

    return hook


def run(name: str) -> dict[str, Any]:
    """Prune once. Raises whatever Torch-Pruning raises; `status` tells of what happens afterwards."""
    model, inputs = zoo.build(name, **options(name)), zoo.example(name)
    dense = copy.deepcopy(model)
    dense_macs = zoo.count_macs(zoo.compared(name, model), zoo.compared_input(name))
    start, cpu = time.perf_counter(), time.process_time()
    tool = pruner(name, model, inputs)
    built = time.perf_counter()
    masks, noting = Masks(model), 0.0
    for group in tool.step(interactive=True):
        before = time.process_time()
        masks.note(tool.DG, group)
        noting += time.process_time() - before
        group.prune()
    set_widths_(model)
    done, cpu = time.perf_counter(), time.process_time() - cpu - noting
    row: dict[str, Any] = {"seconds_graph": built - start, "seconds_step": done - built - noting, "cpu_seconds": cpu}
    try:
        with torch.no_grad():
            model.eval()(inputs)
        row["macs_left"] = zoo.count_macs(zoo.compared(name, model), zoo.compared_input(name)) / dense_macs
        got = zoo.outputs(name, model)
    except Exception as error:  # a network that was cut wrongly can stop anywhere
        return row | {
            "status": "does not run",
            "error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
        }
    expected = zoo.outputs(name, masks.zero_(dense))
    return row | {"status": "ok", "difference": zoo.difference(expected, got)}
