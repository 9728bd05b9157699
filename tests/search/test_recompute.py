"""Gated weights are recomputed in the backward pass: the same bits, and weights are not stored twice."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import compress
from cases import CASES, build, example, groups_of, same_bits, tensors_of
from compress.recipe import Target
from compress.search.score_training.recompute import recompute_gated_weights
from compress.surgery.gates import Gate, attach_
from helpers.chain_network import chain, images


def gradients(model: nn.Module, x: Any, anew: bool) -> list[Tensor]:
    """Of everything in the model, none as a missing one."""
    torch.manual_seed(0)
    if anew:
        with recompute_gated_weights(model):
            outputs = tensors_of(model(x))
    else:
        outputs = tensors_of(model(x))
    loss = torch.stack([o.square().sum() for o in outputs]).sum()
    wanted = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(wanted, found, strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_gradients_have_the_same_bits_on_the_whole_table(name: str) -> None:
    model, x = build(CASES[name]), example(CASES[name])
    made = attach_(model, groups_of(name))
    if not made:
        pytest.skip("nothing to score")
    for score in made.values():
        nn.init.uniform_(score, 0.5, 1.5)
    assert same_bits(gradients(model, x, anew=True), gradients(model, x, anew=False))
    assert not any(gate._forward_hooks for gate in model.modules() if isinstance(gate, Gate))


def small_vit() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    shape = {"img_size": 16, "patch_size": 8, "embed_dim": 96, "depth": 2, "num_heads": 3, "num_classes": 4}
    model, x = timm.models.VisionTransformer(**shape), torch.randn(1, 3, 16, 16)
    groups = compress.find_groups(model.eval(), x, Target(channels=False, attention=True, mlp=True))
    assert {g.kind for g in groups} == {"attention", "mlp"}
    for score in attach_(model.train(), groups).values():
        nn.init.uniform_(score, 0.5, 1.5)
    return model, x


@pytest.mark.parametrize("kind", [None, torch.bfloat16])
def test_a_transformer_has_the_same_gradients_under_autocast_too(kind: torch.dtype | None) -> None:
    model, x = small_vit()
    with torch.autocast("cpu", kind or torch.bfloat16, enabled=kind is not None):
        assert same_bits(gradients(model, x, anew=True), gradients(model, x, anew=False))


def kept(model: nn.Module, x: Tensor, anew: bool) -> set[int]:
    """The sizes of scaled weights that live on for the backward pass."""
    alive: list[Any] = []

    def watch(gate: nn.Module, inputs: Any, scaled: Tensor) -> None:
        storage = scaled.untyped_storage()
        alive.append((torch.UntypedStorage._new_with_weak_ptr, storage._weak_ref(), scaled.numel()))

    handles = [gate.register_forward_hook(watch) for gate in model.modules() if isinstance(gate, Gate)]
    if anew:
        with recompute_gated_weights(model):
            output = model(x)
    else:
        output = model(x)
    for handle in handles:
        handle.remove()
    sizes = {size for _, weak, size in alive if not torch.UntypedStorage._expired(weak)}
    for _, weak, _ in alive:
        torch.UntypedStorage._free_weak_ref(weak)
    del output
    return sizes


def test_scaled_weights_are_kept_without_and_not_kept_with_it() -> None:
    model, x = small_vit()
    assert kept(model, x, anew=False) >= {3 * 96 * 96, 4 * 96 * 96}  # queries, keys and values; the MLP's readers
    assert not kept(model, x, anew=True)


def test_two_gates_on_one_weight_are_recomputed_in_order() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 4).double()
    for dim, width in ((1, 3), (0, 4)):
        score = nn.Parameter(torch.rand(width).double())
        parametrize.register_parametrization(
            layer, "weight", Gate(dim, 2, [f"{dim}"], [score], torch.arange(width) + 1)
        )
    x = torch.randn(5, 3).double()
    assert same_bits(gradients(layer, x, anew=True), gradients(layer, x, anew=False))


def test_weights_that_change_before_the_backward_pass_are_an_error() -> None:
    model, x = chain(), images()
    (score, *_) = attach_(model, compress.find_groups(model, x)).values()
    x = x.clone().requires_grad_()
    with recompute_gated_weights(model):
        output = model(x)
    with torch.no_grad():
        score.mul_(2)
    with pytest.raises(RuntimeError, match="weights or scores were changed in place"):
        output.sum().backward()


def test_activations_that_change_before_the_backward_pass_are_an_error_as_without() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            return y * F.relu_(y)

    x = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="inplace operation"):
        Wrong()(x).sum().backward()
    with recompute_gated_weights(Wrong()):
        output = Wrong()(x)
    with pytest.raises(RuntimeError, match="a tensor needed for the gradient was changed in place"):
        output.sum().backward()


@pytest.mark.parametrize("function", [torch.softmax, torch.sigmoid, torch.relu, torch.exp], ids=lambda f: f.__name__)
def test_results_that_no_backward_pass_reaches_are_freed(function: Any) -> None:
    x = torch.randn(8, requires_grad=True)
    with recompute_gated_weights(nn.Identity()):
        y = function(x, 0) if function is torch.softmax else function(x)
    alive = weakref.ref(y)
    del y
    gc.collect()
    assert alive() is None
