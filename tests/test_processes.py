"""Several processes that prune one model, on gloo: what they share, and that they end with one plan and one network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import torch

from compress import processes

HEAD = """
    import sys, json, hashlib, torch
    from pathlib import Path
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])

    def tell(rank, **facts):
        (folder / f"rank{rank}.json").write_text(json.dumps(facts))

    def digest(model):
        total = hashlib.sha256()
        for name, tensor in model.state_dict().items():
            total.update(name.encode() + tensor.numpy().tobytes())
        return total.hexdigest()
"""


def _ranks(code: str, folder: Path) -> list[dict[str, object]]:
    """Run a script in two processes; what each of them told."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(HEAD) + textwrap.dedent(code))
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"]
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent)])
    done = subprocess.run(
        [*launch, "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", str(script), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_alone_nothing_is_shared() -> None:
    tensors = [torch.ones(2), torch.zeros(3)]
    assert all(a is b for a, b in zip(processes.mean(tensors), tensors, strict=True))
    assert processes.rank() == 0
    assert processes.agreed("mine") == "mine"
    assert processes.everywhere([True, False], torch.device("cpu")) == [True, False]


def test_means_flags_and_values_are_those_of_all(tmp_path: Path) -> None:
    code = """
    from torch import distributed as dist, nn
    from compress.processes import agree_, agreed, everywhere, mean, mean_gradients_, rank
    dist.init_process_group("gloo")
    me = rank()
    double = torch.tensor([1.0, 3.0], dtype=torch.float64) * me
    means = mean([torch.full((2, 2), float(me)), double, torch.ones(1).expand(3)])
    flags = everywhere([True, me == 0, False], torch.device("cpu"))
    layer = nn.Linear(2, 1)
    agree_(layer)
    norms = agreed([float(p.detach().norm()) for p in layer.parameters()])
    same = norms == [float(p.detach().norm()) for p in layer.parameters()]
    a, b, c = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    (a * (me + 1) + (b if me else 0)).sum().backward()
    mean_gradients_([a, b, c])
    tell(me, means=[m.flatten().tolist() for m in means], flags=flags, same=same,
         grads=[a.grad.tolist(), b.grad.tolist(), c.grad])
    """
    expected = {
        "means": [[0.5] * 4, [0.5, 1.5], [1.0] * 3],
        "flags": [True, False, False],
        "same": True,
        "grads": [[1.5, 1.5], [0.5, 0.5], None],
    }
    assert _ranks(code, tmp_path) == [expected, expected]


def test_two_processes_find_what_one_finds_on_both_their_batches(tmp_path: Path) -> None:
    code = """
    import compress
    from torch import distributed as dist, nn
    from compress.processes import rank
    dist.init_process_group("gloo")

    def network():
        torch.manual_seed(0)
        convolutions = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()
        return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(128, 4))

    me, random = rank(), torch.Generator().manual_seed(1)
    both = [(torch.randn(8, 3, 8, 8, generator=random), torch.randint(0, 4, (8,), generator=random)) for _ in range(4)]
    mine = [(x[me * 4 :][:4], y[me * 4 :][:4]) for x, y in both]
    train = dict(epochs="2 steps", lr=0.01)
    searches = [dict(method="netslim", **train), dict(method="rarts", **train), dict(method="taylor", epochs="2 steps")]
    recipes = [dict(budget=dict(dims="50%"), search=search, timing=dict(repeats=3)) for search in searches]
    recipes[0]["finetune"] = dict(**train, distill={})
    together = [compress.prune(network(), recipes[0], train=mine, val=mine, workdir=folder / "out", quiet=True)]
    together += [compress.prune(network(), recipe, train=mine, quiet=True) for recipe in recipes]
    dist.destroy_process_group()
    alone = [compress.prune(network(), recipe, train=both, quiet=True) for recipe in recipes]
    pairs = [(a.model.state_dict(), b.model.state_dict()) for a, b in zip(together[1:], alone)]
    tell(
        me,
        keep=[done.plan.keep for done in together],
        models=[digest(done.model) for done in together],
        files=sorted(path.name for path in (folder / "out").iterdir()),
        same=[a.plan.keep == b.plan.keep for a, b in zip(together[1:], alone)],
        close=[all(torch.allclose(a[name], b[name], atol=1e-5) for name in a) for a, b in pairs],
    )
    """
    first, second = _ranks(code, tmp_path)
    assert first == second
    assert first["files"] == ["model.safetensors", "plan.json", "report.html", "report.json", "run.json"]
    assert first["same"] == [True] * 3
    assert first["close"] == [True] * 3


def test_two_processes_prune_a_detector(tmp_path: Path) -> None:
    code = """
    import os, compress, compress.mmdet
    from compress.mmdet.launch import launched
    from detectors import make_pictures, small_config
    cfg = small_config(folder / "pictures")
    torch.manual_seed(int(os.environ["RANK"]))  # fresh weights that differ: the first process's count
    model, task = launched(cfg, None, [], 0, quiet=True)
    search = dict(method="rarts", epochs="2 steps", optimizer="adamw", lr=1e-3, distill={})
    recipe = dict(
        target=dict(channels=False, attention=True, mlp=True), budget=dict(dims="50%"), search=search,
        finetune=dict(epochs=1, distill={}), timing=dict(repeats=3),
    )
    seen = [sample.metainfo["img_id"] for batch in task.train for sample in batch["data_samples"]]
    done = compress.prune(model, recipe, task=task, workdir=folder / "out", quiet=True)
    tell(int(os.environ["RANK"]), seen=seen, keep=done.plan.keep, model=digest(done.model),
         metrics=done.report.pruned.metrics, steps=[h["step"] for h in done.report.history if "loss_distil" in h])
    """
    from detectors import make_pictures

    make_pictures(tmp_path / "pictures", count=8)
    first, second = _ranks(code, tmp_path)
    images = [first.pop("seen"), second.pop("seen")]
    assert sorted(images[0] + images[1]) == list(range(8))  # type: ignore[operator]
    assert first == second
    assert first["steps"] == [1]  # four images each, in one batch
