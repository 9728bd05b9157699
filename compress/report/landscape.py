"""Landscape: loss and gradient variance on grids around the weights of one network or two, as a table and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from compress.formatting import printable
from compress.storage import read_json, write_atomic

Grid = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Surface:
    """Loss and gradient variance of one network; `grid[i, j]` is at (a, b) = (axis[i], axis[j]), NaN if not finite.

    Attributes:
        variance: mean squared distance of a sample's gradient from the mean gradient; None if it was left out.
    """

    name: str
    loss: Grid
    variance: Grid | None = None

    @property
    def noise(self) -> Grid | None:
        """Standard deviation of a sample's gradient: the root of the variance."""
        return None if self.variance is None else np.sqrt(self.variance)


@dataclass(frozen=True, eq=False)
class Landscape:
    """Loss s(a, b) and gradient variance g(a, b) of networks whose weights move in one plane, w + a d1 + b d2.

    Attributes:
        surfaces: of the network, and of the other one if there is one.
        axis: coordinates a and b of the grids of the loss; its middle is 0, the weights themselves.
        variance_axis: those of the gradient variance; None if it was left out.
        seed: of the directions.
        batches: number of batches.
        samples: number of targets in them.
    """

    surfaces: tuple[Surface, ...]
    axis: Grid
    variance_axis: Grid | None
    seed: int
    batches: int
    samples: float

    @property
    def loss(self) -> Grid:
        """Loss of the first network."""
        return self.surfaces[0].loss

    @property
    def variance(self) -> Grid | None:
        """Gradient variance of the first network; None if it was left out."""
        return self.surfaces[0].variance

    @property
    def other(self) -> Surface | None:
        """Loss and gradient variance of the second network in the same plane; None if there is none."""
        return self.surfaces[1] if len(self.surfaces) > 1 else None

    def __repr__(self) -> str:
        size = len(self.axis)
        centres = ", ".join(f"{surface.name} {centre(surface.loss):.4g}" for surface in self.surfaces)
        return f"Landscape({size} x {size}, loss at the weights: {centres})"

    def curvature(self, surface: Surface) -> float:
        """Return the second difference of a loss at the centre, as the mean over the two directions."""
        loss, middle, step = surface.loss, len(self.axis) // 2, float(self.axis[1] - self.axis[0])
        neighbours = loss[middle - 1, middle] + loss[middle + 1, middle] + loss[middle, middle - 1]
        neighbours += loss[middle, middle + 1]
        return float(neighbours - 4 * loss[middle, middle]) / (2 * step**2)

    def to_dict(self) -> dict[str, Any]:
        """Return the landscape as JSON data; null stands for what is not finite."""
        return {
            "axis": self.axis.tolist(),
            "variance_axis": None if self.variance_axis is None else self.variance_axis.tolist(),
            "surfaces": [
                {
                    "name": surface.name,
                    "loss": _to_lists(surface.loss),
                    "variance": None if surface.variance is None else _to_lists(surface.variance),
                }
                for surface in self.surfaces
            ],
            "seed": self.seed,
            "batches": self.batches,
            "samples": self.samples,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Landscape:
        """Build a landscape from the data of `to_dict`.

        Raises:
            ValueError: this is not a landscape.
        """
        try:
            axis, variance_axis = _axis(data["axis"]), data["variance_axis"]
            if variance_axis is not None:
                variance_axis = _axis(variance_axis)
            surfaces = tuple(
                Surface(
                    str(surface["name"]),
                    _grid(surface["loss"], axis),
                    None if variance_axis is None else _grid(surface["variance"], variance_axis),
                )
                for surface in data["surfaces"]
            )
            if not surfaces:
                raise ValueError("it has no surface")
            numbers = int(data["seed"]), int(data["batches"]), float(data["samples"])
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"not a landscape, or a damaged one ({type(error).__name__}: {error})") from error
        return cls(surfaces, axis, variance_axis, *numbers)

    def to_json(self) -> str:
        """Return the text of landscape.json."""
        return json.dumps(self.to_dict())

    def save(self, path: str | Path) -> None:
        """Write the landscape as JSON, atomically.

        Raises:
            OSError: it cannot be written.
        """
        write_atomic(Path(path), self.to_json().encode())

    @classmethod
    def load(cls, path: str | Path) -> Landscape:
        """Read a landscape that `save` wrote.

        Raises:
            ValueError: the file is damaged, or no landscape.
            OSError: it cannot be read.
        """
        try:
            return cls.from_dict(read_json(Path(path)))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def __rich__(self) -> Table:
        text = f"{self.batches} batches, {self.samples:g} samples; the plane is {self.axis[0]:g} to {self.axis[-1]:g}"
        table = Table(title="landscape", title_justify="left", caption=text, caption_justify="left")
        headers = ["network", "loss", "highest", "curvature"]
        headers += ["gradient noise", "highest noise"] if self.variance_axis is not None else []
        for header in [*headers, "not finite"]:
            table.add_column(header, justify="left" if header == "network" else "right")
        for surface in self.surfaces:
            grids = [surface.loss] if surface.noise is None else [surface.loss, surface.noise]
            gaps = sum(int(np.isnan(grid).sum()) for grid in grids)
            cells = [centre(surface.loss), highest(surface.loss), self.curvature(surface)]
            cells += [] if surface.noise is None else [centre(surface.noise), highest(surface.noise)]
            table.add_row(
                Text(printable(surface.name)), *(f"{cell:.4g}" for cell in cells), f"{gaps} of {_size(grids)}"
            )
        return table

    def show(self) -> None:
        """Print loss, curvature and gradient noise at the weights, and their largest values in the plane."""
        Console().print(self)


def centre(grid: Grid) -> float:
    """Return the value of a grid at the weights themselves."""
    middle = len(grid) // 2
    return float(grid[middle, middle])


def highest(grid: Grid) -> float:
    """Return the largest finite value of a grid; NaN if there is none."""
    finite = grid[np.isfinite(grid)]
    return float(finite.max()) if finite.size else math.nan


def _size(grids: list[Grid]) -> int:
    return sum(grid.size for grid in grids)


def _to_lists(grid: Grid) -> list[list[float | None]]:
    return [[value if math.isfinite(value) else None for value in row] for row in grid.tolist()]


def _axis(values: Any) -> Grid:
    """Return the coordinates of a grid.

    Raises:
        ValueError: they are not an odd number of increasing numbers around 0.
    """
    axis = np.array(values, dtype=np.float64)
    if axis.ndim != 1 or len(axis) < 3 or len(axis) % 2 == 0 or not (np.diff(axis) > 0).all() or axis[len(axis) // 2]:
        raise ValueError("expected an odd number of increasing coordinates around 0 as axis")
    return axis


def _grid(values: Any, axis: Grid) -> Grid:
    """Return a grid with NaN in place of null.

    Raises:
        ValueError: it is not a square of numbers over the axis.
    """
    grid = np.array(values, dtype=np.float64)  # None becomes NaN
    if grid.shape != (len(axis), len(axis)):
        raise ValueError(f"expected {len(axis)} x {len(axis)} numbers over the axis; got the shape {list(grid.shape)}")
    return grid
