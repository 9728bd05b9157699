"""Errors of the library are printed as they are."""

from __future__ import annotations

import pytest

from compress.errors import format_error


def test_own_messages_stay_as_they_are() -> None:
    from compress.data.named_loaders import loaders
    from compress.recipe import Data

    with pytest.raises(ValueError, match="expected digits") as caught:
        loaders(Data(source="numbers"))
    caught.value.__traceback__ = caught.value.__traceback__.tb_next  # type: ignore[union-attr]  # from our code on
    assert format_error(caught.value) == str(caught.value)


def test_errors_of_other_code_get_their_type_and_the_line() -> None:
    def user_code() -> None:
        raise KeyError(17)

    with pytest.raises(KeyError) as caught:
        user_code()
    line = user_code.__code__.co_firstlineno + 1
    assert format_error(caught.value) == f"KeyError: 17 (tests/test_errors.py:{line})"
    with pytest.raises(ValueError, match=r"^$") as empty:
        raise ValueError
    assert format_error(empty.value).startswith("ValueError (")
