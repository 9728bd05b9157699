"""Structures: which weights of a layer live and die together (BayesNAS, table S3), from one description of the axes.

A weight has the axes n (filters), c (channels it reads), m and k (rows and columns of the kernel); a linear layer has
m = k = 1. A structure is one or two families of groups; a family is named by the axes that tell its groups apart: `cmk`
has a group for each channel, row and column, which holds the weights of all filters there. The rules of the table are

    omega = sqrt(sum over the group of alpha),  gamma = ||W||_2 / omega(t-1),  the same for all weights of the group

so a sum over the axes that are not named, kept as axes of size one, is all that a rule needs. The rows and columns of
`row_column` are groups of their own, as the penalty of the table sums over both.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

AXES = "ncmk"
STRUCTURES: dict[str, tuple[str, ...]] = {
    "shape": ("cmk",),
    "row": ("cm",),
    "column": ("ck",),
    "row_column": ("cm", "ck"),
    "channel": ("c",),
    "group_shape": ("mk",),
    "group_row": ("m",),
    "group_column": ("k",),
    "group_row_column": ("m", "k"),
    "filter": ("n",),
}


def as_four(weight: Tensor) -> Tensor:
    """A weight with the axes n, c, m, k; the kernel of a one-dimensional convolution is a row."""
    if weight.ndim == 3:
        return weight[:, :, None]
    return weight if weight.ndim == 4 else weight[:, :, None, None]


def over(value: Tensor, family: str) -> Tensor:
    """The sum over each group of a family, as a tensor that broadcasts over the weight."""
    return value.sum([i for i, axis in enumerate(AXES) if axis not in family], keepdim=True)


def families(structure: str, weight: Tensor) -> list[str]:
    """Those of a structure on this weight, without axes of one position; none where one would hold the whole weight."""
    long = [axis for axis, size in zip(AXES, as_four(weight).shape, strict=True) if size > 1]
    found = ["".join(axis for axis in family if axis in long) for family in STRUCTURES[structure]]
    return list(dict.fromkeys(found)) if all(found) else []


def layers(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The weights that have such axes, by name."""
    for path, module in model.named_modules():
        weight = module._parameters.get("weight")
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)) and weight is not None and weight.requires_grad:
            yield f"{path}.weight" if path else "weight", weight
