"""Assert that a pruning is refused."""

from __future__ import annotations

from typing import Any

import pytest

import compress
from helpers.digits import RECIPE, dense


def refused(
    match: str, recipe: Any = RECIPE, model: Any = None, error: type[Exception] = compress.NotReady, **given: Any
) -> str:
    """Prune and return the message of the error, which must match."""
    with pytest.raises(error, match=match) as caught:
        compress.prune(dense() if model is None else model, recipe, quiet=True, **given)
    return str(caught.value)
