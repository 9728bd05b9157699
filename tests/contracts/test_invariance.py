"""Groups depend on the network alone: not on layout, precision, batch size, mode or hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compress
from cases import CASES, Net, build, example, groups_of

NAMES = (
    *("chain", "residual_stream", "depthwise_separable", "dense_connections", "squeeze_and_excite", "few_large_groups"),
    *("channel_shuffle_by_view", "flatten_before_a_linear_layer", "layer_scale_in_channels_last", "pixel_shuffle"),
    *("auxiliary_head_in_training", "transposed_convolutions", "split_by_a_width_in_an_attribute"),
)


def summary(groups: Any) -> list[Any]:
    """Names, kinds, and every position of every group."""
    return [
        (g.name, g.kind, g.width, sorted((s.tensor, s.dim, s.gated, s.index.tolist()) for s in g.slots)) for g in groups
    ]


def found(name: str, change: Callable[[nn.Module], Any] = lambda m: None, **inputs: Any) -> Any:
    model = build(CASES[name], dtype=inputs.get("dtype", torch.float64))
    change(model)
    x = example(CASES[name], **inputs)
    return compress.find_groups(model, x)


@pytest.mark.parametrize("name", NAMES)
def test_memory_format_does_not_matter(name: str) -> None:
    model, x = build(CASES[name]), example(CASES[name], batch=2)
    model.to(memory_format=torch.channels_last)
    groups = compress.find_groups(model, x.contiguous(memory_format=torch.channels_last))
    assert summary(groups) == summary(groups_of(name))


@pytest.mark.parametrize("name", NAMES)
def test_memory_format_of_the_input_alone_does_not_matter(name: str) -> None:
    x = example(CASES[name], batch=1).contiguous(memory_format=torch.channels_last)
    assert summary(compress.find_groups(build(CASES[name]), x)) == summary(groups_of(name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_precision_does_not_matter(name: str, dtype: torch.dtype) -> None:
    assert summary(found(name, dtype=dtype)) == summary(groups_of(name))


@pytest.mark.parametrize("name", NAMES)
def test_batch_does_not_matter(name: str) -> None:
    for batch in (1, 3):
        groups = found(name, batch=batch)
        assert summary(groups) == summary(groups_of(name))
        cost, reference = groups.cost, groups_of(name).cost
        assert int(cost.macs(cost.widths)) == int(reference.macs(reference.widths))


@pytest.mark.parametrize("name", NAMES)
def test_mode_and_gradients_do_not_matter(name: str) -> None:
    assert summary(found(name, lambda m: m.train())) == summary(groups_of(name))
    assert summary(found(name, lambda m: m.requires_grad_(False))) == summary(groups_of(name))
    model, x = build(CASES[name]), example(CASES[name]).requires_grad_()
    assert summary(compress.find_groups(model, x)) == summary(groups_of(name))
    assert x.grad is None and not [key for key in vars(x) if "compress" in key]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_surrounding_context_does_not_matter(context: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
    with context():
        groups = found("residual_stream")
    assert summary(groups) == summary(groups_of("residual_stream"))


def test_same_network_gives_the_same_groups_every_time() -> None:
    for name in ("dense_connections", "channel_shuffle_by_view"):
        assert summary(found(name)) == summary(found(name)) == summary(groups_of(name))


def test_hooks_of_the_user_do_not_matter() -> None:
    model = build(CASES["chain"])
    seen: list[Tensor] = []
    model[0].register_forward_hook(lambda m, inputs, output: seen.append(output))
    assert summary(compress.find_groups(model, example(CASES["chain"]))) == summary(groups_of("chain"))


def test_autocast_inside_the_model_does_not_matter() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return m.body(x)

    body = build(CASES["residual_stream"], dtype=torch.float32)
    groups = compress.find_groups(
        Net(forward, body=body).eval(), example(CASES["residual_stream"], dtype=torch.float32)
    )
    assert [(g.name, g.width) for g in groups] == [(f"body.{g.name}", g.width) for g in groups_of("residual_stream")]
