"""Tests that need a GPU. `make test-gpu` runs this file; without a GPU its tests are skipped.

Everything else about devices is checked without one, on the `meta` device (contracts/test_meta_device.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import compress
from compress.recipe.search_config import search_names
from compress.search.base import search_class
from helpers.digits import FINETUNE, RECIPE, dense, loaders
from helpers.interruption import Interrupted, InterruptedLoader, save_at_every_step
from helpers.weights import same_weights

TESTS = Path(__file__).parent
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use"),
]
SHORT: dict[str, Any] = {
    **RECIPE,
    "search": {**RECIPE["search"], "epochs": "6 steps"},
    "finetune": {**FINETUNE, "epochs": "8 steps"},
}


def prune(recipe: dict[str, Any], **settings: Any) -> compress.Pruned:
    train, val = loaders(batch=64, count=256)
    return compress.prune(dense(), recipe, **{"train": train, "val": val, "quiet": True, **settings})


@pytest.mark.filterwarnings("ignore:every score of")  # so short a search may drive them all to zero
@pytest.mark.parametrize("method", search_names())
def test_every_search_prunes_on_the_gpu(method: str) -> None:
    search: dict[str, Any] = {"method": method}
    if "epochs" in search_class(method).Config.model_fields:
        search["epochs"] = "6 steps"
    pruned = prune({**SHORT, "search": search})
    assert all(p.is_cuda for p in pruned.model.parameters())
    assert pruned.report.pruned.macs <= 0.5 * pruned.report.dense.macs
    assert pruned.report.pruned.metrics["accuracy"] > 0.3


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_learns_as_single_precision_does(precision: str) -> None:
    if precision == "bf16" and not torch.cuda.is_bf16_supported():
        pytest.skip("this GPU has no bfloat16")
    settings = {**SHORT, "finetune": {**FINETUNE, "epochs": "40 steps"}}
    accuracies = [
        prune({**settings, "engine": {"precision": p, "channels_last": True}}).report.pruned.metrics["accuracy"]
        for p in ("float32", precision)
    ]
    assert abs(accuracies[0] - accuracies[1]) < 0.1


def test_the_gpu_chooses_and_trains_as_the_cpu_does() -> None:
    """Without augmentation the steps differ in rounding only."""
    recipe = {**SHORT, "search": {"method": "magnitude"}}
    gpu, cpu = prune(recipe), prune(recipe, device="cpu")
    assert gpu.plan.keep == cpu.plan.keep
    x = next(iter(loaders()[1]))[0]
    assert torch.allclose(gpu.model.cpu()(x), cpu.model(x), atol=1e-2)


def test_the_gpu_repairs_as_the_cpu_does() -> None:
    """The samples differ in rounding, the systems are solved in double precision."""
    recipe = {"budget": RECIPE["budget"], "search": "magnitude", "compensate": "least_squares"}
    gpu, cpu = prune(recipe), prune(recipe, device="cpu")
    assert all(p.is_cuda for p in gpu.model.parameters())
    assert gpu.report.repair["error_after"] < gpu.report.repair["error_before"]
    x = next(iter(loaders()[1]))[0]
    assert torch.allclose(gpu.model.cpu()(x), cpu.model(x), atol=1e-1)


def test_no_step_waits_for_the_gpu() -> None:
    """Torch raises at every synchronising call; the loop looks at the loss every tenth step, outside of the steps."""
    from compress.progress import ProgressDisplay
    from compress.recipe import Finetune
    from compress.surgery import Plan
    from compress.training import Classification, Engine, FineTuneJob, FineTuner

    engine = Engine(torch.device("cuda"), 0, ProgressDisplay(True))
    config = Finetune(epochs="8 steps", distill={}, ema=0.9, clip=1.0)
    job = FineTuneJob(dense().cuda().train(), dense().cuda(), Plan({}, {}), config, engine, 8)
    tuner, batch = FineTuner(job, Classification()), engine.move(next(iter(loaders()[0])))
    tuner.step(batch)  # the first one allocates
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            tuner.step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_stopped_run_resumes_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With deterministic algorithms."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    save_at_every_step(monkeypatch)
    monkeypatch.setattr("compress.training.engine.LOOK_EVERY", 1)
    torch.use_deterministic_algorithms(True)
    try:
        whole = prune(SHORT)
        for after in (3, 9):
            train, _ = loaders(batch=64, count=256)
            with pytest.raises(Interrupted):
                prune(SHORT, train=InterruptedLoader(train, after), workdir=tmp_path / str(after))
            again = prune(SHORT, workdir=tmp_path / str(after), resume=True)
            assert same_weights(again.model, whole.model), after
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_network_pruned_on_the_gpu_is_exported(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    pruned = prune({**SHORT, "export": {"format": "onnx"}}, workdir=tmp_path / "out")
    assert pruned.report.export and (tmp_path / "out" / "model.onnx").exists()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_find_what_one_finds_with_batches_twice_as_large(tmp_path: Path) -> None:
    """With NCCL: the same plan, and weights that agree to the rounding of single precision."""
    program = (
        "import json, sys, torch, compress\n"
        "from helpers.two_processes import _loader, _network\n"
        "recipe = {'budget': {'macs': '60%'}, 'search': {'method': 'netslim', 'epochs': 2, 'lr': 0.01},\n"
        "          'finetune': {'epochs': 2, 'lr': 0.01, 'distill': {}}, 'timing': {'repeats': 3}}\n"
        "pruned = compress.prune(_network(), recipe, train=_loader(int(sys.argv[1])), quiet=True)\n"
        "weights = [p.detach().cpu().flatten().tolist() for p in pruned.model.parameters()]\n"
        "from compress.distributed import rank\n"
        "if rank() == 0: open(sys.argv[2], 'w').write(json.dumps(weights))\n"
    )
    script = tmp_path / "program.py"
    script.write_text(program)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    found = []
    for processes, batch in ((1, 32), (2, 16)):
        path = tmp_path / f"{processes}.json"
        launch = ["torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", "0"]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(processes)))
        command = [sys.executable, "-m", *launch, str(script), str(batch), str(path)]
        subprocess.run(command, check=True, env=environment)
        found.append(json.loads(path.read_text()))
    for one, two in zip(*found, strict=True):
        assert two == pytest.approx(one, rel=1e-6, abs=1e-8)


def test_landscape_on_the_gpu_is_that_of_the_cpu() -> None:
    pruned = prune({**SHORT, "search": {"method": "magnitude"}})
    val = loaders(batch=64, count=256)[1]
    settings: dict[str, Any] = {"other": pruned, "resolution": 3, "variance_resolution": 3, "batches": 2, "quiet": True}
    on_gpu, on_cpu = (compress.landscape(dense(), val, device=device, **settings) for device in ("cuda", "cpu"))
    for one, other in zip(on_gpu.surfaces, on_cpu.surfaces, strict=True):
        assert one.loss.ravel().tolist() == pytest.approx(other.loss.ravel().tolist(), rel=1e-3)
        assert one.variance is not None and other.variance is not None
        assert one.variance.ravel().tolist() == pytest.approx(other.variance.ravel().tolist(), rel=1e-2)
