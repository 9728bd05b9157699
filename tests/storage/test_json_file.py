"""JSON files are read strictly: what json accepts and a plan must not contain is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compress.storage.json_file import read_json


def test_what_json_writes_is_read(tmp_path: Path) -> None:
    data = {"a": [1, 2.5, None, True, "ä"], "b": {"c": -1e-30}}
    (tmp_path / "a.json").write_text(json.dumps(data))
    assert read_json(tmp_path / "a.json") == data


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 1}', "a key is given twice"),
        ('{"a": {"b": 1, "b": 2}}', "a key is given twice"),
        ("[NaN]", "expected finite numbers; got NaN"),
        ("[-Infinity]", "expected finite numbers; got -Infinity"),
        ("[1e400]", "expected finite numbers; got 1e400"),
        ("[" * 100_000, "nested too deeply"),
        ("{", "Expecting property name"),
    ],
)
def test_other_text_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_json(tmp_path / "a.json")
