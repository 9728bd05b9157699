"""Queries and keys of a cut attention: the best ones of the smaller width, against explicit logits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compress
from cases import Net, distance, randomise_, run
from compress import Plan
from compress.modules import attend, split_heads
from compress.surgery.repair import Repair
from compress.surgery.repair.least_squares import repair_
from compress.surgery.repair.logit_fit import LogitMoments, best_of_rank, fit_logits, split_images
from compress.surgery.slicing import slice_

WIDTH, HEADS = 8, 2


def noise(*shape: int, seed: int = 8) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def moments_of(q: Tensor, k: Tensor) -> LogitMoments:
    moments = LogitMoments.zeros(q.shape[1], q.shape[3], torch.device("cpu"))
    moments.add_(q, k)
    return moments


def test_best_queries_and_keys_are_those_of_explicit_least_squares() -> None:
    """With one image the logits are one matrix: its truncated SVD is the oracle, and neither side can be improved."""
    q, k = noise(1, HEADS, 40, 6), noise(1, HEADS, 40, 6, seed=9)
    a, b = best_of_rank(moments_of(q, k), 4, 1e-14)
    error = total = 0.0
    for head in range(HEADS):
        queries, keys = q[0, head], k[0, head] - k[0, head].mean(0)
        logits = queries @ keys.T
        u, s, vh = torch.linalg.svd(logits)
        best = (u[:, :4] * s[:4]) @ vh[:4]
        assert torch.allclose(queries @ a[head] @ (keys @ b[head]).T, best, atol=1e-10)
        expected_queries = torch.linalg.lstsq(keys @ b[head], logits.T).solution.T
        expected_keys = torch.linalg.lstsq(queries @ a[head], logits).solution.T
        assert torch.allclose(queries @ a[head], expected_queries, atol=1e-10)
        assert torch.allclose(keys @ b[head], expected_keys, atol=1e-10)
        error, total = error + float(s[4:].square().sum()), total + float(s.square().sum())
    assert moments_of(q, k).error(a, b) == pytest.approx(error / total, rel=1e-9)


def test_moments_of_batches_are_those_of_all_images_with_one_in_four_held_out() -> None:
    q, k = noise(12, HEADS, 5, 3), noise(12, HEADS, 5, 3, seed=9)
    fit, held_out = (LogitMoments.zeros(HEADS, 3, torch.device("cpu")) for _ in range(2))
    for batch, (queries, keys) in enumerate(zip(q.split(2), k.split(2), strict=True)):
        for sums, part in zip((fit, held_out), split_images(queries, keys, batch), strict=True):
            sums.add_(*part)
    expected = moments_of(q[3::4], k[3::4])
    assert torch.allclose(held_out.keys, expected.keys) and torch.allclose(held_out.queries, expected.queries)
    together = fit + held_out
    centered = k - k.mean(2, keepdim=True)
    assert torch.allclose(together.keys, torch.einsum("ihtd,ihte->hde", centered, centered))
    assert torch.allclose(together.queries, torch.einsum("ihtd,ihte->hde", q, q))


def test_kept_dimensions_stay_where_there_is_no_held_out_image() -> None:
    moments = moments_of(noise(2, 1, 5, 4), noise(2, 1, 5, 4, seed=9))
    nothing = LogitMoments.zeros(1, 4, torch.device("cpu"))
    given, best = fit_logits(moments, nothing, torch.tensor([[0, 2]]), exact=True)
    assert best.ridge is None and best is given
    assert torch.equal(given.a[0], torch.eye(4).double()[:, [0, 2]])


def separate() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x), HEADS) for layer in (net.q, net.k, net.v))
        return net.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    return Net(forward, **{name: nn.Linear(WIDTH, WIDTH) for name in ("q", "k", "v", "out")})


def torch_attention(batch_first: bool) -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.out(net.attention(x, x, x, need_weights=False)[0])

    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)
    return Net(forward, attention=attention, out=nn.Linear(WIDTH, WIDTH))


def timm_attention() -> nn.Module:
    attention = pytest.importorskip("timm.layers").Attention(WIDTH, HEADS, qkv_bias=True)
    return Net(lambda net, x: net.out(net.attention(x)), attention=attention, out=nn.Linear(WIDTH, WIDTH))


ATTENTIONS: dict[str, Callable[[], nn.Module]] = {
    "separate": separate,
    "torch, batch first": lambda: torch_attention(True),
    "torch, tokens first": lambda: torch_attention(False),
    "timm": timm_attention,
}


def rows_of(model: nn.Module) -> list[tuple[list[Tensor], int]]:
    """Return weight and bias of the queries and of the keys, with their first row."""
    if hasattr(model, "q"):
        return [([model.q.weight, model.q.bias], 0), ([model.k.weight, model.k.bias], 0)]
    owner = model.attention if hasattr(model, "attention") else model
    is_torch = isinstance(owner, nn.MultiheadAttention)
    tensors = [owner.in_proj_weight, owner.in_proj_bias] if is_torch else [owner.qkv.weight, owner.qkv.bias]
    return [(tensors, 0), (tensors, WIDTH)]


def cut(
    model: nn.Module, x: Tensor, dropped: tuple[int, ...] = (1, 3), batch: int = 8, target: Any = None
) -> tuple[nn.Module, nn.Module, Repair]:
    """Return the model with these dimensions of each head dropped, plain and repaired, and the result."""
    given = {"attention": ["qk"]} if target is None else target
    parsed = compress.Recipe.load({"budget": {"macs": 0.5}, "target": given}).target
    groups = compress.find_groups(model, x[:2], parsed)
    keep = {}
    for group in groups:
        if group.kind == "attention":
            width = group.width // group.num_heads
            keep[group.name] = [i for i in range(group.width) if i % width not in dropped]
    assert keep
    plan = Plan.build(model, groups, keep)
    plain = slice_(copy.deepcopy(model), plan)
    repaired = copy.deepcopy(plain)
    result = repair_(repaired, model, plan, list(x.split(batch)), lambda m, b: m(b))
    return plain, repaired, result


@pytest.mark.parametrize("planted", ["queries", "keys"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_dropping_linear_combinations_of_kept_dimensions_loses_nothing(name: str, planted: str) -> None:
    model = randomise_(ATTENTIONS[name]().double()).eval()
    tensors, first = rows_of(model)[planted == "keys"]
    with torch.no_grad():
        for tensor in tensors:
            for head in range(HEADS):
                row = first + head * (WIDTH // HEADS)
                tensor[row + 1] = 0.5 * tensor[row] - 2 * tensor[row + 2]
                tensor[row + 3] = tensor[row + 2] - tensor[row]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = 2 * noise(32, 6, WIDTH)
    plain, repaired, result = cut(model, x)
    assert [a.is_solved for a in result.attentions] == [True]
    assert distance(run(plain, x), run(model, x)) > 1e-3
    assert distance(run(repaired, x), run(model, x)) < 1e-10
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def vision_transformer(**options: Any) -> nn.Module:
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": HEADS, "num_classes": 5}
    return randomise_(timm.models.VisionTransformer(**sizes, **options).double()).eval()


def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    """Return the centered logits of the first block, with the scale of the width before the cut."""
    block = model.blocks[0]
    tokens = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(x))))
    values = block.attn.proj.in_features
    projected = block.attn.qkv(block.norm1(tokens))
    width = (projected.shape[-1] - values) // 2
    q, k = (split_heads(part, HEADS) for part in projected.split([width, width, values], -1)[:2])
    logits: Tensor = q @ k.mT
    return logits - logits.mean(-1, keepdim=True)


@pytest.mark.parametrize("target", [{"attention": ["qk"]}, {"attention": True}])
def test_logits_of_a_vision_transformer_are_nearer_to_those_before_the_cut(target: Any) -> None:
    model = vision_transformer()
    plain, repaired, result = cut(model, noise(48, 3, 16, 16), (0, 2, 5, 7), 16, target)
    unseen = noise(16, 3, 16, 16, seed=3)
    with torch.no_grad():
        expected = logits_of(model, unseen)
        errors = [float((logits_of(m, unseen) - expected).square().sum()) for m in (plain, repaired)]
    assert errors[1] < 0.5 * errors[0]
    assert [a.name for a in result.attentions] == ["blocks.0.attn.qkv", "blocks.1.attn.qkv"]
    assert all(a.error_after < 0.5 * a.error_before for a in result.attentions)
    assert result.error_after < result.error_before


def test_nothing_changes_where_no_queries_are_dropped() -> None:
    model = vision_transformer()
    x = noise(16, 3, 16, 16)
    _, repaired, result = cut(model, x, (), 8)
    assert result.attentions == []
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in repaired.state_dict().items())
    _, repaired, result = cut(model, x, (1, 2), 8, {"attention": ["v"]})
    assert result.attentions == []
    rows = slice(0, 32)
    assert torch.equal(repaired.blocks[0].attn.qkv.weight[rows], model.blocks[0].attn.qkv.weight[rows])


def test_norms_of_queries_are_left_and_named() -> None:
    _, _, result = cut(vision_transformer(qk_norm=True), noise(16, 3, 16, 16))
    reasons = {a.name: a.reason for a in result.attentions}
    assert reasons == dict.fromkeys(
        ["blocks.0.attn.qkv", "blocks.1.attn.qkv"], "its queries and keys are not plain outputs of linear layers"
    )


def with_reader_of_queries(net: Any, x: Tensor) -> Tensor:
    q, k, v = (split_heads(layer(x), 1) for layer in (net.q, net.k, net.v))
    return net.out(attend(q, k, v, 0.5, net.position(q)).transpose(1, 2).flatten(2))


def test_queries_that_others_read_are_left_and_named() -> None:
    """Relative positions that are functions of the queries, as in MViT, need the dimensions as they were."""
    layers = {name: nn.Linear(WIDTH, WIDTH) for name in ("q", "k", "v", "out")}
    model = randomise_(Net(with_reader_of_queries, **layers, position=nn.Linear(WIDTH, 6)).double()).eval()
    plain, repaired, result = cut(model, noise(32, 6, WIDTH))
    expected = [("q", "its queries and keys are changed before the logits, or read by others")]
    assert [(a.name, a.reason) for a in result.attentions] == expected
    assert torch.equal(repaired.q.weight, plain.q.weight) and torch.equal(repaired.k.weight, plain.k.weight)


def test_projections_that_are_used_twice_are_left_and_named() -> None:
    def twice(net: Any, x: Tensor) -> Tensor:
        for _ in range(2):
            q, k, v = (split_heads(layer(x), 1) for layer in (net.q, net.k, net.v))
            x = x + net.out(attend(q, k, v, 0.5).transpose(1, 2).flatten(2))
        return x

    layers = {name: nn.Linear(WIDTH, WIDTH) for name in ("q", "k", "v", "out")}
    _, _, result = cut(randomise_(Net(twice, **layers).double()).eval(), noise(32, 6, WIDTH))
    assert {a.reason for a in result.attentions} == {"its projections are used more than once"}


def test_queries_that_are_not_finite_are_left_and_named() -> None:
    x = noise(32, 6, WIDTH)
    x[20, 3, 2] = float("nan")  # in the third batch
    model = randomise_(separate().double()).eval()
    plain, repaired, result = cut(model, x)
    assert [a.reason for a in result.attentions] == ["its queries or keys are not finite"]
    assert torch.equal(repaired.q.weight, plain.q.weight)


def test_few_images_leave_the_kept_dimensions() -> None:
    model = randomise_(separate().double()).eval()
    plain, repaired, result = cut(model, noise(2, 6, WIDTH))
    assert [a.reason for a in result.attentions] == ["no solution lowers the error of its logits"]
    assert torch.equal(repaired.k.weight, plain.k.weight)
