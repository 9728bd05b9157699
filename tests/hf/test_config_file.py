"""config.json builds a network of transformers and does nothing else, whatever stands in it."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

import compress
from compress.surgery import save_model
from helpers.hugging_face import batches, build, inputs_of, same_outputs, transformers, vit

from compress.hf import config_file  # isort: skip

EVIL = """
from pathlib import Path
Path(__file__).with_name("it_ran").touch()
from transformers import ViTConfig as EvilConfig, ViTForImageClassification as Evil
"""


def cut(model: Any, x: torch.Tensor, folder: Path) -> Any:
    """Cut a model by magnitude and write it as `Pruned.save` does, without the report."""
    groups = compress.find_groups(model, {"pixel_values": x})
    plan = compress.Plan.build(model, groups, {group.name: range(group.width // 2) for group in groups})
    compact = plan.apply_(model)
    save_model(compact, plan, folder)
    config_file.write_config(compact, plan, folder)
    return compact


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for name in ("vit", "detr"):
        cut(build(name), batches(name, 1)[0]["pixel_values"], folder / name)
    return folder


def rewrite(folder: Path, change: Callable[[Any], Any], sign: bool = True) -> None:
    """Change a config.json; `sign` it as somebody does who knows how."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    values = change(values) or values
    if sign and isinstance(values, dict) and isinstance(values.get("compress"), dict):
        del values["compress"]["hash"]
        values["compress"]["hash"] = config_file._hash(values, compress.Plan.load(folder / "plan.json"))
    path.write_text(json.dumps(values))


def put(*path: str, **entries: Any) -> Callable[[Any], None]:
    """Return a change that sets entries of the object at a path."""

    def change(values: Any) -> None:
        for key in path:
            values = values[key]
        values.update(entries)

    return change


