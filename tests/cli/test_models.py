"""Models of the command line: their weights from files, and the shape of an example."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn

from compress.cli import app as cli
from compress.cli import models, options
from compress.cli.quickstart import Network
from helpers.commands import run

NETWORK = "compress.cli.quickstart:Network"
MODEL = ["--model", NETWORK, "--recipe", "magnitude_half", "--input", "1,8,8"]


def same(model: nn.Module, other: nn.Module) -> bool:
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("command", ["preview", "prune"])
def test_model_without_weights_is_noted_and_json_stays_clean(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [command, *MODEL, "--json"] + ["--quiet"] * (command == "prune")
    where = ["--workdir", str(tmp_path / "out")] if command == "prune" else []
    code, out, err = run(monkeypatch, capsys, *words, *where)
    assert code == 0, err
    assert json.loads(out)["dense"]["macs"]
    assert f"no --weights: {NETWORK} has the weights of its factory; if they are random, give --weights FILE" in err
    save_file(Network().state_dict(), tmp_path / "dense.safetensors")
    words += ["--weights", str(tmp_path / "dense.safetensors")]
    where = ["--workdir", str(tmp_path / "again")] if command == "prune" else []
    code, _, err = run(monkeypatch, capsys, *words, *where)
    assert code == 0, err
    assert "no --weights" not in err


def test_named_models_without_weights_are_noted_as_random() -> None:
    for spec in ("torchvision:resnet18", "timm:resnet18"):
        assert models.weights_notice(spec) == f"no --weights: {spec} has random weights; give --weights FILE"


def test_the_line_about_weights_is_json_where_progress_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMPRESS_PROGRESS", "json")
    monkeypatch.setattr(sys, "argv", ["compress", "preview", *MODEL])
    with pytest.raises(SystemExit):
        cli.main()
    assert "no --weights" in json.loads(capsys.readouterr().err.splitlines()[0])["say"]


def test_three_numbers_are_one_image_and_timm_models_have_a_size_of_their_own() -> None:
    assert options.example_input(Network(), "1,8,8").shape == (1, 1, 8, 8)
    assert options.example_input(Network(), "2x1x8x8").shape == (2, 1, 8, 8)
    assert options.example_input(Network(), None).shape == (1, 3, 224, 224)
    assert options.example_input(models.build_model("timm:test_vit"), None).shape == (1, 3, 160, 160)
    told = Network()
    told.default_cfg = {"input_size": "large"}  # whatever else goes by that name
    assert models.image_size(told) == models.IMAGENET_SIZE


def test_help_shows_the_defaults(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    _, out, _ = run(monkeypatch, capsys, "prune", "--help")
    assert "[default: (1,3,224,224, or the input size of a timm model)]" in out
    assert "[default: (a GPU if there is one)]" in out


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile, lambda m: nn.DataParallel(torch.compile(m))])
def test_names_that_a_wrapper_gave_are_taken_for_the_model_s(wrap: Any, tmp_path: Path) -> None:
    dense = Network()
    torch.save({"state_dict": wrap(dense).state_dict(), "epoch": 3}, tmp_path / "wrapped.pt")
    assert same(models.build_model(NETWORK, tmp_path / "wrapped.pt"), dense)


def wrapped() -> nn.Module:
    return nn.DataParallel(Network())


def test_names_that_lack_the_wrapper_of_the_model_get_it(tmp_path: Path) -> None:
    dense = Network()
    torch.save(dense.state_dict(), tmp_path / "plain.pt")
    assert same(models.build_model("test_models:wrapped", tmp_path / "plain.pt"), dense)


def test_weights_of_another_network_are_refused_in_a_few_lines(tmp_path: Path) -> None:
    torch.save(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4)).state_dict(), tmp_path / "other.pt")
    match = (
        r"(?s)other\.pt: expected the \d+ tensors of the model; some of the 6 in the file do not fit\n"
        r"  missing from the file: stem\.0\.weight, .* and \d+ more\n"
        r"  not in the model: 0\.weight, 0\.bias, 1\.weight and 3 more\n"
        r"  Give the weights of this model, or the --model that they were saved from$"
    )
    with pytest.raises(ValueError, match=match):
        models.build_model(NETWORK, tmp_path / "other.pt")
    state = Network().state_dict()
    name = next(iter(state))
    save_file({**state, name: state[name][:1].clone()}, tmp_path / "narrow.safetensors")
    with pytest.raises(
        ValueError, match=r"\n  of another shape: stem\.0\.weight \(\[1, .*\] in the file, \[.*\] in the"
    ):
        models.build_model(NETWORK, tmp_path / "narrow.safetensors")


def test_weights_with_other_classes_say_that_a_factory_makes_the_network(tmp_path: Path) -> None:
    torch.save(torchvision.models.resnet18(num_classes=10).state_dict(), tmp_path / "ten.pt")
    match = (
        r"(?s)fc\.weight \(\[10, 512\] in the file.*For another number of classes .*: --model package\.module:factory$"
    )
    with pytest.raises(ValueError, match=match):
        models.build_model("torchvision:resnet18", tmp_path / "ten.pt")


def test_state_dicts_from_before_batch_norms_counted_still_load(tmp_path: Path) -> None:
    dense = Network()
    old = {name: t for name, t in dense.state_dict().items() if "num_batches_tracked" not in name}
    torch.save(old, tmp_path / "old.pt")
    assert same(models.build_model(NETWORK, tmp_path / "old.pt"), dense)


def test_file_that_holds_more_than_a_state_dict_is_named_and_not_run(tmp_path: Path) -> None:
    torch.save(Network(), tmp_path / "whole.pt")
    match = r"whole\.pt: holds a whole module, .*; expected a state dict\. Save it with torch\.save\(model"
    with pytest.raises(ValueError, match=match):
        models.build_model(NETWORK, tmp_path / "whole.pt")
    torch.save({"args": Namespace(lr=1), "model": Network().state_dict()}, tmp_path / "args.pt")
    with pytest.raises(ValueError, match=r"args\.pt: holds more than tensors \(argparse\.Namespace\), which cannot be"):
        models.build_model(NETWORK, tmp_path / "args.pt")
    torch.save([torch.zeros(3)], tmp_path / "list.pt")
    with pytest.raises(ValueError, match=r"list\.pt: expected tensors by name; got list\. Save it"):
        models.build_model(NETWORK, tmp_path / "list.pt")
    (tmp_path / "broken.pt").write_bytes(b"no weights")
    with pytest.raises(ValueError, match=r"not a state dict that can be read without running code \([^\x1b]*\)$"):
        models.build_model(NETWORK, tmp_path / "broken.pt")
