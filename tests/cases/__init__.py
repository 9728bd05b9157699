"""The table of small networks that every contract runs on."""

from . import networks_hostile, networks_plain, networks_special
from .case import (
    CASES,
    Case,
    Net,
    build,
    case,
    distance,
    example,
    groups_of,
    random_keep,
    randomise_,
    run,
    same_bits,
    tensors_of,
    zero_scores_,
)

__all__ = [
    "CASES",
    "Case",
    "Net",
    "build",
    "case",
    "distance",
    "example",
    "groups_of",
    "networks_hostile",
    "networks_plain",
    "networks_special",
    "random_keep",
    "randomise_",
    "run",
    "same_bits",
    "tensors_of",
    "zero_scores_",
]
