"""LeNet-300-100 and LeNet-5 compressed as in tables S4 and S5 of BayesNAS: architecture, error, FLOPs.

    python -m benchmarks.lenet [--quick] [--data MNIST_FOLDER] [--epochs 4] [--search 8] [--tune 4] [--seed 0]

`--data` is a folder with the four files of MNIST (train-images-idx3-ubyte etc., compressed or not). The default is
Fashion-MNIST from Debian's package dataset-fashion-mnist, or else scikit-learn's digits, enlarged. Neither is MNIST, so
the errors cannot be compared with the tables. As in the paper, there are groups for the filters and shapes of
convolutions and for the filters and columns of linear layers. The architecture counts the used inputs, the filters and
the used inputs of linear layers. FLOPs are two per MAC and include zeros inside kernels.
"""

from __future__ import annotations

import argparse
import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import compress

from . import results

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
PAPER = {
    "LeNet-300-100": [("baseline", "784-300-100", 1.39, 0.53), ("proposed", "465-37-90", 1.54, 0.04)],
    "LeNet-5": [("baseline", "20-50-800-500", 0.83, 8.85), ("proposed", "5-10-65-25", 1.00, 0.57)],
}
INTENSITIES = {
    "LeNet-300-100": ("bayes_compress", ["row", "filter"], [1e-6, 3e-6, 1e-5, 3e-5]),
    "LeNet-5": ("bayes_compress", ["shape", "filter"], [1e-6, 3e-6, 1e-5, 3e-5]),
}


class LeNet300(nn.Module):
    """LeNet-300-100: two hidden layers with 300 and 100 units."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(784, 300), nn.Linear(300, 100), nn.Linear(100, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.b(torch.relu(self.a(x.flatten(1))))))
        return out


class LeNet5(nn.Module):
    """LeNet-5 as in Caffe: 20 and 50 filters of 5 x 5, 800 features, 500 units."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 20, 5), nn.Conv2d(20, 50, 5)
        self.c, self.head = nn.Linear(800, 500), nn.Linear(500, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.b(F.max_pool2d(self.a(x), 2)), 2)
        out: Tensor = self.head(torch.relu(self.c(x.flatten(1))))
        return out


NETWORKS: dict[str, Callable[[], nn.Module]] = {"LeNet-300-100": LeNet300, "LeNet-5": LeNet5}


def load_data(folder: Path | None) -> tuple[str, list[Tensor]]:
    """Return the name of the data set, and the images and labels for training and testing.

    Raises:
        SystemExit: `folder` does not contain the files of MNIST.
    """
    candidates = {"--data": folder, "Fashion-MNIST": DEBIAN}
    for name, candidate in candidates.items():
        if candidate is not None and any(candidate.glob(f"{FILES[0]}*")):
            arrays = [read_idx(next(candidate.glob(f"{file}*"))) for file in FILES]
            images = [torch.from_numpy(a).float()[:, None] / 255 for a in arrays[::2]]
            labels = [torch.from_numpy(a).long() for a in arrays[1::2]]
            source = f"{candidate} (by --data)" if name == "--data" else name
            return source, [(images[0] - 0.2) / 0.35, labels[0], (images[1] - 0.2) / 0.35, labels[1]]
    if folder is not None:
        raise SystemExit(f"{folder}: expected {FILES[0]} and the other three files of MNIST, compressed (.gz) or not")
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = F.interpolate(torch.from_numpy(digits.images).float()[:, None] / 16, size=28, mode="bilinear")
    y = torch.from_numpy(digits.target).long()
    return "scikit-learn's digits, enlarged", [x[:1437], y[:1437], x[1437:], y[1437:]]


def read_idx(path: Path) -> np.ndarray:
    """Read an IDX file of unsigned bytes, compressed or not."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    rank = raw[3]
    shape = np.frombuffer(raw, ">i4", rank, 4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * rank).reshape(shape).copy()


def train(model: nn.Module, batches: DataLoader[Any], epochs: int) -> None:
    """Train in place with SGD and cosine decay."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(batches))
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()


def describe_architecture(model: Any, searched: Any) -> tuple[str, int]:
    """Return the widths in the notation of the tables, and the MACs of the used inputs, filters and units."""
    if isinstance(model, LeNet300):
        inputs = int((searched.a.weight.detach().abs().sum(0) > 0).sum())
        widths = [inputs, model.a.out_features, model.b.out_features]
        return "-".join(map(str, widths)), inputs * widths[1] + widths[1] * widths[2] + 10 * widths[2]
    used = int((searched.c.weight.detach().abs().sum(0) > 0).sum())
    (f1, f2, units), (k1, k2) = (
        (model.a.out_channels, model.b.out_channels, model.c.out_features),
        (model.a.kernel_size, model.b.kernel_size),
    )
    macs = 24 * 24 * f1 * k1[0] * k1[1] + 8 * 8 * f1 * f2 * k2[0] * k2[1] + used * units + 10 * units
    return f"{f1}-{f2}-{used}-{units}", macs


