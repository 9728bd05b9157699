"""The last resort: torch-pruning's dependency graph, for models that torch.export cannot follow at all.

Its graph is read off the autograd graph of one run, so it sees the path that this run took and takes unknown operators
for element-wise ones. What it says goes through the same proof as everything else, and a model with parameters that
the run did not touch is left alone, since another run might use them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .atoms import Atoms, Labels
from .contractions import term
from .follow import Untraceable, first_names, parameter

LAYERS = (nn.modules.conv._ConvNd, nn.Linear)


def walk_dependency(
    atoms: Atoms, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], prefix: str = ""
) -> None:
    """Add what torch-pruning's graph of `model` says to `atoms`; parameters are named below `prefix`.

    Raises:
        Untraceable: torch-pruning fails, or the run leaves parameters untouched.
    """
    import torch_pruning

    frozen = [p for p in model.parameters() if not p.requires_grad]
    modes = [(m, m.training) for m in model.modules()]
    shapes = _record(model, args, kwargs)
    if untouched := [n for n, m in model.named_modules() if isinstance(m, LAYERS) and n not in shapes]:
        raise Untraceable(f"a run does not touch {untouched[0]}; another run might")
    try:
        for p in frozen:  # invisible to it otherwise
            p.requires_grad_(True)
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            graph = torch_pruning.DependencyGraph()
            inputs: Any = dict(kwargs) if kwargs else args
            graph.build_dependency(model, example_inputs=inputs)
            found = [(m, graph.get_pruning_group(m, _pruner(m), list(range(_width(m))))) for m in _roots(model)]
    except Exception as error:  # it raises anything at all on graphs it does not understand
        raise Untraceable(f"torch-pruning: {type(error).__name__}: {' '.join(str(error).split())[:160]}") from error
    finally:
        for p in frozen:
            p.requires_grad_(False)
        for module, flag in modes:
            module.training = flag
    first = {number: prefix + name for number, name in first_names(model).items()}
    for module, group in found:
        _join(atoms, model, first, module, group)
    for name, module in model.named_modules():
        if isinstance(module, LAYERS):
            _count(atoms, first, module, shapes[name])


def _roots(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, LAYERS) and getattr(m, "groups", 1) == 1]


def _width(module: Any) -> int:
    return int(module.out_features if isinstance(module, nn.Linear) else module.out_channels)


def _pruner(module: nn.Module) -> Any:
    from torch_pruning.pruner import function

    return function.prune_linear_out_channels if isinstance(module, nn.Linear) else function.prune_conv_out_channels


def _labels(atoms: Atoms, first: dict[int, str], tensor: Tensor, dim: int) -> Labels | None:
    return parameter(atoms, first[id(tensor)], tensor, kernel=True).labels[dim]


def _join(atoms: Atoms, model: nn.Module, first: dict[int, str], root: Any, group: Any) -> None:
    out = 1 if isinstance(root, nn.modules.conv._ConvNd) and root.transposed else 0
    mine = _labels(atoms, first, root.weight, out)
    if mine is None:
        return
    atoms.mark(mine, "written")
    for item in group:
        layer, handler = item.dep.target.module, item.dep.handler.__name__
        positions = np.asarray(item.idxs, dtype=np.int64)
        roots = np.asarray(getattr(item, "root_idxs", None) or item.idxs, dtype=np.int64)
        if len(positions) != len(roots):
            atoms.freeze(mine, "torch-pruning does not say which positions belong together")
            continue
        reads = "in_channels" in handler and isinstance(layer, LAYERS) and getattr(layer, "groups", 1) == 1
        for tensor, dim in _tensors(layer, reads):
            theirs = _labels(atoms, first, tensor, dim)
            if theirs is None or positions.max(initial=0) >= theirs.size:
                atoms.freeze(mine, f"torch-pruning cuts {type(layer).__name__} in a way that is not understood")
                continue
            atoms.join(mine[roots], theirs[positions])
            if reads:
                atoms.mark(theirs, "read")
            if isinstance(layer, nn.modules.conv._ConvNd) and layer.groups > 1:
                whole = layer.groups == layer.in_channels == layer.out_channels
                atoms.grouped[first[id(tensor)]] = (layer.groups, whole)
                if not whole:
                    atoms.freeze(mine, "is read by a grouped convolution")


def _tensors(layer: Any, reads: bool) -> Sequence[tuple[Tensor, int]]:
    if isinstance(layer, nn.Parameter):
        last = [d for d, size in enumerate(layer.shape) if size > 1][-1:]
        return [(layer, d) for d in last]
    transposed = isinstance(layer, nn.modules.conv._ConvNd) and layer.transposed
    if reads:
        return [(layer.weight, 0 if transposed else 1)]
    found: list[tuple[Tensor, int]] = (
        [(layer.weight, 1 if transposed else 0)] if getattr(layer, "weight", None) is not None else []
    )
    others = [getattr(layer, name, None) for name in ("bias", "running_mean", "running_var")]
    return found + [(t, 0) for t in others if isinstance(t, Tensor)]


def _record(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, list[tuple[int, ...]]]:
    """The output shapes of every layer, once per call."""
    shapes: dict[str, list[tuple[int, ...]]] = {}

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            transposed = isinstance(module, nn.modules.conv._ConvNd) and module.transposed
            shapes.setdefault(name, []).append(tuple((inputs[0] if transposed else output).shape))

        return hook

    hooks = [m.register_forward_hook(watch(n)) for n, m in model.named_modules() if isinstance(m, LAYERS)]
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return shapes


def _count(atoms: Atoms, first: dict[int, str], module: Any, shapes: list[tuple[int, ...]]) -> None:
    value = parameter(atoms, first[id(module.weight)], module.weight, kernel=True)
    sizes = [value.shape[d] if value.labels[d] is None else value.labels[d] for d in range(len(value.shape))]
    for shape in shapes:
        outer = shape[:-1] if isinstance(module, nn.Linear) else (shape[0], *shape[2:])
        term(atoms, math.prod(outer), *sizes)
