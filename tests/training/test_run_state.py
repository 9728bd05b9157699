"""The state of a run goes to a checkpoint and back, under the keys of the file format."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from compress.data import BatchPosition
from compress.training.run_state import CheckpointMetadata, LoopPosition, RunState


def test_everything_known_goes_round_and_the_unknown_is_left_out() -> None:
    assert RunState().to_dict() == {} and RunState.from_dict({"done": 3}) == RunState()
    values: dict[str, Any] = {field.name: {"a": i} for i, field in enumerate(fields(RunState))}
    state = RunState(**values)
    data = json.loads(json.dumps(state.to_dict()))
    assert RunState.from_dict(data) == state
    keys = "origin run stage dense sliced scores costs whole round plan report kept"
    assert set(data) == set(keys.split())


def test_metadata_of_a_checkpoint_is_flat_and_goes_round() -> None:
    position = LoopPosition(5, BatchPosition(1, 2, 0.5), {"loss": 1.5}, 2, [], 10, 4)
    for place in (None, position):
        metadata = CheckpointMetadata(RunState(round=1), [{"loss": 2.0}], {"search": 3.0}, {"lr": 1}, {}, place)
        data = json.loads(json.dumps(metadata.to_dict()))
        assert CheckpointMetadata.from_dict(data) == metadata
        assert ("done" in data) == (place is not None) and data["round"] == 1