def error_percent(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the classification error in percent."""
    with torch.no_grad():
        return 100 * float((torch.cat([model.eval()(part) for part in x.split(1000)]).argmax(-1) != y).float().mean())


def measure(name: str, data: list[Tensor], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train, compress and fine-tune one network for every gamma."""
    torch.manual_seed(options.seed)
    x, y, test_x, test_y = data
    batches = DataLoader(TensorDataset(x, y), 100, shuffle=True, drop_last=True)
    val = DataLoader(TensorDataset(test_x, test_y), 1000)
    dense = NETWORKS[name]()
    train(dense, batches, options.epochs)
    widths, macs = describe_architecture(dense, dense)
    rows = [
        {"gamma": None, "architecture": widths, "error": error_percent(dense, test_x, test_y), "mflops": 2 * macs / 1e6}
    ]
    method, structure, intensities = INTENSITIES[name]
    for gamma in intensities[2:3] if options.quick else intensities:
        search = {"method": method, "structure": structure, "gamma": gamma, "epochs": options.search, "lr": 0.02}
        recipe = {"budget": "auto", "search": search, "target": {"min_keep": 1}, "timing": {"repeats": 3}}
        try:
            searched = compress.prune(dense, recipe, train=batches, val=val, device="cpu", quiet=True)
        except ValueError as refusal:
            rows.append({"gamma": gamma, "refused": str(refusal)})
            continue
        widths, macs = describe_architecture(searched.model, searched.model)
        zeros = {n: p.detach() == 0 for n, p in searched.model.named_parameters() if p.ndim > 1}
        error_after_search = error_percent(searched.model, test_x, test_y)
        pruned_weights = [p for n, p in searched.model.named_parameters() if n in zeros]
        for p, zero in zip(pruned_weights, zeros.values(), strict=True):  # zeros stay zero during fine-tuning
            p.register_hook(lambda g, zero=zero: g.masked_fill(zero, 0))
        train(searched.model.train(), batches, options.tune)
        row = {"gamma": gamma, "architecture": widths, "after_search": error_after_search, "mflops": 2 * macs / 1e6}
        row["error"] = error_percent(searched.model, test_x, test_y)
        row["nonzero"] = sum(int((~zero).sum()) for zero in zeros.values())
        row["dense_weights"] = sum(p.numel() for p in dense.parameters() if p.ndim > 1)
        row["notes"] = searched.report.notes
        rows.append(row)
        print(name, row, flush=True)
    return rows


def main() -> None:
    parser = results.make_parser(__doc__)
    parser.add_argument("--data", type=Path, default=None, help="folder with the files of MNIST")
    parser.add_argument("--epochs", type=int, default=4, help="epochs of training the dense network")
    parser.add_argument("--search", type=int, default=8, help="epochs of the search")
    parser.add_argument("--tune", type=int, default=4, help="epochs of fine-tuning")
    parser.add_argument("--images", type=int, default=20000, help="number of training images")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    file = results.result_name("lenet", options.quick)
    if options.quick:
        options.epochs, options.search, options.tune, options.images = 1, 2, 1, 2000
    source, data = load_data(options.data)
    data[:2] = [part[: options.images] for part in data[:2]]
    networks = {}
    for name in NETWORKS:
        networks[name] = measure(name, data, options)
        settings = {k: v for k, v in vars(options).items() if k != "data"}
        content = {"data": source, "settings": settings, "paper": PAPER, "networks": networks}
        results.save(file, content)
    results.publish(file, tables(content))


def tables(content: dict[str, Any]) -> list[results.ResultTable]:
    """Return one table per network, with the rows of the paper first."""
    all_tables = []
    for name, rows in content["networks"].items():
        lines = [
            [f"paper, {row}", "MNIST", cells, f"{error:.2f}", f"{flops:.2f}"]
            for row, cells, error, flops in content["paper"][name]
        ]
        for row in rows:
            label = "dense" if row["gamma"] is None else f"gamma {row['gamma']:g}"
            cells = ["refused", "-", "-"]
            if "refused" not in row:
                cells = [row["architecture"], f"{row['error']:.2f}", f"{row['mflops']:.3f}"]
            lines.append([label, content["data"], *cells])
        head = ("row", "data", "architecture", "error after fine-tuning, %", "FLOPs (M)")
        all_tables.append(results.ResultTable(head, lines, name))
    return all_tables


if __name__ == "__main__":
    main()
