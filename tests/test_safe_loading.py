"""A damaged, foreign or hostile directory is refused before the model is touched, or gives the same bits."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from case import build, example
from cases import CASES
from digits import dense, loaders
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from test_resume import FULL, Stop, Stopping
from torch import nn

import compress
from compress import Plan, PlanError
from compress.checkpoint import Store
from compress.report import Report
from compress.workdir import IDENTITY, check_workdir

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


def portrait(model: nn.Module) -> dict[str, Any]:
    facts = {name: (type(m), {k: v for k, v in vars(m).items() if isinstance(v, (int, str, tuple))})
             for name, m in model.named_modules()}  # fmt: skip
    return facts | {name: (id(t), t.detach().clone()) for name, t in model.state_dict(keep_vars=True).items()}


def alike(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(x[1], b[k][1]) and x[0] == b[k][0] if isinstance(x[1], torch.Tensor) else x == b[k]
        for k, x in a.items()
    )


def refused_or_equal(name: str, folder: Path, good: Path) -> str | None:
    """What is said, if the directory is refused; if not, its weights are those that were saved."""
    model = copy.deepcopy(fresh(name))
    before = portrait(model)
    try:
        loaded = compress.load(model, folder)
    except PlanError as error:
        assert alike(before, portrait(model)), "the model was touched"
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
    before = portrait(one)
    with pytest.raises(PlanError, match=r"model\.safetensors: was saved along with another plan than .*plan\.json"):
        compress.load(one, tmp_path / "1")
    assert alike(before, portrait(one))


def test_weights_without_hashes_are_refused(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "chain", tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path)
    with pytest.raises(PlanError, match=r"expected the hashes of plan and weights that save\(\) writes; got none"):
        compress.load(fresh("chain"), tmp_path / "out")


def put(*path: Any) -> Callable[[Any], None]:
    """Replace what stands at a place of a plan."""

    def change(data: Any) -> None:
        *way, key, value = path
        for step in way:
            data = data[step]
        data[key] = value

    return change


HOSTILE = {
    r"group 0\.0: expected kept dimensions in 0\.\.7": [
        put("keep", "0.0", [-1, 3]), put("keep", "0.0", [3, 1]), put("keep", "0.0", [1, 1, 2]),
        put("keep", "0.0", [0, 8]), put("keep", "0.0", [0.0]), put("keep", "0.0", [True]), put("keep", "0.0", []),
        put("keep", "0.0", "01"), put("keep", "0.0", None), put("keep", "0.0", [10**18]),
    ],
    r"widths 0\.0: expected a width": [
        put("widths", "0.0", 10**18), put("widths", "0.0", 0), put("widths", "0.0", -8), put("widths", "0.0", 8.0)],
    r"widths 9: expected a width .* of a group that keep names": [put("widths", "9", 3)],
    r"indices 0: expected positions, sorted and each once": [
        put("indices", 0, [2, 1]), put("indices", 0, [1, 1]), put("indices", 0, [-1]), put("indices", 0, {"0": 1}),
        put("indices", 0, [1e18])],
    r"slices 0\.0\.weight: expected for each dimension": [
        put("slices", "0.0.weight", {"0": 99}), put("slices", "0.0.weight", {"7": 0}), put("slices", "0.0.weight", [0]),
        put("slices", "0.0.weight", {"0": -1}), put("slices", "0.0.weight", {"00": 0}), put("indices", 0, [10**9])],
    r"slices nowhere: expected": [put("slices", "nowhere", {"0": 0})],
    r"shapes 0\.0\.weight: expected a shape": [
        put("shapes", "0.0.weight", [10**18, 3, 3, 3]), put("shapes", "0.0.weight", [-8, 3, 3, 3]),
        put("shapes", "0.0.weight", [8] * 99)],
    r"0\.0\.weight: expected shape \[9, 3, 3, 3\], the model has \[8, 3, 3, 3\]": [
        put("shapes", "0.0.weight", [9, 3, 3, 3])],
    r"expected names of modules and tensors; got '": [
        put("shapes", "/etc/passwd", [1]), put("biases", "../../x", 1), put("forms", "a\\b", "c"),
        put("gone", "a\n", "b")],
    r"reads 0\.0\.weight: expected dimensions that are sliced": [put("reads", "0.0.weight", [3])],
    r"attributes 0\.0: expected names, and a number": [
        put("attributes", "0.0", {"__class__": 3}), put("attributes", "0.0", {"out_channels": -1}),
        put("attributes", "0.0", {"forward": "os.system"}), put("attributes", "0.0", {"out_channels": True}),
        put("attributes", "0.0", {"out_channels": 10**18}), put("attributes", "0.0", {"a b": 1})],
    r"0\.0\.out_channels: expected what can become 99; the model has 8": [
        put("attributes", "0.0", {"out_channels": 99})],
    r"0\.0: expected an attribute nonsense; Conv2d has none": [put("attributes", "0.0", {"nonsense": 1})],
    r"0\.0\.bias: expected what can become zeros; the model has None": [put("attributes", "0.0", {"bias": "zeros"})],
    r"nowhere: the model has no module of that name": [put("biases", "nowhere", 1), put("forms", "nowhere", "a")],
    r"biases 0\.0: expected a size": [put("biases", "0.0", -1), put("biases", "0.0", 10**18)],
    r"0\.0: expected a layer with 2000000000 rows left, which get a bias; the model has \d": [
        put("biases", "0.0", 2 * 10**9)],
    r"gone 0\.0: expected what becomes of the module": [put("gone", "0.0", "eval"), put("gone", "0.0", 3)],
    r"expected a module that can become identity": [put("gone", "0.0", "identity"), put("gone", "", "identity")],
    r"expected a module that can become only nowhere": [put("gone", "0", "only nowhere")],
    r"scales 0: expected tensor, dimension": [
        put("scales", [["0.0.weight", 0, 0, -1.0]]), put("scales", [["0.0.weight", 9, 0, 1.0]]), put("scales", [3])],
    r"plan of version": [put("version", 2), put("version", True), put("version", None)],
    r"not a plan: unknown key 'code'": [put("code", "print(1)")],
}  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_plans_that_no_plan_says_are_refused(text: str, saved: Path, tmp_path: Path) -> None:
    """What `Plan.apply_` and `compress.load` say alike; the hash of weights has no part in it."""
    for change in HOSTILE[text]:
        data = json.loads((saved / "chain" / "plan.json").read_text())
        change(data)
        (tmp_path / "plan.json").write_text(json.dumps(data))
        model = fresh("chain")
        before = portrait(model)
        with pytest.raises(PlanError, match=text):
            Plan.load(tmp_path / "plan.json").apply_(model)
        assert alike(before, portrait(model))


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b'{"version": NaN}', "expected finite numbers; got NaN"),
        (b'{"version": 1e999}', "expected finite numbers; got 1e999"),
        (b'{"version": 1, "version": 1}', "a key is given twice"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"version": ' + b"9" * 9999 + b"}", "limit"),
        (b"\xff\xfe{}", ""),
    ],
)
def test_json_that_no_plan_has_is_refused(raw: bytes, text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(raw)
    with pytest.raises(PlanError, match=rf"plan\.json: not a plan \(.*{text}"):
        Plan.load(path)
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(PlanError, match="expected at most 256 MB; got 1099511627776 bytes"):
        Plan.load(path)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of a run that was stopped behind its cut."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(Stop):
        compress.prune(dense(), FULL, train=Stopping(loaders(64, 256)[0], 7), workdir=folder, quiet=True)
    return folder


@FIXED
@given(draw=st.data())
def test_damaged_checkpoints_are_refused_or_the_same(draw: st.DataObject, stopped: Path, tmp_path_factory: Any) -> None:
    raw = bytearray(Store(stopped).path.read_bytes())
    at = draw.draw(st.integers(0, len(raw) - 1) | st.integers(0, 9000))  # its header, too
    if draw.draw(st.booleans()):
        raw[at] ^= 1 << draw.draw(st.integers(0, 7))
    else:
        raw = raw[:at]
    store = Store(tmp_path_factory.mktemp("damaged"))
    store.path.write_bytes(bytes(raw))
    try:
        found, right = store.load(), Store(stopped).load()
    except ValueError as error:
        assert "checkpoint.safetensors: not a checkpoint" in str(error)
        return
    assert found is not None and right is not None and found[1] == right[1]
    assert all(torch.equal(tensor, right[0][name]) for name, tensor in found[0].items())


@FIXED
@given(draw=st.data())
def test_damaged_identities_are_refused_or_the_same(draw: st.DataObject, stopped: Path, tmp_path_factory: Any) -> None:
    raw = bytearray((stopped / IDENTITY).read_bytes())
    recipe, right = compress.Recipe.load(FULL), json.loads(raw)
    at = draw.draw(st.integers(0, len(raw) - 1))
    if draw.draw(st.booleans()):
        raw[at] ^= 1 << draw.draw(st.integers(0, 7))
    else:
        raw = raw[:at]
    folder = tmp_path_factory.mktemp("damaged")
    (folder / IDENTITY).write_bytes(bytes(raw))
    Store(folder).path.write_bytes(b"")
    try:
        found = check_workdir(folder, dense(), recipe, resume=True, identity=dict(right))
    except (FileExistsError, ValueError) as error:
        assert str(folder) in str(error)
        return
    assert found == right


def test_damaged_report_is_refused_by_name(saved: Path, tmp_path: Path) -> None:
    data = json.loads((saved / "chain" / "report.json").read_text())
    path = tmp_path / "report.json"
    for text in (
        "",
        "[",
        "3",
        "{}",
        json.dumps(data | {"groups": [3]}),
        json.dumps(data | {"dense": {"a": 1}}),
        "[" * 10**5,
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"report\.json: not a report, or a damaged one \("):
            Report.load(path)
