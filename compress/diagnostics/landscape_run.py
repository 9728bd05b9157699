"""The function `compress.landscape`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from compress.data import loader_problems, reproducible_reading, seed_loader
from compress.distributed import broadcast_object, on_rank_zero, rank
from compress.errors import BatchError, Diverged, NotReady
from compress.modules import tensors_in, tensors_of, unwrap_model
from compress.progress import ProgressDisplay
from compress.report import Landscape, Surface
from compress.storage import check_writable, hash_tensors, isolated_random_state, seed_all
from compress.training import Classification, Engine, TaskLike, as_task, pick_device

from .common_plane import OtherNetwork, other_problems, perturbed_networks
from .grid_points import Point, Quantity, points_from_the_middle, symmetric_axis
from .loss_statistics import LossStatistics
from .perturbed_network import PerturbedNetwork
from .unfinished_values import UnfinishedValues

BACKWARD_COST = 3  # a gradient takes about as long as so many losses


def landscape(
    model: nn.Module,
    data: Iterable[Any],
    *,
    other: OtherNetwork | None = None,
    resolution: int = 21,
    variance_resolution: int | None = 9,
    span: float = 1.0,
    batches: int = 8,
    task: TaskLike | None = None,
    seed: int = 0,
    file: str | Path | None = None,
    device: str | torch.device | None = None,
    quiet: bool = False,
) -> Landscape:
    """Evaluate the loss and the variance of its gradient in a random plane around the weights of a network.

    At (a, b) the weights are w + a d1 + b d2, with Gaussian d1 and d2 whose filters have the norms of those of w; norms
    and biases do not move. The networks are copies in eval mode. `model` and `other` are not changed.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 10))
    >>> data = [(torch.randn(16, 3, 8, 8), torch.randint(10, (16,))) for _ in range(4)]
    >>> around = landscape(model, data, resolution=5, variance_resolution=3, quiet=True)
    >>> around.loss.shape, around.variance.shape, around.axis.tolist()
    ((5, 5), (3, 3), [-1.0, -0.5, 0.0, 0.5, 1.0])

    Args:
        model: the network; with `other`, the dense one.
        data: loader of batches; the first `batches` of them are used.
        other: a cut network in the same plane: a `Pruned`, or the compact network and its plan. Its directions are
            those of `model`, sliced by the plan.
        resolution: points of the loss along each direction, an odd number.
        variance_resolution: points of the gradient variance; None leaves it out.
        span: the plane goes from -span to span.
        batches: number of batches; the gradient variance needs two.
        task: loss of anything other than classification.
        seed: of the directions, and of the order of a loader that shuffles.
        file: JSON file to write. Beside it, FILE.part.json keeps what an interrupted call has found; the same call
            continues there.
        device: default: a GPU if there is one.
        quiet: show no progress.

    Raises:
        NotReady: an argument is wrong, or `other` does not fit; the message lists all problems.
        PlanError: the plan of `other` was made for another model.
        BatchError: the loader gives too few batches, or something other than the task expects.
        Diverged: the loss at the weights themselves is not finite.
        OSError: the file cannot be written; this is tried first.
    """
    if problems := [
        *_grid_problems(resolution, variance_resolution, span),
        *_batch_problems(batches, variance_resolution is not None),
        *loader_problems(data, "data"),
        *other_problems(other),
    ]:
        raise NotReady("landscape:\n  " + "\n  ".join(problems))
    model, device = unwrap_model(model), pick_device(device, model)
    path = None if file is None else Path(file)
    if path is not None:
        on_rank_zero(lambda: check_writable(path))
    display = ProgressDisplay(quiet or rank() > 0)
    engine = Engine(device, seed, display)
    adapted = as_task(task) if task is not None else Classification()
    with isolated_random_state(seed), engine.gradient_computer.training():
        read = _read_batches(data, batches, seed)
        statistics = LossStatistics(adapted, engine, [engine.move(batch) for batch in read])
        if variance_resolution is not None and len(statistics.batches) < 2:
            raise BatchError(
                "landscape: the gradient variance needs at least two batches with targets; the loader gave "
                f"{len(statistics.batches)}. Give smaller batches, or variance_resolution=None"
            )
        networks = perturbed_networks(model, other, seed, device)
        axes = {Quantity.LOSS: symmetric_axis(resolution, span)}
        if variance_resolution is not None:
            axes[Quantity.VARIANCE] = symmetric_axis(variance_resolution, span)
        points = points_from_the_middle(axes, len(networks))
        settings = [resolution, variance_resolution, span, seed, type(adapted).__qualname__]
        partial = None if path is None else path.with_suffix(".part.json")
        unfinished = UnfinishedValues(partial, _identity(networks, read, settings) if partial is not None else "")
        _evaluate(points, axes, networks, statistics, unfinished, seed, display)
    result = _assemble(points, unfinished.values, axes, networks, seed, statistics)
    if path is not None and rank() == 0:
        result.save(path)
        unfinished.delete()
    return result


def _evaluate(
    points: Sequence[Point],
    axes: dict[Quantity, NDArray[np.float64]],
    networks: Sequence[PerturbedNetwork],
    statistics: LossStatistics,
    unfinished: UnfinishedValues,
    seed: int,
    display: ProgressDisplay,
) -> None:
    """Find the values that are missing; keep what was found if that is interrupted.

    Raises:
        Diverged: the loss at the weights themselves is not finite.
    """
    costs = [BACKWARD_COST if point.quantity is Quantity.VARIANCE else 1 for point in points]
    done = len(unfinished.values)
    if done:
        display.message(f"landscape: {done} of {len(points)} values are those of an interrupted call")
    try:
        with display, display.bar("landscape", sum(costs) - sum(costs[:done])) as bar:
            for point, cost in zip(points[done:], costs[done:], strict=True):
                unfinished.append(_value_at(point, axes[point.quantity], networks, statistics, seed))
                bar.advance(f"{point.quantity.value}, {networks[point.network].name}", by=cost)
    finally:
        if len(unfinished.values) < len(points):
            unfinished.save()


def _value_at(
    point: Point,
    axis: NDArray[np.float64],
    networks: Sequence[PerturbedNetwork],
    statistics: LossStatistics,
    seed: int,
) -> float:
    """Move a network to a point and evaluate it there, with the same random numbers at each point.

    Raises:
        Diverged: the loss at the weights themselves is not finite.
    """
    network = networks[point.network]
    network.move_to_(float(axis[point.row]), float(axis[point.column]))
    seed_all(seed)
    if point.quantity is Quantity.VARIANCE:
        return float(statistics.gradient_variance(network.model, network.parameters))
    value = float(statistics.mean_loss(network.model))
    if point.row == point.column == len(axis) // 2 and not math.isfinite(value):
        raise Diverged(
            f"landscape: the loss of the {network.name} network is {value} at its own weights. Look for NaN in the "
            "weights and the data"
        )
    return value


def _grid_problems(resolution: int, variance_resolution: int | None, span: float) -> list[str]:
    problems = []
    for name, size in (("resolution", resolution), ("variance_resolution", variance_resolution)):
        if size is None and name != "resolution":
            continue
        if isinstance(size, bool) or not isinstance(size, int) or size < 3 or size % 2 == 0:
            problems.append(
                f"{name}: expected an odd number from 3, so that the weights are in the middle; got {size!r}"
            )
    if isinstance(span, bool) or not isinstance(span, (int, float)) or not 0 < span < math.inf:
        problems.append(f"span: expected a number above 0, such as 1.0; got {span!r}")
    return problems


def _batch_problems(batches: int, has_variance: bool) -> list[str]:
    least = 2 if has_variance else 1
    if isinstance(batches, bool) or not isinstance(batches, int) or batches < least:
        hint = ", which the gradient variance needs" if has_variance else ""
        return [f"batches: expected at least {least}{hint}; got {batches!r}"]
    return []


def _read_batches(data: Iterable[Any], count: int, seed: int) -> list[Any]:
    """Return the first batches of a loader, the same in each call and on all processes."""
    with reproducible_reading(data):
        seed_loader(data, seed, 0)
        return broadcast_object(list(islice(data, count)))


def _identity(networks: Sequence[PerturbedNetwork], batches: Sequence[Any], settings: Sequence[Any]) -> str:
    """Return a hash of all that the values depend on, but for the code of the model and the task."""
    tensors = {f"{i}.{name}": t for i, network in enumerate(networks) for name, t in tensors_of(network.model).items()}
    tensors |= {f"batch {i}": tensor for i, tensor in enumerate(tensors_in(batches))}
    return hash_tensors(tensors, json.dumps(list(settings)))


def _assemble(
    points: Sequence[Point],
    values: Sequence[float],
    axes: dict[Quantity, NDArray[np.float64]],
    networks: Sequence[PerturbedNetwork],
    seed: int,
    statistics: LossStatistics,
) -> Landscape:
    """Return the landscape of the values found at the points."""
    grids = {
        (quantity, network): np.full((len(axis), len(axis)), math.nan)
        for quantity, axis in axes.items()
        for network in range(len(networks))
    }
    for point, value in zip(points, values, strict=True):
        grids[point.quantity, point.network][point.row, point.column] = value
    surfaces = tuple(
        Surface(network.name, grids[Quantity.LOSS, i], grids.get((Quantity.VARIANCE, i)))
        for i, network in enumerate(networks)
    )
    loss_axis, variance_axis = axes[Quantity.LOSS], axes.get(Quantity.VARIANCE)
    return Landscape(surfaces, loss_axis, variance_axis, seed, len(statistics.batches), statistics.samples)
