"""Configs of mmdet: options, checkpoints that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mmengine.config import Config

import compress
import compress.mmdet
from compress.mmdet.config import parse_cfg_options
from helpers.detectors import small_config


def test_cfg_options_are_read_as_mmdets_tools_read_them() -> None:
    found = parse_cfg_options(["a.b=[1,2]", "c=(3,x)", "d=None", "e=0.5", "f=name"])
    assert found == {"a.b": [1, 2], "c": (3, "x"), "d": None, "e": 0.5, "f": "name"}
    with pytest.raises(ValueError, match=r"--cfg-options lr: expected KEY=VALUE"):
        parse_cfg_options(["lr"])


def test_a_checkpoint_that_does_not_fit_names_the_keys(pictures: Path, tmp_path: Path) -> None:
    cfg = small_config(pictures)
    state = compress.mmdet.build(cfg).state_dict()
    state["extra.weight"] = state.pop("backbone.patch_embed.projection.bias")
    state["neck.lateral_convs.0.conv.weight"] = torch.zeros(3, 3)
    torch.save(state, tmp_path / "other.pth")
    with pytest.raises(ValueError, match="does not fit the config's detector") as caught:
        compress.mmdet.build(cfg, tmp_path / "other.pth")
    text = str(caught.value)
    assert "backbone.patch_embed.projection.bias: missing from the checkpoint" in text
    assert "extra.weight: not in the detector" in text
    assert "neck.lateral_convs.0.conv.weight: the checkpoint has shape [3, 3], the detector [32, 24, 1, 1]" in text
    (tmp_path / "text.pth").write_text("no checkpoint")
    with pytest.raises(ValueError, match=r"text.pth: not a state dict that can be read without running code"):
        compress.mmdet.build(cfg, tmp_path / "text.pth")
    with pytest.raises(ValueError, match=r"expected the config of a detector, with model.backbone; it has no model"):
        compress.mmdet.build(Config({"train_cfg": {}}))
