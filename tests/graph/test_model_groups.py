"""Refusals are described in sentences, with the number of groups that a reason excludes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cases import groups_of
from compress.graph.group import RefusedGroup

SENTENCES = {
    ("is mixed by a layer norm (in norm1)",): "1 group is not cut: its dimension is mixed by a layer norm (in norm1). ",
    (
        "is mixed by a layer norm (in norm1)",
        "is mixed by a layer norm (in norm2)",
    ): "2 groups are not cut; the first: its dimension is mixed by a layer norm (in norm1). ",
    ("target.residual is off",) * 3: "3 groups are not cut: target.residual is off. ",
}


@pytest.mark.parametrize("reasons", SENTENCES)
def test_refusals_are_sentences(reasons: tuple[str, ...]) -> None:
    refused = [RefusedGroup(f"layer{i}", "channels", 4, reason) for i, reason in enumerate(reasons)]
    assert replace(groups_of("chain"), refused=refused).describe_refusals() == SENTENCES[reasons]
