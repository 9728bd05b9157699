"""Degenerate parameters become random, and the model keeps its own."""

from __future__ import annotations

import torch
from torch import nn

from compress.modules import shared_copy
from compress.surgery.perturbation import perturb_


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(1))  # ReZero
        self.layer_scale = nn.Parameter(1e-5 * torch.randn(8))
        self.norm = nn.BatchNorm2d(8)
        self.zero_conv = nn.Conv2d(8, 8, 3)
        self.faint = nn.Linear(64, 8)
        self.plain = nn.Linear(64, 8)
        self.temperature = nn.Parameter(torch.tensor(2.6))
        with torch.no_grad():
            self.zero_conv.weight.zero_()
            self.faint.weight.mul_(1e-6)


def test_degenerate_tensors_become_random_and_others_stay() -> None:
    model = Gated()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    perturbed = perturb_(shared_copy(model)).state_dict()
    for name in ("gate", "layer_scale", "norm.weight", "norm.bias", "norm.running_var"):
        assert perturbed[name].min() >= 0.5, name
    signal = torch.randn(64, 8, 5, 5)
    assert 0.3 < perturbed["zero_conv.weight"].unflatten(0, (-1,)).flatten(1).norm(dim=1).mean() < 3
    assert torch.isfinite(torch.conv2d(signal, perturbed["zero_conv.weight"])).all()
    assert perturbed["faint.weight"].std() > 0.1
    assert (
        torch.nn.functional.cosine_similarity(
            perturbed["faint.weight"].flatten(), before["faint.weight"].flatten(), dim=0
        )
        > 0.999
    )
    for name in ("plain.weight", "temperature"):
        assert torch.equal(perturbed[name], before[name])
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_weights_that_are_not_finite_are_replaced() -> None:
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight[0, 0] = torch.nan
    assert perturb_(shared_copy(model)).weight.isfinite().all()  # type: ignore[operator]
    assert model.weight.isnan().any()
