"""Torch-Pruning on the networks of the zoo, with the settings of its own scripts, and the verification of its cuts.

All parameters are trainable, the classifier is not cut, and there is one global step. Transformers follow its ViT
script with `--bottleneck`: inner dimensions of attention and MLPs are cut, the residual stream is not; every layer by
the same ratio, and all heads in the same way. Tables of position biases are ignored; otherwise it would cut no
attention that has one.

Its cuts are verified like ours: a copy of the dense network sees zeros at every layer input that was cut. The cut is
exact if the pruned network computes the same outputs.
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

LAYERS = (nn.modules.conv._ConvNd, nn.Linear)


def build_options(name: str) -> dict[str, Any]:
    """Return the options with which Torch-Pruning's scripts build this network: no auxiliary heads."""
    return {"aux_logits": False} if name in ("googlenet", "inception_v3") else {}


def ignored_layers(name: str, model: nn.Module) -> list[nn.Module]:
    """Return the layers that its scripts do not cut: classifiers, and the necks and heads of detectors."""
    if name == "maskrcnn_resnet50_fpn":
        return [
            model.get_submodule(p) for p in ("rpn.head.cls_logits", "rpn.head.bbox_pred", "backbone.fpn", "roi_heads")
        ]
    if name == "fcos_resnet50_fpn":
        return [model.get_submodule(p) for p in ("backbone.fpn", "head")]
    classes = 21 if name in zoo.SEGMENTERS else 1000
    return [m for m in model.modules() if isinstance(m, LAYERS) and m.weight.shape[0] == classes]


def qkv_heads(model: nn.Module) -> dict[nn.Module, int]:
    """Return the number of heads by fused projection of queries, keys and values."""
    attention_modules = [m for m in model.modules() if isinstance(getattr(m, "qkv", None), (nn.Linear, nn.Conv2d))]
    return {m.qkv: m.num_heads for m in attention_modules}


def set_widths_(model: nn.Module) -> None:
    """Set the new widths of attention modules, as Torch-Pruning's script does after the cut."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.attn_dim = module.qkv.out_features // 3
            module.head_dim = module.attn_dim // module.num_heads


def make_pruner(name: str, model: nn.Module, inputs: Any) -> tp.pruner.BasePruner:
    """Build the pruner and its dependency graph, with new dicts because the default ones are shared between calls."""
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    transformer = name in zoo.TRANSFORMERS
    ignored: list[Any] = ignored_layers(name, model)
    if transformer:
        ignored += [m.fc2 for m in model.modules() if isinstance(m, Mlp)]
        ignored += [p for n, p in model.named_parameters() if n.endswith("relative_position_bias_table")]
    forward_fn = (lambda m, x: m(x)) if isinstance(inputs, list) else None
    return tp.pruner.MagnitudePruner(
        model,
        example_inputs=inputs,
        importance=tp.importance.MagnitudeImportance(p=2),
        global_pruning=not transformer,
        pruning_ratio=0.5,
        ignored_layers=ignored,
        in_channel_groups={},
        out_channel_groups={},
        num_heads=qkv_heads(model) if transformer else {},
        forward_fn=forward_fn,
    )


class CutRecorder:
    """Record which inputs of each layer are kept, as indices into the dense network.

    Queries and keys are multiplied with each other and read by no layer, so the kept outputs of their projections are
    recorded instead.
    """

    def __init__(self, model: nn.Module) -> None:
        self.paths = {id(m): n for n, m in model.named_modules() if isinstance(m, LAYERS)}
        self.kept_inputs = {n: torch.arange(_num_inputs(m)) for n, m in model.named_modules() if isinstance(m, LAYERS)}
        self.kept_qkv_outputs = {self.paths[id(m)]: torch.arange(len(m.weight)) for m in qkv_heads(model)}

    def record(self, graph: tp.DependencyGraph, group: Any) -> None:
        """Record the dimensions of a group before Torch-Pruning cuts it."""
        for dep, indices in group:
            module = dep.target.module
            removed = torch.tensor(to_plain_idxs(indices), dtype=torch.long)
            name = self.paths.get(id(module), "")
            if name in self.kept_qkv_outputs and graph.is_out_channel_pruning_fn(dep.handler):
                self.kept_qkv_outputs[name] = _drop_indices(self.kept_qkv_outputs[name], removed)
            depthwise = isinstance(module, LAYERS[0]) and module.groups == module.out_channels > 1
            if id(module) not in self.paths or depthwise or not graph.is_in_channel_pruning_fn(dep.handler):
                continue
            self.kept_inputs[name] = _drop_indices(self.kept_inputs[name], removed)

    def mask_(self, dense: nn.Module) -> nn.Module:
        """Add hooks to the dense network that set the removed inputs of every layer to zero."""
        for name, kept in self.kept_inputs.items():
            module = dense.get_submodule(name)
            if len(kept) < _num_inputs(module):
                module.register_forward_pre_hook(_mask_hook(kept, _num_inputs(module), isinstance(module, nn.Linear)))
        for name, kept in self.kept_qkv_outputs.items():
            module = dense.get_submodule(name)
            mask_output = _mask_hook(kept, len(module.weight), isinstance(module, nn.Linear))
            module.register_forward_hook(lambda m, _, out, mask_output=mask_output: mask_output(m, (out,))[0])
        return dense


def _drop_indices(indices: Tensor, dropped: Tensor) -> Tensor:
    keep = torch.ones(len(indices), dtype=torch.bool)
    keep[dropped] = False
    return indices[keep]


def _num_inputs(module: nn.Module) -> int:
    return module.in_features if isinstance(module, nn.Linear) else module.in_channels


def _mask_hook(kept: Tensor, width: int, channels_last: bool) -> Callable[..., Any]:
    mask = torch.zeros(width, dtype=torch.float64)
    mask[kept] = 1

    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = inputs[0]
        return (x * mask.view(-1) if channels_last else x * mask.view(-1, *[1] * (x.ndim - 2)), *inputs[1:])

    return hook


def prune_and_verify(name: str) -> dict[str, Any]:
    """Prune once and compare the outputs with the masked dense network.

    Errors of Torch-Pruning propagate; if the pruned network fails, `status` is "does not run".
    """
    model, inputs = zoo.build_network(name, **build_options(name)), zoo.example_inputs(name)
    dense = copy.deepcopy(model)
    dense_macs = zoo.count_macs(zoo.compared_module(name, model), zoo.compared_inputs(name))
    start, cpu = time.perf_counter(), time.process_time()
    pruner = make_pruner(name, model, inputs)
    graph_built = time.perf_counter()
    recorder, recording_seconds = CutRecorder(model), 0.0
    for group in pruner.step(interactive=True):
        before = time.process_time()
        recorder.record(pruner.DG, group)
        recording_seconds += time.process_time() - before
        group.prune()
    set_widths_(model)
    end, cpu = time.perf_counter(), time.process_time() - cpu - recording_seconds
    row: dict[str, Any] = {
        "seconds_graph": graph_built - start,
        "seconds_step": end - graph_built - recording_seconds,
        "cpu_seconds": cpu,
    }
    try:
        with torch.no_grad():
            model.eval()(inputs)
        row["macs_left"] = zoo.count_macs(zoo.compared_module(name, model), zoo.compared_inputs(name)) / dense_macs
        outputs = zoo.compute_outputs(name, model)
    except Exception as error:  # a wrong cut can raise any exception
        return row | {
            "status": "does not run",
            "error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
        }
    expected = zoo.compute_outputs(name, recorder.mask_(dense))
    return row | {"status": "ok", "difference": zoo.relative_difference(expected, outputs)}
