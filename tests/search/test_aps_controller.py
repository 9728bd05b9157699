"""The controller: REINFORCE against enumeration, draws against probabilities, the best widths of a known reward."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from compress.search.aps.controller import Controller, Draw, policy_loss, update_baseline_
from compress.search.aps.width_cost import reward

WIDTHS = torch.tensor([[2.0, 4.0, 8.0], [3.0, 6.0, 12.0]])


def ratio(choices: Tensor) -> Tensor:
    """Cost of a chain of two layers with these widths, relative to half of the largest."""
    chosen = WIDTHS.gather(1, choices.T).T
    return (3 * chosen[:, 0] + chosen[:, 0] * chosen[:, 1] + 2 * chosen[:, 1]) / 72


def controller(counts: tuple[int, ...] = (3, 3), seed: int = 0, spread: float = 1.0) -> Controller:
    made = Controller(counts, ratio, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for p in made.parameters():
            p.mul_(spread)
    return made


def all_choices(counts: tuple[int, ...] = (3, 3)) -> Tensor:
    return torch.tensor(list(product(*map(range, counts))))


@pytest.mark.parametrize("baseline", [0.0, 0.7])
def test_expected_gradient_of_reinforce_is_that_of_the_expected_reward(baseline: float) -> None:
    policy = controller(spread=4.0).double()
    policy.ratio = lambda choices: ratio(choices).double()
    choices, entropy_weight = all_choices(), 0.3
    rewards = torch.rand(9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parameters = list(policy.parameters())
    draw = policy.evaluate(choices)
    probabilities = draw.log_probability.detach().exp()
    assert float(probabilities.sum()) == pytest.approx(1, abs=1e-6)
    enumerated = torch.autograd.grad((draw.log_probability.exp() * rewards).sum(), parameters)
    mean = [torch.zeros_like(p) for p in parameters]
    mean_entropy = [torch.zeros_like(p) for p in parameters]
    for i, p in enumerate(probabilities):
        one = policy.evaluate(choices[i : i + 1])
        with_entropy = torch.autograd.grad(
            -policy_loss(one, rewards[i : i + 1], torch.tensor(baseline), entropy_weight), parameters, retain_graph=True
        )
        entropy = torch.autograd.grad(one.entropy.sum(), parameters)
        for total, total_entropy, g, h in zip(mean, mean_entropy, with_entropy, entropy, strict=True):
            total += p * (g - entropy_weight * h)
            total_entropy += p * h
    for g, expected in zip(mean, enumerated, strict=True):
        assert torch.allclose(g, expected, rtol=1e-5, atol=1e-9)
    assert any(float(h.abs().max()) > 1e-6 for h in mean_entropy)


def test_draws_have_their_probabilities() -> None:
    policy = controller(spread=6.0)
    exact = policy.evaluate(all_choices()).log_probability.exp().detach()
    draw = policy(torch.rand(20000, 2, generator=torch.Generator().manual_seed(0)))
    counts = torch.bincount(draw.choices[:, 0] * 3 + draw.choices[:, 1], minlength=9) / 20000
    assert float((counts - exact).abs().max()) < 0.012
    again = policy.evaluate(draw.choices[:50])
    assert torch.allclose(again.log_probability, draw.log_probability[:50], atol=1e-5)
    marginals, entropy = policy.marginals(torch.rand(4096, 2, generator=torch.Generator().manual_seed(1)))
    for g in range(2):
        expected = torch.stack([exact[all_choices()[:, g] == k].sum() for k in range(3)])
        assert torch.allclose(marginals[g], expected, atol=0.01)
    assert float(entropy) == pytest.approx(float(-(exact * exact.log()).sum()), abs=0.02)


def test_candidates_that_a_group_lacks_are_never_drawn() -> None:
    policy = Controller((2, 3), lambda choices: torch.zeros(len(choices)), torch.Generator().manual_seed(0))
    numbers = torch.cat([torch.rand(500, 2), torch.full((1, 2), 1 - 2**-24), torch.zeros(1, 2)])
    draw = policy(numbers)
    assert int(draw.choices[:, 0].max()) == 1 and int(draw.choices[:, 1].max()) == 2
    assert float(draw.probabilities[:, 0, 2].max()) == 0
    assert bool(draw.entropy.isfinite().all())


def train(policy: Controller, reward_of: Callable[[Tensor], Tensor], steps: int, entropy: float = 0.0) -> Draw:
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3, betas=(0.5, 0.999))
    baseline, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        draw = policy(torch.rand(4, 2, generator=generator))
        rewards = reward_of(draw.choices)
        optimizer.zero_grad()
        policy_loss(draw, rewards, baseline, entropy).backward()
        optimizer.step()
        update_baseline_(baseline, count, rewards.mean(), 0.9)
    return policy(torch.rand(64, 2, generator=generator))


@pytest.mark.parametrize("best", [(0, 2), (1, 1), (2, 0)])
def test_controller_finds_the_best_widths_of_a_known_reward(best: tuple[int, int]) -> None:
    target = torch.tensor(best)
    draw = train(controller(), lambda choices: 1.0 - 0.2 * (choices - target).abs().sum(1).double(), 250)
    assert bool((draw.choices == target).all(1).double().mean() > 0.95)


def test_controller_maximizes_equation_11_within_the_budget() -> None:
    """Accuracy grows with both widths, and a strong beta makes everything above the budget worse."""

    def reward_of(choices: Tensor) -> Tensor:
        accuracy = 0.5 + 0.1 * choices[:, 0].double() + 0.12 * choices[:, 1].double()
        return reward(accuracy, ratio(choices).double(), 0.0, -2.0)

    everything = all_choices()
    best = everything[reward_of(everything).argmax()]
    assert float(ratio(best[None])) <= 1
    draw = train(controller(seed=1), reward_of, 300)
    assert bool((draw.choices == best).all(1).double().mean() > 0.9)


def test_entropy_keeps_the_policy_spread() -> None:
    target = torch.tensor([2, 2])
    reward_of = lambda choices: 1.0 - 0.2 * (choices - target).abs().sum(1).double()  # noqa: E731
    sharp, spread = train(controller(), reward_of, 250), train(controller(), reward_of, 250, entropy=1.0)
    assert float(spread.entropy.detach().mean()) > 1.5 > 0.5 > float(sharp.entropy.detach().mean())


def test_baseline_is_the_moving_average_that_starts_at_the_first_reward() -> None:
    baseline, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    expected = None
    for value in (0.4, 0.8, 0.1, 0.9):
        expected = value if expected is None else 0.99 * expected + 0.01 * value
        update_baseline_(baseline, count, torch.tensor(value, dtype=torch.float64), 0.99)
        assert float(baseline) == pytest.approx(expected, abs=1e-12)


def test_parameters_start_uniformly_between_minus_and_plus_a_tenth() -> None:
    values = torch.cat([p.detach().flatten() for p in controller().parameters()])
    assert float(values.abs().max()) <= 0.1
    assert float(values.std()) == pytest.approx(0.1 / 3**0.5, rel=0.02)
    again = torch.cat([p.detach().flatten() for p in controller().parameters()])
    assert torch.equal(values, again)
