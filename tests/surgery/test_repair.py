"""Least squares repair: the layers behind a cut are solved so that the network gives what it gave before the cut."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compress
from cases import CASES, Net, build, distance, example, groups_of, random_keep, randomise_, run
from cases.networks_plain import cbr, head
from compress import Plan
from compress.surgery.repair import layer_problem, least_squares
from compress.surgery.repair.layer_samples import draw_rows, input_rows, output_rows
from compress.surgery.repair.least_squares import Repair, repair_
from compress.surgery.repair.paused_forward import PausedForward
from compress.surgery.repair.regression import Sums, solve
from compress.surgery.slicing import slice_


def forward(model: nn.Module, batch: Any) -> Any:
    return model(batch)


def noise(*shape: int, seed: int = 8) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def repaired(
    model: nn.Module, keep: dict[str, list[int]], batches: list[Tensor], target: Any = None
) -> tuple[nn.Module, Plan, Repair]:
    groups = compress.find_groups(model, batches[0][:1], target)
    plan = Plan.build(model, groups, keep)
    cut = slice_(copy.deepcopy(model), plan)
    return cut, plan, repair_(cut, model, plan, batches, forward)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 4), (25, 6)),
    "linear on tokens": (lambda: nn.Linear(6, 4, bias=False), (5, 4, 6)),
    "1x1": (lambda: nn.Conv2d(6, 4, 1), (3, 6, 5, 4)),
    "3x3, padded": (lambda: nn.Conv2d(6, 4, 3, padding=1), (3, 6, 5, 4)),
    "strided and dilated": (lambda: nn.Conv2d(6, 4, (3, 2), (2, 1), dilation=(1, 2)), (3, 6, 9, 8)),
    "same": (lambda: nn.Conv2d(6, 4, 4, padding="same"), (3, 6, 5, 4)),
    "reflected": (lambda: nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect"), (3, 6, 5, 4)),
    "grouped": (lambda: nn.Conv2d(6, 4, 3, padding=1, groups=2), (3, 6, 5, 4)),
    "depthwise": (lambda: nn.Conv2d(6, 6, 3, padding=1, groups=6), (3, 6, 5, 4)),
    "1d": (lambda: nn.Conv1d(6, 4, 3, padding=2), (3, 6, 7)),
    "3d": (lambda: nn.Conv3d(6, 4, 2, stride=2), (3, 6, 4, 4, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_rows_of_input_times_weights_are_rows_of_output(name: str) -> None:
    make, shape = LAYERS[name]
    layer = randomise_(make().double())
    x = noise(*shape)
    y = layer(x)
    rows = draw_rows(y.shape, isinstance(layer, nn.Linear), 11, name)
    assert len(rows) == 11 and rows.tolist() == sorted(rows.tolist())
    inputs = input_rows(layer, x, y.shape, rows)
    weight = layer.weight.flatten(1).view(inputs.shape[1], -1, inputs.shape[2])
    computed = torch.einsum("sgd,god->sgo", inputs, weight).flatten(1)
    computed = computed + layer.bias if layer.bias is not None else computed
    assert torch.allclose(computed, output_rows(layer, y, rows), atol=1e-12)


@pytest.mark.parametrize("ridge", [1.0, 1e-3])
@pytest.mark.parametrize("groups", [1, 3])
def test_solution_is_that_of_an_explicit_least_squares_problem(groups: int, ridge: float, monkeypatch: Any) -> None:
    """The penalty is written as rows of the matrix, and the bias as a column of ones."""
    monkeypatch.setattr("compress.surgery.repair.regression.RIDGES", (ridge,))
    x, given, bias = noise(60, groups, 5), noise(groups, 2, 5, seed=1), noise(groups, 2, seed=2)
    y = torch.einsum("sgd,god->sgo", x, noise(groups, 2, 5, seed=3)) + noise(60, groups, 2, seed=4) + 3
    sums = [Sums.zeros(groups, 5, 2, torch.device("cpu")) for _ in range(2)]
    sums[0].add_(x[:45], y[:45])
    sums[1].add_(x[45:], y[45:])
    before, best = solve(*sums, given, bias, exact=False)
    for g in range(groups):
        xg, yg = x[:, g], y[:, g]
        scale = (ridge * (xg - xg.mean(0)).square().sum(0).mean()).sqrt()
        matrix = torch.cat(
            [torch.cat([xg, torch.ones(60, 1)], 1), torch.cat([scale * torch.eye(5), torch.zeros(5, 1)], 1)]
        )
        expected = torch.linalg.lstsq(matrix, torch.cat([yg, scale * given[g].T])).solution
        assert torch.allclose(best.weight[g], expected[:-1].T, atol=1e-10)
        assert torch.allclose(best.bias[g], expected[-1], atol=1e-10)
    held_out = torch.einsum("sgd,god->sgo", x[45:], given) + bias - y[45:]
    variance = (y[45:] - y[45:].mean(0)).square().sum()
    assert before.error == pytest.approx(float(held_out.square().sum() / variance))


@pytest.mark.parametrize("constant", [0.0, 0.3])
def test_a_constant_group_gets_a_bias_and_the_others_are_solved(constant: float) -> None:
    """As a depthwise convolution on channels of which one is dead."""
    x, weight = noise(80, 3, 4), noise(3, 1, 4, seed=1)
    y = torch.einsum("sgd,god->sgo", x, weight) + 2
    x[:, 1], y[:, 1] = constant, 5
    sums = [Sums.zeros(3, 4, 1, torch.device("cpu")) for _ in range(2)]
    for part, rows in zip(sums, (slice(60), slice(60, None)), strict=True):
        part.add_(x[rows], y[rows])
    given = noise(3, 1, 4, seed=2)
    _, best = solve(*sums, given, torch.zeros(3, 1), exact=True)
    assert torch.allclose(best.weight[[0, 2]], weight[[0, 2]], atol=1e-8)
    assert torch.equal(best.weight[1], given[1])
    assert torch.allclose(best.bias, x.new_tensor([2, 5 - constant * float(given[1].sum()), 2])[:, None], atol=1e-8)


def test_a_reader_is_named_even_if_no_layer_can_be_solved() -> None:
    model = randomise_(nn.Sequential(nn.Conv2d(3, 6, 1), nn.ReLU(), nn.ConvTranspose2d(6, 4, 2))).double()
    _, _, result = repaired(model, {"0": [0, 2, 3]}, [noise(4, 3, 6, 6)])
    assert [(layer.name, layer.is_reader, layer.is_solved) for layer in result.layers] == [("2", True, False)]


def test_layer_gets_the_explicit_least_squares_solution_of_all_taps() -> None:
    model = randomise_(nn.Sequential(nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 4, 3, padding=1, bias=False)).double())
    x = noise(40, 3, 6, 6)
    cut, plan, result = repaired(model, {"0": [0, 2, 3, 5]}, list(x.split(8)))
    (layer,) = result.layers
    assert layer.is_solved and layer.is_reader and layer.ridge is not None
    assert layer.error_after < layer.error_before
    assert plan.biases == {"2": 4}
    with torch.no_grad():
        hidden = cut[1](cut[0](x))
        patches = F.unfold(hidden, 3, padding=1).transpose(1, 2).reshape(-1, 36)
        targets = model(x).flatten(2).transpose(1, 2).reshape(-1, 4)
        centered = patches - patches.mean(0)
        scale = (layer.ridge * centered.square().sum(0).mean()).sqrt()
        given = model[2].weight[:, [0, 2, 3, 5]].flatten(1)
        matrix = torch.cat([centered, scale * torch.eye(36)])
        expected = torch.linalg.lstsq(matrix, torch.cat([targets - targets.mean(0), scale * given.T])).solution.T
    assert torch.allclose(cut[2].weight.flatten(1), expected, atol=1e-9)
    assert torch.allclose(cut[2].bias, targets.mean(0) - expected @ patches.mean(0), atol=1e-9)


@torch.no_grad()
def copy_rows_(layer: nn.Module, copies: dict[int, tuple[int, float]]) -> None:
    """Make rows of a layer positive multiples of others, which a ReLU does not change."""
    for row, (source, factor) in copies.items():
        for tensor in (layer.weight, layer.bias):
            tensor[row] = factor * tensor[source]


def planted_conv() -> tuple[nn.Module, dict[str, list[int]], Tensor, Any]:
    model = randomise_(
        nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 4, 3, padding=1), nn.ReLU(), head(4)).double()
    )
    copy_rows_(model[0], {1: (0, 2.0), 4: (2, 0.5)})
    return model, {"0": [0, 2, 3]}, noise(32, 3, 8, 8), None


def planted_depthwise() -> tuple[nn.Module, dict[str, list[int]], Tensor, Any]:
    model = nn.Sequential(nn.Conv2d(3, 5, 1), nn.ReLU(), nn.Conv2d(5, 5, 3, groups=5), nn.ReLU(), nn.Conv2d(5, 4, 1))
    randomise_(model.double())
    copy_rows_(model[0], {1: (0, 2.0), 4: (2, 0.5)})
    with torch.no_grad():
        for row, source, factor in ((1, 0, 2.0), (4, 2, 0.5)):
            model[2].weight[row] = model[2].weight[source]
            model[2].bias[row] = factor * model[2].bias[source]
    return model, {"0": [0, 2, 3]}, noise(32, 3, 8, 8), None


def planted_linear() -> tuple[nn.Module, dict[str, list[int]], Tensor, Any]:
    model = randomise_(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double())
    copy_rows_(model[0], {1: (0, 2.0), 4: (2, 0.5)})
    return model, {"0": [0, 2, 3]}, noise(64, 6), None


def planted_mlp() -> tuple[nn.Module, dict[str, list[int]], Tensor, Any]:
    def block(net: Any, x: Tensor) -> Tensor:
        return x + net.down(F.gelu(net.up(net.norm(x))))

    model = randomise_(Net(block, norm=nn.LayerNorm(6), up=nn.Linear(6, 8), down=nn.Linear(8, 6)).double())
    copy_rows_(model.up, {3: (0, 1.0), 6: (1, 1.0)})
    return model, {"up": [0, 1, 2, 4, 5, 7]}, noise(32, 4, 6), None


def planted_values() -> tuple[nn.Module, dict[str, list[int]], Tensor, Any]:
    """Values of one head that are linear combinations of others of the same head."""

    def attend(net: Any, x: Tensor) -> Tensor:
        return net.out(F.scaled_dot_product_attention(net.q(x)[:, None], net.k(x)[:, None], net.v(x)[:, None])[:, 0])

    parts = {name: nn.Linear(6, 6) for name in ("q", "k", "v", "out")}
    model = randomise_(Net(attend, **parts).double())
    with torch.no_grad():
        for tensor in (model.v.weight, model.v.bias):
            tensor[5] = 0.5 * tensor[0] - 2 * tensor[1]
    return model, {"v": [0, 1, 2, 3, 4]}, noise(48, 4, 6), {"attention": ["v"]}


def planted_stream() -> tuple[nn.Module, dict[str, list[int]], Tensor, Any]:
    """A residual stream whose last channel is a combination of others wherever it is written."""

    def residual(net: Any, x: Tensor) -> Tensor:
        x = net.stem(x)
        x = x + net.b(F.relu(net.a(x)))
        return net.out(x)

    parts = {"stem": nn.Conv2d(3, 5, 1), "a": nn.Conv2d(5, 4, 3, padding=1), "b": nn.Conv2d(4, 5, 1)}
    model = randomise_(Net(residual, **parts, out=nn.Conv2d(5, 3, 1)).double())
    with torch.no_grad():
        for layer in (model.stem, model.b):
            for tensor in (layer.weight, layer.bias):
                tensor[4] = tensor[0] - 0.5 * tensor[1]
    return model, {"stem": [0, 1, 2, 3]}, noise(32, 3, 6, 6), {"residual": True}


PLANTED = [planted_conv, planted_depthwise, planted_linear, planted_mlp, planted_values, planted_stream]


@pytest.mark.parametrize("plant", PLANTED)
def test_dropping_linear_combinations_of_kept_dimensions_loses_nothing(plant: Callable[[], Any]) -> None:
    model, keep, x, target = plant()
    target = compress.Recipe.load({"budget": {"macs": 0.5}, "target": target or {}}).target
    model.eval()
    cut, _, result = repaired(model, keep, list(x.split(8)), target)
    plain = Plan.build(model, compress.find_groups(model, x[:1], target), keep).apply_(copy.deepcopy(model))
    expected = run(model, x)
    assert distance(run(plain, x), expected) > 1e-3
    assert distance(run(cut, x), expected) < 1e-10
    assert any(layer.is_solved for layer in result.layers)


@pytest.mark.parametrize(
    "name", ["chain", "residual_stream", "few_large_groups", "dense_connections", "pre_activation"]
)
def test_repaired_networks_are_nearer_to_the_dense_one(name: str) -> None:
    case = CASES[name]
    model, batches = build(case), list(example(case, seed=3, batch=128).split(16))
    groups = groups_of(case.name)
    keep = {n: k.tolist() for n, k in random_keep(groups, 0.6, 1).items()}
    plan = Plan.build(model, groups, keep)
    plain = slice_(copy.deepcopy(model), plan)
    cut = copy.deepcopy(plain)
    result = repair_(cut, model, plan, batches, forward)
    unseen = example(case, seed=4, batch=64)
    expected = run(model, unseen)[0]
    errors = [float((run(m, unseen)[0] - expected).square().mean()) for m in (plain, cut)]
    assert errors[1] < 0.7 * errors[0]
    assert result.error_after < result.error_before
    assert all(layer.error_after <= layer.error_before for layer in result.layers if layer.is_solved)


def test_wide_convolutions_predict_their_channels(monkeypatch: Any) -> None:
    """The cheap way has one system for all taps; it is exact too where kept channels determine the others."""
    monkeypatch.setattr(layer_problem, "MOST_UNKNOWNS", 9)
    model, keep, x, _ = planted_conv()
    cut, _, result = repaired(model.eval(), keep, list(x.split(8)))
    assert distance(run(cut, x), run(model, x)) < 1e-10
    assert result.layers[0].unknowns == 3  # channels, not patches


def test_nothing_changes_where_nothing_is_dropped() -> None:
    model = randomise_(nn.Sequential(cbr(3, 6), cbr(6, 5), cbr(5, 4), head(4)).double()).eval()
    x = noise(16, 3, 8, 8)
    cut, _, _ = repaired(model, {}, list(x.split(4)))
    assert all(torch.equal(a, model.state_dict()[name]) for name, a in cut.state_dict().items())
    cut, _, result = repaired(model, {"1.0": [0, 1, 3]}, list(x.split(4)))
    assert torch.equal(cut[0][0].weight, model[0][0].weight)
    assert torch.equal(cut[1][0].weight, model[1][0].weight[[0, 1, 3]])
    assert [layer.name for layer in result.layers] == ["2.0", "3.2"]


def test_order_of_layers_in_model_and_plan_does_not_matter_to_the_bits() -> None:
    def chained(net: Any, x: Tensor) -> Tensor:
        return net.c(F.relu(net.b(F.relu(net.a(x)))))

    layers = {"a": nn.Linear(5, 6), "b": nn.Linear(6, 6), "c": nn.Linear(6, 3)}
    forwards = randomise_(Net(chained, **layers).double())
    backwards = Net(chained, **dict(reversed(layers.items())))
    x, keep = noise(64, 5), {"a": [0, 1, 4], "b": [1, 2, 5]}
    one, _, _ = repaired(forwards, keep, list(x.split(16)))
    other, _, _ = repaired(backwards, dict(reversed(keep.items())), list(x.split(16)))
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


def test_reader_that_cannot_be_solved_is_left_and_named() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    def twice(net: Any, x: Tensor) -> Tensor:
        x = F.relu(net.inner(F.relu(net.outer(x))))
        return net.out(x)

    model = randomise_(Net(twice, outer=nn.Linear(5, 6), inner=Doubled(6, 4), out=nn.Linear(4, 2)).double())
    cut, _, result = repaired(model, {"outer": [0, 1, 2, 3], "inner": [0, 1]}, list(noise(64, 5).split(16)))
    by_name = {layer.name: layer for layer in result.layers}
    assert "does not call it as a linear layer" in by_name["inner"].reason
    assert torch.equal(cut.inner.weight, model.inner.weight[[0, 1]][:, [0, 1, 2, 3]])
    assert by_name["out"].is_solved


def test_layer_that_is_called_twice_is_left_and_named() -> None:
    def recurrent(net: Any, x: Tensor) -> Tensor:
        return net.out(F.relu(net.inner(x))) + net.out(F.relu(net.inner(-x)))

    model = randomise_(Net(recurrent, inner=nn.Linear(5, 6), out=nn.Linear(6, 4)).double())
    _, _, result = repaired(model, {"inner": [0, 1, 2, 3]}, list(noise(64, 5).split(16)))
    assert [(layer.name, layer.reason) for layer in result.layers] == [
        ("out", "it is called 2 times in a forward pass")
    ]


def test_activations_that_are_not_finite_leave_the_layer_as_it_is() -> None:
    model = randomise_(nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4)).double())
    x = noise(64, 5)
    x[3, 2] = float("nan")
    cut, _, result = repaired(model, {"0": [0, 1, 2]}, list(x.split(16)))
    assert result.layers[0].reason == "its activations are not finite"
    assert torch.equal(cut[2].weight, model[2].weight[:, [0, 1, 2]])


def test_few_samples_leave_the_solution_to_the_ridge() -> None:
    model = randomise_(nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 4)).double())
    cut, _, result = repaired(model, {"0": list(range(30))}, [noise(8, 20)])
    assert result.few_samples in (["2"], [])
    unseen = noise(200, 20, seed=5)
    plain = slice_(
        copy.deepcopy(model), Plan.build(model, compress.find_groups(model, unseen[:1]), {"0": list(range(30))})
    )
    errors = [float((run(m, unseen)[0] - run(model, unseen)[0]).square().mean()) for m in (plain, cut)]
    assert errors[1] < 1.5 * errors[0]


def test_batches_that_do_not_fit_in_memory_are_not_used(monkeypatch: Any) -> None:
    monkeypatch.setattr(least_squares, "MOST_BYTES", 2 * 16 * (5 + 6) * 8)
    model = randomise_(nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4)).double())
    _, _, result = repaired(model, {"0": [0, 1, 2]}, list(noise(64, 5).split(16)))
    assert (result.batches, result.unused_batches) == (2, 2)


def test_values_that_the_code_keeps_between_layers_are_not_mixed_among_batches() -> None:
    """Batches take turns; a network that remembers its input would add that of another batch."""

    def remember(net: Any, x: Tensor) -> Tensor:
        net.seen = x
        return net.out(F.relu(net.inner(F.relu(net.first(x))))) + net.seen

    parts = {"first": nn.Linear(5, 6), "inner": nn.Linear(6, 6), "out": nn.Linear(6, 5)}
    model = randomise_(Net(remember, **parts).double())
    _, _, result = repaired(model, {"first": [0, 1, 2, 3]}, list(noise(256, 5).split(64)))
    assert result.batches == 1
    assert result.error_after < result.error_before


def test_passes_wait_at_layers_and_stop() -> None:
    steps: list[int] = []

    def run_pass() -> str:
        from compress.surgery.repair.paused_forward import _running

        for position in range(3):
            steps.append(position)
            _running.current.pause(position, f"layer {position}")
        return "end"

    one = PausedForward(run_pass, torch.device("cpu"))
    assert steps == []
    assert (one.advance(0), steps) == ("layer 0", [0])
    assert (one.advance(2), steps) == ("layer 2", [0, 1, 2])
    assert one.advance(1) is None
    assert one.advance(5) is None and one.output == "end"
    other = PausedForward(run_pass, torch.device("cpu"))
    other.advance(1)
    other.stop()
    assert steps == [0, 1, 2, 0, 1] and other.output is None


def test_error_in_a_pass_is_raised_where_it_is_resumed() -> None:
    def fail() -> None:
        raise ValueError("a broken layer")

    with pytest.raises(ValueError, match="a broken layer"):
        PausedForward(fail, torch.device("cpu")).advance(0)
