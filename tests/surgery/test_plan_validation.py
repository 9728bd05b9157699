"""Plans with invalid content are refused before the model is changed; the error names the place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from cases import CASES, build, groups_of, random_keep
from compress import Plan, PlanError
from helpers.snapshots import same_snapshot, snapshot


def put(*path: Any) -> Callable[[Any], None]:
    """Return a function that replaces one entry of a plan."""

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
    r"widths 9: expected a width .* of a group in `keep`": [put("widths", "9", 3)],
    r"indices 0: expected positions, sorted, without duplicates": [
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
    r"attributes 0\.0: expected attribute names, each with": [
        put("attributes", "0.0", {"__class__": 3}), put("attributes", "0.0", {"out_channels": -1}),
        put("attributes", "0.0", {"forward": "os.system"}), put("attributes", "0.0", {"out_channels": True}),
        put("attributes", "0.0", {"out_channels": 10**18}), put("attributes", "0.0", {"a b": 1})],
    r"0\.0\.out_channels: expected a value that can become 99; the model has 8": [
        put("attributes", "0.0", {"out_channels": 99})],
    r"0\.0: expected an attribute nonsense; Conv2d has none": [put("attributes", "0.0", {"nonsense": 1})],
    r"0\.0\.bias: expected a value that can become zeros; .* has None": [put("attributes", "0.0", {"bias": "zeros"})],
    r"nowhere: the model has no module of that name": [put("biases", "nowhere", 1), put("forms", "nowhere", "a")],
    r"biases 0\.0: expected a size": [put("biases", "0.0", -1), put("biases", "0.0", 10**18)],
    r"0\.0: expected a layer with 2000000000 rows left for its new bias; the model has \d": [
        put("biases", "0.0", 2 * 10**9)],
    r"gone 0\.0: expected one of blank, thin, identity": [put("gone", "0.0", "eval"), put("gone", "0.0", 3)],
    r"expected a module that can become identity": [put("gone", "0.0", "identity"), put("gone", "", "identity")],
    r"expected a module that can become only nowhere": [put("gone", "0", "only nowhere")],
    r"scales 0: expected tensor, dimension": [
        put("scales", [["0.0.weight", 0, 0, -1.0]]), put("scales", [["0.0.weight", 9, 0, 1.0]]), put("scales", [3])],
    r"plan of version": [put("version", 2), put("version", True), put("version", None)],
    r"not a plan: unknown key 'code'": [put("code", "print(1)")],
}  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_impossible_plans_are_refused(text: str, tmp_path: Path) -> None:
    groups = groups_of("chain")
    good = tmp_path / "good.json"
    Plan.build(build(CASES["chain"]), groups, random_keep(groups, 0.5)).save(good)
    model = build(CASES["chain"], seed=3)
    before = snapshot(model)
    for change in HOSTILE[text]:
        data = json.loads(good.read_text())
        change(data)
        (tmp_path / "plan.json").write_text(json.dumps(data))
        with pytest.raises(PlanError, match=text):
            Plan.load(tmp_path / "plan.json").apply_(model)
        assert same_snapshot(before, snapshot(model))


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
def test_json_that_cannot_be_a_plan_is_refused(raw: bytes, text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(raw)
    with pytest.raises(PlanError, match=rf"plan\.json: not a plan \(.*{text}"):
        Plan.load(path)
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(PlanError, match="expected at most 256 MB; got 1099511627776 bytes"):
        Plan.load(path)


def test_advice_for_parametrized_weights_is_not_to_fold_gates() -> None:
    plan = Plan.build(build(CASES["chain"]), groups_of("chain"), random_keep(groups_of("chain"), 0.5))
    model = build(CASES["chain"])
    nn.utils.parametrizations.weight_norm(model.get_submodule(next(iter(plan.slices)).rpartition(".")[0]))
    with pytest.raises(PlanError, match=r"has parametrizations: call .*\.remove_parametrizations first") as error:
        plan.apply_(model)
    assert "fold_" not in str(error.value)
