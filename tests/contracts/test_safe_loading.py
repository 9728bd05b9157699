"""A damaged, foreign or hostile directory is refused before the model is touched, or gives the same bits."""

from __future__ import annotations

import copy
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import compress
from cases import CASES, build, example
from compress import Plan, PlanError
from compress.pipeline.workdir import IDENTITY_FILE, DataSizes, RunIdentity, check_workdir
from compress.storage.checkpoint import CheckpointStore
from helpers.digits import dense, loaders
from helpers.interruption import SHORT_RECIPE, Interrupted, InterruptedLoader
from helpers.snapshots import same_snapshot, snapshot

NAMES = ("chain", "tied_weights")
FIXED = settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory for each of a few networks."""
    folder = tmp_path_factory.mktemp("saved")
    for name in NAMES:
        recipe = {"budget": {"dims": "60%"}, "timing": {"repeats": 3}}
        compress.prune(build(CASES[name]), recipe, example_inputs=example(CASES[name]), quiet=True).save(folder / name)
    return folder


@cache
def fresh(name: str) -> nn.Module:
    return build(CASES[name], seed=3)


def refused_or_equal(name: str, folder: Path, good: Path) -> str | None:
    """What is said, if the directory is refused; if not, its weights are those that were saved."""
    model = copy.deepcopy(fresh(name))
    before = snapshot(model)
    try:
        loaded = compress.load(model, folder)
    except PlanError as error:
        assert same_snapshot(before, snapshot(model)), "the model was touched"
        assert "plan.json" in str(error) or "model.safetensors" in str(error), error
        return str(error)
    right = compress.load(copy.deepcopy(fresh(name)), good).state_dict()
    assert all(torch.equal(tensor, right[key]) for key, tensor in loaded.state_dict().items())
    return None


@pytest.mark.parametrize("file", ["plan.json", "model.safetensors"])
@FIXED
@given(name=st.sampled_from(NAMES), draw=st.data())
def test_flipped_bits_and_cut_files_are_refused_or_change_nothing(
    file: str, name: str, draw: st.DataObject, saved: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    raw = bytearray((saved / name / file).read_bytes())
    for _ in range(draw.draw(st.integers(1, 3))):
        at = draw.draw(st.integers(0, len(raw) - 1))
        if draw.draw(st.booleans()):
            raw[at] ^= 1 << draw.draw(st.integers(0, 7))
        else:
            raw = raw[: at + 1] + draw.draw(st.binary(max_size=9)) * draw.draw(st.integers(0, 1))
    folder = tmp_path_factory.mktemp("damaged") / "out"
    shutil.copytree(saved / name, folder)
    (folder / file).write_bytes(bytes(raw))
    refused_or_equal(name, folder, saved / name)


def test_every_bit_of_the_numbers_counts(saved: Path, tmp_path: Path) -> None:
    """The first, the last and some others of the data region."""
    shutil.copytree(saved / "chain", tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    raw = path.read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    for at in (begin, begin + 7, (begin + len(raw)) // 2, len(raw) - 1):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        said = refused_or_equal("chain", tmp_path / "out", saved / "chain")
        assert said is not None and "damaged: its weights are not those that were saved" in said


def test_plan_and_weights_of_two_runs_do_not_go_together(tmp_path: Path) -> None:
    """Both are right for the model, and of the same shapes."""
    x, one = torch.randn(1, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    for number, kept in enumerate(([0, 1, 2], [5, 6, 7])):
        plan = Plan.build(one, compress.find_groups(one, x), {"0": kept})
        small = plan.apply_(copy.deepcopy(one))
        compress.Pruned(small, plan, compress.preview(one, {"budget": {"dims": 1.0}}, example_inputs=x).report).save(
            tmp_path / str(number)
        )
    shutil.copy(tmp_path / "0" / "plan.json", tmp_path / "1" / "plan.json")
    before = snapshot(one)
    with pytest.raises(PlanError, match=r"model\.safetensors: was saved with another plan than .*plan\.json"):
        compress.load(one, tmp_path / "1")
    assert same_snapshot(before, snapshot(one))


def test_weights_without_hashes_are_refused(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "chain", tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path)
    with pytest.raises(PlanError, match=r"expected the hashes of plan and weights that save\(\) writes; got none"):
        compress.load(fresh("chain"), tmp_path / "out")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of a run that was stopped behind its cut."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(Interrupted):
        compress.prune(
            dense(), SHORT_RECIPE, train=InterruptedLoader(loaders(64, 256)[0], 7), workdir=folder, quiet=True
        )
    return folder


@FIXED
@given(draw=st.data())
def test_damaged_checkpoints_are_refused_or_the_same(draw: st.DataObject, stopped: Path, tmp_path_factory: Any) -> None:
    raw = bytearray(CheckpointStore(stopped).path.read_bytes())
    at = draw.draw(st.integers(0, len(raw) - 1) | st.integers(0, 9000))  # its header, too
    if draw.draw(st.booleans()):
        raw[at] ^= 1 << draw.draw(st.integers(0, 7))
    else:
        raw = raw[:at]
    store = CheckpointStore(tmp_path_factory.mktemp("damaged"))
    store.path.write_bytes(bytes(raw))
    try:
        found, right = store.load(), CheckpointStore(stopped).load()
    except ValueError as error:
        assert "checkpoint.safetensors: not a checkpoint" in str(error)
        return
    assert found is not None and right is not None and found[1] == right[1]
    assert all(torch.equal(tensor, right[0][name]) for name, tensor in found[0].items())


@FIXED
@given(draw=st.data())
def test_damaged_identities_are_refused_or_the_same(draw: st.DataObject, stopped: Path, tmp_path_factory: Any) -> None:
    raw = bytearray((stopped / IDENTITY_FILE).read_bytes())
    saved = json.loads(raw)
    identity = RunIdentity(saved["recipe"], saved["model"], DataSizes(**saved["data"]))
    at = draw.draw(st.integers(0, len(raw) - 1))
    if draw.draw(st.booleans()):
        raw[at] ^= 1 << draw.draw(st.integers(0, 7))
    else:
        raw = raw[:at]
    folder = tmp_path_factory.mktemp("damaged")
    (folder / IDENTITY_FILE).write_bytes(bytes(raw))
    CheckpointStore(folder).path.write_bytes(b"")
    try:
        check_workdir(folder, identity, resume=True)
    except (FileExistsError, ValueError) as error:
        assert str(folder) in str(error)
