"""Controller: an LSTM that draws the widths of all groups, one after the other, trained by REINFORCE.

Its input for a group is the embedding of the decision before, the number of the group (one-hot) and the budget that is
left if all groups to come get their smallest candidate. For drawn widths a with reward R, and a moving average b of the
rewards, theta ascends

    (R - b) grad log p(a) + entropy_weight grad H

where H is the entropy of the conditional distributions on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

HIDDEN, LAYERS = 100, 2
INITIAL_RANGE = 0.1  # parameters start uniformly in (-0.1, 0.1)
IMPOSSIBLE = -1e9  # logit of a candidate that a group does not have
Ratio = Callable[[Tensor], Tensor]  # choices (draws, groups) -> B(a) / B


class Draw(NamedTuple):
    """Drawn candidates of all groups; the first dimension counts the draws."""

    choices: Tensor  # (draws, groups): index of a candidate
    log_probability: Tensor  # (draws): of all choices together
    entropy: Tensor  # (draws): sum over groups, of the distribution that a choice was drawn from
    probabilities: Tensor  # (draws, groups, candidates)


class Controller(nn.Module):
    """Distribution of the widths of all groups.

    Args:
        counts: candidates of each group.
        ratio: returns the cost of choices relative to the budget.
        generator: of the initial parameters.
    """

    possible: Tensor

    def __init__(self, counts: Sequence[int], ratio: Ratio, generator: torch.Generator) -> None:
        super().__init__()
        self.ratio, most = ratio, max(counts)
        self.embedding = nn.Embedding(most + 1, HIDDEN)  # the last row stands for no decision yet
        sizes = [HIDDEN + len(counts) + 1, *[HIDDEN] * (LAYERS - 1)]
        self.cells = nn.ModuleList(nn.LSTMCell(size, HIDDEN) for size in sizes)
        self.output = nn.Linear(HIDDEN, most)
        self.register_buffer("possible", torch.arange(most) < torch.tensor(counts)[:, None])
        with torch.no_grad():
            for p in self.parameters():
                p.copy_((2 * torch.rand(p.shape, generator=generator) - 1) * INITIAL_RANGE)

    def forward(self, numbers: Tensor) -> Draw:
        """Draw choices from numbers (draws, groups) in [0, 1), by the inverse of the cumulative probabilities."""
        return self._run(lambda g, p: _inverse_cumulative(p, numbers[:, g], self.possible[g]), len(numbers))

    def evaluate(self, choices: Tensor) -> Draw:
        """Return the probabilities of given choices (draws, groups)."""
        return self._run(lambda g, p: choices[:, g], len(choices))

    @torch.no_grad()
    def marginals(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probability of each candidate of each group, and the entropy, as means over draws."""
        draw = self(numbers)
        return draw.probabilities.mean(0), draw.entropy.mean()

    def _run(self, choose: Callable[[int, Tensor], Tensor], draws: int) -> Draw:
        num_groups, device = len(self.possible), self.possible.device
        zeros = self.output.weight.new_zeros
        states = [(zeros(draws, HIDDEN), zeros(draws, HIDDEN))] * LAYERS
        choices = torch.zeros(draws, num_groups, dtype=torch.long, device=device)  # 0 is the smallest candidate
        previous = torch.full((draws,), self.embedding.num_embeddings - 1, dtype=torch.long, device=device)
        log_probability, entropy = zeros(draws), zeros(draws)
        probabilities = []
        for g in range(num_groups):
            group = zeros(draws, num_groups)
            group[:, g] = 1
            left = 1 - self.ratio(choices).to(group)[:, None]
            x = torch.cat([self.embedding(previous), group, left], 1)
            for i, cell in enumerate(self.cells):
                states = [*states[:i], cell(x, states[i]), *states[i + 1 :]]
                x = states[i][0]
            log_p = self.output(x).masked_fill(~self.possible[g], IMPOSSIBLE).log_softmax(1)
            p = log_p.exp()
            previous = choose(g, p.detach())
            choices = choices.clone()
            choices[:, g] = previous
            log_probability = log_probability + log_p.gather(1, previous[:, None])[:, 0]
            entropy = entropy - (p * log_p).sum(1)
            probabilities.append(p.detach())
        return Draw(choices, log_probability, entropy, torch.stack(probabilities, 1))


def _inverse_cumulative(p: Tensor, numbers: Tensor, possible: Tensor) -> Tensor:
    """Return the candidate in whose part of [0, 1) the number lies."""
    index = (p.cumsum(1) <= numbers[:, None]).sum(1)
    return torch.minimum(index, possible.sum() - 1)  # the sum of probabilities may be rounded below the number


def policy_loss(draw: Draw, rewards: Tensor, baseline: Tensor, entropy_weight: float) -> Tensor:
    """Return the loss whose negative gradient is REINFORCE's ascent direction, as a mean over the draws."""
    advantage = (rewards - baseline).to(draw.log_probability.dtype)
    return -(advantage * draw.log_probability + entropy_weight * draw.entropy).mean()


@torch.no_grad()
def update_baseline_(baseline: Tensor, count: Tensor, reward: Tensor, decay: float) -> None:
    """Update the moving average of the rewards, which starts at the first one; `count` counts the updates."""
    baseline.copy_(torch.where(count == 0, reward, decay * baseline + (1 - decay) * reward))
    count.add_(1)