REMOTE = {"AutoConfig": "evil.EvilConfig", "AutoModelForImageClassification": "evil.Evil"}
HOSTILE: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "remote code": ("vit", put(auto_map=REMOTE), "auto_map: not read, because it can name code"),
    "remote code of a part": ("detr", put("backbone_config", auto_map=REMOTE), r"backbone_config\.auto_map: not read"),
    "pipelines": ("vit", put(custom_pipelines={"x": {"impl": "evil.Evil"}}), "custom_pipelines: not read"),
    "a kernel": ("vit", put(attn_implementation="evil/kernel"), "attn_implementation: not read"),
    "a kernel, privately": ("vit", put(_attn_implementation="evil/kernel"), "_attn_implementation: not read"),
    "a kernel of a part": ("detr", put("backbone_config", attn_implementation="evil/k"), "attn_implementation: not"),
    "a class in a file": ("vit", put(architectures=["evil.Evil"]), r"evil\.Evil is not in this version"),
    "another object of the library": ("vit", put(architectures=["pipeline"]), "pipeline is not in this version"),
    "a class of another type": ("vit", put(architectures=["BertModel"]), "vit with architecture BertModel is not in"),
    "a type in a file": ("vit", put(model_type="evil"), "model_type: 'evil' is not one of transformers' own"),
    "types that are no names": ("vit", put(model_type=["vit"]), r"model_type: \['vit'\] is not one of"),
    "a part of a type in a file": ("detr", put("backbone_config", model_type="evil"), r"backbone_config\.model_type: "),
    "a backbone of the hub": ("detr", put(backbone="evil/net", backbone_config=None), "backbone: 'evil/net' may be on"),
    "a backbone of timm's hub": (
        "detr",
        put(backbone_config={"model_type": "timm_backbone", "backbone": "hf-hub:evil/net"}),
        r"backbone_config\.backbone: 'hf-hub:evil/net' is not one of timm's own",
    ),
    "arguments for timm": ("vit", put(model_type="timm_wrapper"), "timm_wrapper is not supported"),
    "files to read": ("vit", put(quantization_config={"quant_method": "evil"}), "quantization_config: not read"),
    "values of another type": ("vit", put(hidden_size="evil"), "hidden_size"),
    "values that do not go together": ("vit", put(num_attention_heads=0), r"config\.json: ZeroDivisionError"),
    "another width": ("vit", put(intermediate_size=32), "this plan was made for another model"),
    "a type of numbers": ("vit", put(dtype="evil"), "dtype: expected one of float32, float16, bfloat16; got 'evil'"),
    "no object": ("vit", lambda values: [values], "expected a JSON object; got a list of"),
    "no entry of ours": ("vit", lambda values: {**values, "compress": None}, "expected the entries compress and"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_config_is_refused_and_runs_nothing(
    name: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, change, message = HOSTILE[name]
    folder = tmp_path / "out"
    shutil.copytree(saved / model, folder)
    for file in ("evil.py", "configuration_evil.py", "modeling_evil.py"):
        (folder / file).write_text(EVIL)
    rewrite(folder, change)

    def no_network(*args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.chdir(folder)
    with pytest.raises(compress.PlanError, match=message):
        compress.hf.load(folder)
    assert not (folder / "it_ran").exists()
    assert not {"evil", "configuration_evil", "modeling_evil"} & sys.modules.keys()


@pytest.mark.parametrize("change", [put(layer_norm_eps=1e-3), put(hidden_act="relu"), put("compress", eager=[""])])
def test_changed_config_of_the_same_shapes_is_refused(change: Any, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "vit", tmp_path / "out")
    rewrite(tmp_path / "out", change, sign=False)
    with pytest.raises(compress.PlanError, match=r"damaged, changed, or saved with another plan\.json"):
        compress.hf.load(tmp_path / "out")


def test_config_of_another_run_is_refused(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "vit", tmp_path / "out")
    wider = vit(layer_norm_eps=1e-3)
    config_file.write_config(wider, compress.Plan({}, {}), tmp_path / "other")
    shutil.copy(tmp_path / "other" / "config.json", tmp_path / "out" / "config.json")
    with pytest.raises(compress.PlanError, match=r"saved with another plan\.json"):
        compress.hf.load(tmp_path / "out")


def test_missing_files_say_what_to_do(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"expected a directory written by save\(\); it has no plan\.json"):
        compress.hf.load(tmp_path)
    shutil.copytree(saved / "vit", tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text("{")
    with pytest.raises(compress.PlanError, match=r"config\.json: "):
        compress.hf.load(tmp_path / "out")
    (tmp_path / "out" / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config of a Hugging Face model.*use compress\.load\("):
        compress.hf.load(tmp_path / "out")


@pytest.mark.parametrize("changes", [{"attn_implementation": "eager"}, {"hidden_act": "relu", "qkv_bias": False}])
def test_settings_that_change_no_shape_come_back(changes: dict[str, Any], tmp_path: Path) -> None:
    (batch,) = batches("vit", 1)
    compact = cut(vit(**changes), batch["pixel_values"], tmp_path)
    before = torch.get_rng_state()
    loaded = compress.hf.load(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert same_outputs(loaded, compact, batch)
    assert loaded.config._attn_implementation == changes.get("attn_implementation", "sdpa")


def test_attention_of_a_part_comes_back(tmp_path: Path) -> None:
    """Mask2Former attends in eager mode, because it knows no other, and its Swin does not."""
    blocks = {"depths": [1] * 4, "num_heads": [1] * 4, "out_features": [f"stage{i}" for i in range(1, 5)]}
    swin = transformers.SwinConfig(image_size=32, patch_size=4, embed_dim=8, window_size=2, **blocks)
    sizes = dict.fromkeys(("feature_size", "mask_feature_size", "hidden_dim", "encoder_feedforward_dim"), 32)
    sizes |= {"encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2, "dim_feedforward": 32}
    config = transformers.Mask2FormerConfig(backbone_config=swin, num_queries=4, num_labels=3, **sizes)
    model = transformers.Mask2FormerForUniversalSegmentation(config).eval()
    plan = compress.Plan({}, {})
    save_model(model, plan, tmp_path)
    config_file.write_config(model, plan, tmp_path)
    assert same_outputs(compress.hf.load(tmp_path), model, {"pixel_values": torch.randn(2, 3, 32, 32)})


def test_half_precision_comes_back(tmp_path: Path) -> None:
    compact = cut(build("vit"), batches("vit", 1)[0]["pixel_values"], tmp_path / "float32").to(torch.bfloat16)
    plan = compress.Plan.load(tmp_path / "float32" / "plan.json")
    save_model(compact, plan, tmp_path)
    config_file.write_config(compact, plan, tmp_path)
    loaded = compress.hf.load(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in compact.state_dict().items())


def test_files_of_the_image_processor_stay_with_the_model(tmp_path: Path) -> None:
    """The model comes from a directory of Hugging Face, is pruned, saved, loaded, and saved elsewhere."""
    model = build("vit")
    model.save_pretrained(tmp_path / "dense")
    transformers.ViTImageProcessorFast(size={"height": 8, "width": 8}).save_pretrained(tmp_path / "dense")
    processor = (tmp_path / "dense" / "preprocessor_config.json").read_bytes()
    dense = transformers.ViTForImageClassification.from_pretrained(tmp_path / "dense")
    (batch,) = batches("vit", 1)
    pruned = compress.prune(dense, {"budget": {"macs": "60%"}}, example_inputs=inputs_of(batch), quiet=True)
    pruned.save(tmp_path / "out")
    pruned.save(tmp_path / "out")  # in its own place
    loaded = compress.hf.load(tmp_path / "out")
    config_file.write_config(loaded, pruned.plan, tmp_path / "again")
    for folder in ("out", "again"):
        assert (tmp_path / folder / "preprocessor_config.json").read_bytes() == processor
    assert same_outputs(loaded, pruned.model, batch)


def test_files_of_the_current_directory_are_not_those_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    config_file.write_config(build("vit"), compress.Plan({}, {}), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]


def test_class_of_ones_own_is_not_written(tmp_path: Path) -> None:
    class Own(transformers.ViTForImageClassification):
        """A class that is not of transformers."""

    config_file.write_config(Own(vit().config), compress.Plan({}, {}), tmp_path)
    assert not (tmp_path / "config.json").exists()
