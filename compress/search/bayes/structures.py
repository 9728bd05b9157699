"""Structures: groups of weights of a layer that are set to zero together (BayesNAS, table S3), by their axes.

A weight has the axes n (filters), c (input channels), m and k (rows and columns of the kernel); a linear layer has
m = k = 1. A structure is one or two families of groups; a family is named by the axes that distinguish its groups:
`cmk` has a group for each channel, row and column, which holds the weights of all filters there. The rules of the table
are

    omega = sqrt(sum over the group of alpha),  gamma = ||W||_2 / omega(t-1),  the same for all weights of the group

so a rule only needs sums over the axes that are not named, kept as axes of size one.

Structures (d) and (i) of the table, here `row_column` and `group_row_column`, differ: a group of the table is a row
and a column that cross, with one norm and one omega for both, so that groups overlap. Here rows and columns are groups
of their own, each with its omega. A kernel becomes smaller by whole rows and whole columns, which separate groups can
remove one by one, and the proximal step has a closed form only for groups that do not overlap.
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


def as_ncmk(weight: Tensor) -> Tensor:
    """Return a view of a weight with the axes n, c, m, k; the kernel of a one-dimensional convolution is a row."""
    if weight.ndim == 3:
        return weight[:, :, None]
    return weight if weight.ndim == 4 else weight[:, :, None, None]


def group_sums(value: Tensor, family: str) -> Tensor:
    """Return the sum over each group of a family, as a tensor that broadcasts over the weight."""
    return value.sum([i for i, axis in enumerate(AXES) if axis not in family], keepdim=True)


def group_families(structure: str, weight: Tensor) -> list[str]:
    """Return the families of a structure on a weight, without axes of size one.

    Empty if a family would be a single group of all weights.
    """
    long_axes = [axis for axis, size in zip(AXES, as_ncmk(weight).shape, strict=True) if size > 1]
    families = ["".join(axis for axis in family if axis in long_axes) for family in STRUCTURES[structure]]
    return list(dict.fromkeys(families)) if all(families) else []


def prunable_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the trained weights of linear layers and convolutions, by name."""
    for path, module in model.named_modules():
        weight = module._parameters.get("weight")
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)) and weight is not None and weight.requires_grad:
            yield f"{path}.weight" if path else "weight", weight
