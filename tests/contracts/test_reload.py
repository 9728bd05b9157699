"""save writes a directory completely or not at all; load needs only the dense model and the directory."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import compress
from cases import CASES, Case, build, example, run, same_bits
from cases.networks_plain import cbr, head
from compress import PlanError, Pruned
from compress.storage import directories

RECIPE = {"budget": {"dims": "70%"}, "target": {"residual": True, "min_keep": 1}}
FILES = {"plan.json", "model.safetensors", "report.json"}


def pruned(name: str = "chain", **more: Any) -> Pruned:
    case = CASES[name]
    return compress.prune(build(case), RECIPE | more, example_inputs=example(case))


@pytest.mark.parametrize("case", [c for c in CASES.values() if c.groups], ids=str)
def test_loaded_network_is_the_saved_one(case: Case, tmp_path: Path) -> None:
    saved = compress.prune(build(case), RECIPE, example_inputs=example(case))
    saved.save(tmp_path / "out")
    torch.manual_seed(77)
    fresh = case.make().double()
    loaded = compress.load(fresh, tmp_path / "out")
    assert loaded is fresh
    x = example(case)
    assert same_bits(run(loaded.eval(), x), run(saved.model.eval(), x))
    assert list(loaded.state_dict()) == list(saved.model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(loaded.buffers(), saved.model.buffers(), strict=True))


def test_directory_holds_plan_weights_and_report(tmp_path: Path) -> None:
    saved = pruned()
    saved.save(tmp_path / "deep" / "out")
    assert {p.name for p in (tmp_path / "deep" / "out").iterdir()} >= FILES
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["out"]
    report = json.loads((tmp_path / "deep" / "out" / "report.json").read_text())
    assert report["dense"]["params"] > report["pruned"]["params"]
    assert report["pruned"]["params"] == sum(p.numel() for p in saved.model.parameters())


def test_saving_again_replaces(tmp_path: Path) -> None:
    pruned().save(tmp_path / "out")
    second = compress.prune(build(CASES["chain"], seed=4), RECIPE, example_inputs=example(CASES["chain"]))
    second.save(tmp_path / "out")
    loaded = compress.load(build(CASES["chain"]), tmp_path / "out")
    x = example(CASES["chain"])
    assert same_bits(run(loaded, x), run(second.model, x))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_failing_write_leaves_the_old_directory(tmp_path: Path) -> None:
    first = pruned()
    first.save(tmp_path / "out")
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    broken = pruned()
    broken.report.notes.append(object())  # type: ignore[arg-type]  # cannot be written as JSON
    with pytest.raises(TypeError, match="JSON serializable"):
        broken.save(tmp_path / "out")
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_failing_first_write_leaves_nothing(tmp_path: Path) -> None:
    broken = pruned()
    broken.report.notes.append(object())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="JSON serializable"):
        broken.save(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_directory_of_something_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match="it holds other files"):
        pruned().save(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_files_of_others_beside_a_plan_are_not_deleted(tmp_path: Path) -> None:
    pruned().save(tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with contextlib.suppress(FileExistsError):
        pruned().save(tmp_path / "out")
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def test_file_in_place_of_a_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises((FileExistsError, NotADirectoryError), match="out"):
        pruned().save(tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_empty_directory_is_filled(tmp_path: Path) -> None:
    pruned().save(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} >= FILES


def test_loading_does_not_unpickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pruned().save(tmp_path / "out")

    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("unpickling runs code")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, forbidden)
    monkeypatch.setattr(torch, "load", forbidden)
    loaded = compress.load(build(CASES["chain"]), tmp_path / "out")
    assert loaded.state_dict().keys() == pruned().model.state_dict().keys()


def test_pickle_in_place_of_weights_is_an_error(tmp_path: Path) -> None:
    saved = pruned()
    saved.save(tmp_path / "out")
    torch.save(saved.model.state_dict(), tmp_path / "out" / "model.safetensors")
    model = build(CASES["chain"])
    before = [p.shape for p in model.parameters()]
    with pytest.raises(Exception, match=r"(?i)header|safetensors"):
        compress.load(model, tmp_path / "out")
    assert [p.shape for p in model.parameters()] == before


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"expected a directory written by save\(\); it has no plan\.json"):
        compress.load(build(CASES["chain"]), tmp_path / "nowhere")
    pruned().save(tmp_path / "out")
    (tmp_path / "out" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"it has no model\.safetensors"):
        compress.load(build(CASES["chain"]), tmp_path / "out")


def unchanged_after_failing(model: nn.Module, folder: Path, match: str) -> None:
    before = {name: (id(t), t.clone()) for name, t in model.state_dict(keep_vars=True).items()}
    with pytest.raises(PlanError, match=match):
        compress.load(model, folder)
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before)
    for name, (number, value) in before.items():
        assert id(after[name]) == number and torch.equal(after[name], value), name


def test_wider_model_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    pruned().save(tmp_path / "out")
    wider = nn.Sequential(cbr(3, 9), cbr(9, 6), nn.MaxPool2d(2), cbr(6, 7), head(7)).double()
    unchanged_after_failing(wider, tmp_path / "out", r"0\.0\.weight: expected shape \[8, 3, 3, 3\]")


def test_model_with_more_layers_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    """All that the plan cuts is there; what does not fit is something else."""
    pruned().save(tmp_path / "out")
    more = build(CASES["chain"])
    more.append(nn.Linear(5, 2).double())
    unchanged_after_failing(more, tmp_path / "out", r"5\.weight|5\.bias")


def test_model_with_fewer_layers_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    model = build(CASES["chain"])
    model.append(nn.Linear(5, 2).double())
    compress.prune(model, RECIPE, example_inputs=example(CASES["chain"])).save(tmp_path / "out")
    unchanged_after_failing(build(CASES["chain"]), tmp_path / "out", r"5\.weight|5\.bias")


@pytest.mark.parametrize("classes", [1, 7])
def test_model_with_another_head_is_refused_and_left_unchanged(classes: int, tmp_path: Path) -> None:
    """The head is not cut, and a single number would fill any vector."""

    def make(out: int) -> nn.Sequential:
        return nn.Sequential(cbr(3, 6), cbr(6, 5), nn.Flatten(), nn.Linear(320, 4), nn.Linear(4, out)).double().eval()

    recipe = RECIPE | {"target": {"exclude": ["3"]}, "budget": {"dims": "80%"}}
    compress.prune(make(classes), recipe, example_inputs=torch.randn(1, 3, 8, 8).double()).save(tmp_path / "out")
    unchanged_after_failing(make(3), tmp_path / "out", r"4\.weight")


def test_tied_weights_are_saved_once_and_loaded_tied(tmp_path: Path) -> None:
    case = CASES["tied_weights"]
    saved = compress.prune(build(case), RECIPE, example_inputs=example(case))
    saved.save(tmp_path / "out")
    loaded = compress.load(build(case, seed=3), tmp_path / "out")
    assert loaded.one[0].weight is loaded.two.weight
    assert same_bits(run(loaded, example(case)), run(saved.model, example(case)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precision_is_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    case = CASES["chain"]
    saved = compress.prune(build(case, dtype=dtype), RECIPE, example_inputs=example(case, dtype=dtype))
    saved.save(tmp_path / "out")
    loaded = compress.load(build(case, seed=3, dtype=dtype), tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), saved.model.parameters(), strict=True))


def test_memory_format_is_that_of_the_dense_model(tmp_path: Path) -> None:
    case = CASES["chain"]
    model = build(case).to(memory_format=torch.channels_last)
    saved = compress.prune(model, RECIPE, example_inputs=example(case))
    saved.save(tmp_path / "out")
    loaded = compress.load(build(case), tmp_path / "out")
    assert loaded[1][0].weight.is_contiguous()
    assert torch.equal(loaded[1][0].weight, saved.model[1][0].weight)


def test_frozen_parameters_and_mode_are_those_of_the_dense_model(tmp_path: Path) -> None:
    pruned("frozen_stem").save(tmp_path / "out")
    loaded = compress.load(build(CASES["frozen_stem"]).train(), tmp_path / "out")
    assert loaded.training
    assert [p.requires_grad for p in loaded[0].parameters()] == [False] * 3


def test_fine_tuned_network_can_be_saved(tmp_path: Path) -> None:
    saved, x = pruned(), example(CASES["chain"])
    optimizer = torch.optim.SGD(saved.model.parameters(), 0.1)
    saved.model.train()(x).square().sum().backward()
    optimizer.step()
    saved.save(tmp_path / "out")
    loaded = compress.load(build(CASES["chain"]), tmp_path / "out")
    assert same_bits(run(loaded.eval(), x), run(saved.model.eval(), x))


def test_weights_of_another_precision_are_refused(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    compress.prune(net, {"budget": {"dims": 0.5}}, example_inputs=torch.randn(1, 4), quiet=True).save(tmp_path / "out")
    with pytest.raises(
        PlanError, match=r"0\.weight: the file has torch.float32, the model torch.float64; convert the model"
    ):
        compress.load(copy.deepcopy(net).double(), tmp_path / "out")


def test_plan_that_keeps_what_is_not_there_is_refused(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    compress.prune(net, {"budget": {"dims": 0.5}}, example_inputs=torch.randn(1, 4), quiet=True).save(tmp_path / "out")
    path = tmp_path / "out" / "plan.json"
    data = json.loads(path.read_text())
    data["keep"]["0"] = [1000000]
    path.write_text(json.dumps(data))
    with pytest.raises(
        PlanError, match=r"group 0: expected kept dimensions in 0\.\.7, sorted, without duplicates; got"
    ):
        compress.load(net, tmp_path / "out")


def test_wrapped_models_are_loaded_where_that_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["chain"]
    saved = compress.prune(build(case), RECIPE, example_inputs=example(case))
    saved.save(tmp_path / "out")
    wrapped = nn.DataParallel(build(case))
    assert compress.load(wrapped, tmp_path / "out") is wrapped
    assert torch.equal(wrapped.module(example(case)), saved.model(example(case)))
    bare = object.__new__(nn.parallel.DistributedDataParallel)  # which is not made without other processes
    nn.Module.__init__(bare)
    bare.module = build(case)
    with pytest.raises(compress.NotReady, match="DistributedDataParallel keeps references to the dense"):
        compress.load(bare, tmp_path / "out")


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_killed_save_leaves_a_network_that_loads(tmp_path: Path) -> None:
    """The save is killed at the step before and the step after the two directories are exchanged."""
    first, second, target = pruned(), pruned(budget={"dims": "50%"}), tmp_path / "out"
    digests = {first.plan.digest(), second.plan.digest()}
    for owner, name in ((directories, "_publish"), (directories.shutil, "rmtree")):
        first.save(target)
        child = os.fork()
        if child == 0:
            setattr(owner, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
            second.save(target)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        compress.load(build(CASES["chain"], seed=3), target)
        assert compress.Plan.load(target / "plan.json").digest() in digests
    second.save(target)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_directory_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, target = pruned(), pruned(budget={"dims": "50%"}), tmp_path / "out"
    first.save(target)
    read_plan = compress.Plan.load

    def replaced_after(path: Path) -> compress.Plan:
        plan = read_plan(path)
        monkeypatch.setattr(compress.Plan, "load", read_plan)
        second.save(target)
        return plan

    monkeypatch.setattr(compress.Plan, "load", replaced_after)
    loaded = compress.load(build(CASES["chain"], seed=3), target)
    assert all(torch.equal(t, second.model.state_dict()[name]) for name, t in loaded.state_dict().items())
