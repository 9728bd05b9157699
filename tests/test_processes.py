"""Several processes that prune one model, on gloo: what they share, and that they end with one plan and one network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
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


def test_means_flags_and_values_are_those_of_all(tmp_path: Path) -> None:
    code = """
    from torch import nn
    from compress.compute import Compute
    from compress.processes import agree_, agreed, everyone, first, join, mean, mean_, rank, total, world
    device = join(cpu=True)
    me = rank()
    double = torch.tensor([1.0, 3.0], dtype=torch.float64) * me
    means = mean([torch.full((2, 2), float(me)), double, torch.ones(1).expand(3)])
    mean_([double])
    unused = [torch.nn.Parameter(torch.ones(1)) for _ in range(3)]
    terms = lambda piece: {"task": unused[0].sum() + (unused[1].sum() * me if me else 0)}
    found = Compute().gradients(terms, torch.ones(1), unused)
    flags = [found.idle, [float(g) for g in found.gradients]]
    layer = nn.Linear(2, 1)
    agree_(layer)
    norms = agreed([float(p.detach().norm()) for p in layer.parameters()])
    same = norms == [float(p.detach().norm()) for p in layer.parameters()]
    sums = total(torch.full((2,), 1.0, dtype=torch.float64) if me else None, 2)
    failed = ""
    try:
        first(lambda: (_ for _ in ()).throw(ValueError("the first one could not")))
    except ValueError as error:
        failed = str(error)
    tell(me, means=[m.flatten().tolist() for m in means], flags=flags, same=same, world=world(), device=str(device),
         double=double.tolist(), every=everyone(me), first=first(lambda: rank()), failed=failed, sums=sums.tolist())
    """
    expected = {
        "means": [[0.5] * 4, [0.5, 1.5], [1.0] * 3],
        "flags": [[False, False, True], [1.0, 0.5, 0.0]],
        "same": True,
        "world": 2,
        "device": "cpu",
        "double": [0.5, 1.5],
        "every": [0, 1],
        "first": 0,
        "failed": "the first one could not",
        "sums": [1.0, 1.0],
    }
    assert _ranks(code, tmp_path) == [expected, expected]


SETTING = """
    import compress
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    def network():
        torch.manual_seed(0)
        convolutions = nn.Conv2d(3, 8, 3), nn.GELU(), nn.Conv2d(8, 8, 3), nn.GELU()
        return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(128, 4)).double()

    def loader(batch):
        random = torch.Generator().manual_seed(1)
        x = torch.randn(128, 3, 8, 8, generator=random, dtype=torch.float64)
        return DataLoader(TensorDataset(x, torch.randint(0, 4, (128,), generator=random)), batch, shuffle=True)

    def searched(search, batch, workdir=None, **more):
        recipe = dict(budget=dict(dims="50%"), search=search, timing=dict(repeats=3), **more)
        return compress.prune(network(), recipe, train=loader(batch), val=loader(batch), workdir=workdir, quiet=True)

    TRAIN = dict(epochs=2, lr=0.01, clip=1.0)
    SEARCHES = [
        dict(method="netslim", **TRAIN, distill={}),
        dict(method="rarts", **TRAIN),
        dict(method="rarts", update="fused", **TRAIN),
        dict(method="darts1", **TRAIN),
        dict(method="darts2", **TRAIN),
        dict(method="milenas", **TRAIN),
        dict(method="bayesnas", **TRAIN, samples=100000),
        dict(method="bayesnas", gamma=1e-3, **TRAIN, samples=100000),
        dict(method="bayes_compress", structure=["filter"], gamma=1e-6, **TRAIN, samples=100000),
        dict(method="taylor", epochs=1),
    ]
    TUNE = dict(finetune=dict(**TRAIN, distill={}))

    def numbers(pruned):
        return [t.flatten().tolist() for t in pruned.model.state_dict().values()]

    def told(pruned):
        losses = [h["loss"] for h in pruned.report.history if "loss" in h]
        return dict(keep=pruned.plan.keep, weights=numbers(pruned), losses=losses, metrics=pruned.report.pruned.metrics)
"""


def test_two_processes_find_what_one_finds_with_batches_twice_as_large(tmp_path: Path) -> None:
    """The same samples in the same order, in float64, to rounding: every search, and fine-tuning."""
    code = """
    from compress.processes import rank
    runs = [searched(search, 16) for search in SEARCHES] + [searched(SEARCHES[0], 16, folder / "out", **TUNE)]
    tell(rank(), runs=[told(run) for run in runs], files=sorted(path.name for path in (folder / "out").iterdir()))
    """
    first, second = _ranks(textwrap.dedent(SETTING) + textwrap.dedent(code), tmp_path)
    assert first == second
    assert first["files"] == ["model.safetensors", "plan.json", "report.html", "report.json", "run.json"]
    known: dict[str, Any] = {"torch": torch}
    exec(textwrap.dedent(SETTING), known)
    alone = [known["searched"](search, 32) for search in known["SEARCHES"]]
    alone += [known["searched"](known["SEARCHES"][0], 32, **known["TUNE"])]
    for ours, run in zip(first["runs"], alone, strict=True):  # type: ignore[call-overload]
        theirs = known["told"](run)
        assert ours["keep"] == {name: list(kept) for name, kept in theirs["keep"].items()}
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-9)
        assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=1e-9)
        for a, b in zip(ours["weights"], theirs["weights"], strict=True):
            assert a == pytest.approx(b, rel=1e-8, abs=1e-10)


def test_data_that_nobody_can_divide_are_each_process_s_own(tmp_path: Path) -> None:
    code = """
    from compress.processes import rank, join
    from compress.share import shared
    from torch.utils.data import DistributedSampler, IterableDataset
    join(cpu=True)

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(8))

    plain = [1, 2, 3]
    data = list(range(10))
    own = DataLoader(data, 2, sampler=DistributedSampler(data, shuffle=False))
    parts = [shared(DataLoader(data, 2)), shared(DataLoader(data, 2), even=False), shared(own)]
    parts += [shared(DataLoader(Stream(), 2)), shared(DataLoader(Stream(), None))]
    tell(rank(), parts=[[torch.as_tensor(batch).tolist() for batch in part] for part in parts],
         same=[shared(plain) is plain, shared(own) is own, shared(None) is None])
    """
    first, second = _ranks(textwrap.dedent(SETTING) + textwrap.dedent(code), tmp_path)
    assert first["parts"][:2] == [[[0, 1], [4, 5], [8, 9]], [[0, 1], [4, 5], [8, 9]]]  # type: ignore[index]
    assert second["parts"][:2] == [[[2, 3], [6, 7], [0, 1]], [[2, 3], [6, 7]]]  # type: ignore[index]
    assert first["parts"][2] == [[0, 2], [4, 6], [8]]  # type: ignore[index]
    assert first["parts"][3:] == [[[0, 1], [4, 5]], list(range(8))]  # type: ignore[index]
    assert first["same"] == [True] * 3


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
