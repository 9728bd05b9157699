"""Fallback for models that cannot be traced: the dependency graph of torch-pruning, an optional package.

Its graph is read off the autograd graph of one run, so it covers only the path that this run took, and it treats
unknown operators as element-wise. Its groups are verified like all others. A model with layers that the run did not use
is left alone, because another run might use them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from compress.errors import NotReady

from .atoms import AtomIds, Atoms, GroupedConv, Mark
from .operator_trace import Untraceable
from .rules.contractions import count_macs, sizes_of
from .traced_parameters import TensorNames, trace_parameter

LAYERS = (nn.modules.conv._ConvNd, nn.Linear)


def trace_with_torch_pruning(
    atoms: Atoms, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], prefix: str = ""
) -> None:
    """Record torch-pruning's groups of `model` in `atoms`; parameters are named below `prefix`.

    Raises:
        NotReady: torch-pruning is not installed.
        Untraceable: torch-pruning fails, or the run does not use all layers.
    """
    try:
        import torch_pruning
    except ImportError as error:
        raise NotReady(
            f"target.one_path: {prefix[:-1] or 'the model'} can only be traced by torch-pruning, which is not "
            'installed; install the extra: pip install "compress[torch-pruning]", or set one_path to false'
        ) from error
    frozen_parameters = [p for p in model.parameters() if not p.requires_grad]
    training_flags = [(m, m.training) for m in model.modules()]
    output_shapes = _layer_output_shapes(model, args, kwargs)
    unused = [n for n, m in model.named_modules() if isinstance(m, LAYERS) and n not in output_shapes]
    if unused:
        raise Untraceable(f"a run does not use {unused[0]}; another run might")
    try:
        for p in frozen_parameters:  # torch-pruning does not see them otherwise
            p.requires_grad_(True)
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            graph = torch_pruning.DependencyGraph()
            inputs: Any = dict(kwargs) if kwargs else args
            graph.build_dependency(model, example_inputs=inputs)
            groups = [
                (m, graph.get_pruning_group(m, _pruning_function(m), list(range(_output_width(m)))))
                for m in _prunable_layers(model)
            ]
    except Exception as error:  # torch-pruning raises errors of any type on graphs that it does not understand
        raise Untraceable(f"torch-pruning: {type(error).__name__}: {' '.join(str(error).split())[:160]}") from error
    finally:
        for p in frozen_parameters:
            p.requires_grad_(False)
        for module, flag in training_flags:
            module.training = flag
    names = TensorNames(model, prefix)
    for layer, group in groups:
        _join_group(atoms, names, layer, group)
    for name, module in model.named_modules():
        if isinstance(module, LAYERS):
            _count_macs(atoms, names, module, output_shapes[name])


def _prunable_layers(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, LAYERS) and getattr(m, "groups", 1) == 1]


def _output_width(module: Any) -> int:
    return int(module.out_features if isinstance(module, nn.Linear) else module.out_channels)


def _pruning_function(module: nn.Module) -> Any:
    from torch_pruning.pruner import function

    return function.prune_linear_out_channels if isinstance(module, nn.Linear) else function.prune_conv_out_channels


def _is_transposed(layer: object) -> bool:
    return isinstance(layer, nn.modules.conv._ConvNd) and bool(layer.transposed)


def _atoms_along(atoms: Atoms, names: TensorNames, tensor: Tensor, dim: int) -> AtomIds | None:
    return trace_parameter(atoms, names[tensor], tensor, is_kernel=True).atom_ids[dim]


def _join_group(atoms: Atoms, names: TensorNames, root: Any, group: Any) -> None:
    """Join the output positions of the layer `root` with all positions that torch-pruning couples to them."""
    root_ids = _atoms_along(atoms, names, root.weight, 1 if _is_transposed(root) else 0)
    if root_ids is None:
        return
    atoms.mark(root_ids, Mark.WRITTEN)
    for item in group:
        layer, handler = item.dep.target.module, item.dep.handler.__name__
        positions = np.asarray(item.idxs, dtype=np.int64)
        root_positions = np.asarray(getattr(item, "root_idxs", None) or item.idxs, dtype=np.int64)
        if len(positions) != len(root_positions):
            atoms.freeze(root_ids, "torch-pruning does not say which positions belong together")
            continue
        is_input = "in_channels" in handler and isinstance(layer, LAYERS) and getattr(layer, "groups", 1) == 1
        for tensor, dim in _cut_tensors(layer, is_input):
            layer_ids = _atoms_along(atoms, names, tensor, dim)
            if layer_ids is None or positions.max(initial=0) >= layer_ids.size:
                atoms.freeze(root_ids, f"torch-pruning cuts {type(layer).__name__} in a way that is not understood")
                continue
            atoms.join(root_ids[root_positions], layer_ids[positions])
            if is_input:
                atoms.mark(layer_ids, Mark.READ)
            if isinstance(layer, nn.modules.conv._ConvNd) and layer.groups > 1:
                is_depthwise = layer.groups == layer.in_channels == layer.out_channels
                atoms.grouped_convs[names[tensor]] = GroupedConv(layer.groups, cut_whole_groups=is_depthwise)
                if not is_depthwise:
                    atoms.freeze(root_ids, "is read by a grouped convolution")


def _cut_tensors(layer: Any, is_input: bool) -> Sequence[tuple[Tensor, int]]:
    """Return the tensors of a layer that torch-pruning would cut, each with its dimension."""
    if isinstance(layer, nn.Parameter):
        last = [d for d, size in enumerate(layer.shape) if size > 1][-1:]
        return [(layer, d) for d in last]
    rows, columns = (1, 0) if _is_transposed(layer) else (0, 1)
    if is_input:
        return [(layer.weight, columns)]
    weights = [(layer.weight, rows)] if getattr(layer, "weight", None) is not None else []
    vectors = [getattr(layer, name, None) for name in ("bias", "running_mean", "running_var")]
    return weights + [(t, 0) for t in vectors if isinstance(t, Tensor)]


def _layer_output_shapes(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, list[tuple[int, ...]]]:
    """Return the output shape of every layer, once per call; the input shape of transposed convolutions."""
    shapes: dict[str, list[tuple[int, ...]]] = {}

    def record_shape(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            shapes.setdefault(name, []).append(tuple((inputs[0] if _is_transposed(module) else output).shape))

        return hook

    hooks = [m.register_forward_hook(record_shape(n)) for n, m in model.named_modules() if isinstance(m, LAYERS)]
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return shapes


def _count_macs(atoms: Atoms, names: TensorNames, module: Any, shapes: list[tuple[int, ...]]) -> None:
    weight = trace_parameter(atoms, names[module.weight], module.weight, is_kernel=True)
    sizes = sizes_of(weight, *range(len(weight.shape)))
    for shape in shapes:
        outer = shape[:-1] if isinstance(module, nn.Linear) else (shape[0], *shape[2:])
        count_macs(atoms, math.prod(outer), *sizes)
