"""DARTS of first and second order: equilibria of example 2.4, the formulas of each update."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.solvable_model import start_search, trajectory
from compress.search.darts import Darts1, Darts2
from helpers.bilevel import as_leaves, batch_pair, gradient, loss_at, started_search


def test_first_order_darts_goes_to_the_spurious_equilibrium() -> None:
    search = start_search(Darts1, start=(1.9, 1.8), lr=0.05)
    assert trajectory(search, 2000)[-1] == pytest.approx([2, 2], abs=1e-3)


def test_second_order_darts_looks_ahead_and_comes_nearer() -> None:
    """With xi = 1/2 the step ahead lands on the inner minimiser w*(a) = a: the true (1, 1)."""
    search = start_search(Darts2, lr=0.5, alpha={"lr": 0.05})
    assert trajectory(search, 800)[-1] == pytest.approx([1, 1], abs=1e-3)


@pytest.mark.parametrize("method", ["darts1", "milenas"])
def test_each_update_of_darts1_and_milenas_is_the_written_formula(method: str) -> None:
    search = started_search(method, **({"lambda": 0.6} if method == "milenas" else {}))
    primary, auxiliary = batch_pair()
    w, alpha = as_leaves(search.weights), as_leaves(search.alpha)
    w1 = [a - 0.05 * g for a, g in zip(w, gradient(loss_at(search, w, alpha, auxiliary), w), strict=True)]
    loss = loss_at(search, as_leaves(w1), alpha, primary)
    if method == "milenas":
        loss = 0.6 * loss + loss_at(search, as_leaves(w1), alpha, auxiliary)
    a1 = [a - 0.05 * (g + 0.2 * a.sign()) for a, g in zip(alpha, gradient(loss, alpha), strict=True)]
    search.step((primary, auxiliary))
    for got, expected in ((search.weights, w1), (search.alpha, a1)):
        for p, q in zip(got, expected, strict=True):
            assert torch.allclose(p, q, rtol=0, atol=1e-12)


def test_mixed_term_of_darts2_is_the_hessian_vector_product() -> None:
    """Smooth activations, so that the finite difference has a limit to agree with."""
    search = started_search("darts2")
    for i in (1, 3):
        search.job.model[i] = nn.Tanh()
    search.optimizer.param_groups[0]["lr"] = 0.05
    primary, auxiliary = batch_pair()
    w, alpha = as_leaves(search.weights), as_leaves(search.alpha)
    gw = torch.autograd.grad(loss_at(search, w, alpha, auxiliary), w, create_graph=True)
    ahead = [(a - 0.05 * g) for a, g in zip(w, gw, strict=True)]
    exact = gradient(loss_at(search, ahead, alpha, primary), alpha)  # through the step of the weights
    plain = gradient(loss_at(search, as_leaves(ahead), alpha, primary), alpha)
    _, got = search.look_ahead(primary, auxiliary, [g.detach() for g in gw])
    for a, b, c in zip(exact, got, plain, strict=True):
        assert float((a - c).abs().max()) > 1e-6, "the mixed term is not to be lost in rounding"
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float((a - c).abs().max()))
    for p, q in zip(search.weights, w, strict=True):
        assert torch.equal(p, q)
