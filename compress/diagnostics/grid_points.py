"""The points of the grids of a landscape, and the order in which they are evaluated."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Quantity(Enum):
    """Numbers that are found at the points of a plane, each on a grid of its own."""

    LOSS = "loss"
    VARIANCE = "gradient variance"


class Point(NamedTuple):
    """One number to be found: a quantity of a network at a point of its grid."""

    quantity: Quantity
    network: int
    row: int
    column: int


def symmetric_axis(resolution: int, span: float) -> NDArray[np.float64]:
    """Return coordinates from -span to span, symmetric, and exactly 0 in the middle."""
    half = resolution // 2
    return np.arange(-half, half + 1, dtype=np.float64) * (span / half)


def points_from_the_middle(axes: Mapping[Quantity, NDArray[np.float64]], num_networks: int) -> list[Point]:
    """Return all points, from the weights outwards: mistakes show at once, and what is found first is the middle."""
    points = []
    for quantity, axis in axes.items():
        distances = np.add.outer(axis**2, axis**2)
        for place in np.argsort(distances, axis=None, kind="stable"):
            row, column = divmod(int(place), len(axis))
            points += [Point(quantity, network, row, column) for network in range(num_networks)]
    return points
