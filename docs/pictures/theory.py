"""Draw the theory page: trajectories and rates of RARTS on a problem that is solved in closed form.

    python -m docs.pictures.theory

Runs for half a minute and writes theory.png.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from benchmarks import solvable_model as example
from compress.search.darts import Darts1
from compress.search.milenas import Milenas
from compress.search.rarts import Rarts

LAMBDA = BETA = 10.0
RARTS = {"lambda": LAMBDA, "beta": BETA}
START = (2.0, 0.0)
BLUE, ORANGE, GREEN, GREY = "#2460d8", "#e07b2c", "#2b8a3e", "#888888"


def trajectories(ax: Axes) -> None:
    """Draw the paths of three searches in the plane of weight and score."""
    for name, cls, color, settings in (
        ("RARTS", Rarts, BLUE, {**RARTS, "lr": 0.02}),
        ("first-order DARTS", Darts1, ORANGE, {"lr": 0.05}),
        ("MiLeNAS", Milenas, GREEN, {"lr": 0.05}),
    ):
        points = example.trajectory(example.start_search(cls, START, **settings), 1500)
        ax.plot(points[:, 0], points[:, -1], color=color, label=name, lw=1.5)
        ax.plot(points[-1, 0], points[-1, -1], "o", color=color, ms=5)
    ax.plot(1, 1, "*", color="black", ms=11, label="minimum (1, 1)")
    ax.plot(2, 2, "x", color="black", ms=8, label="spurious (2, 2)")
    ax.set(xlabel="weight w", ylabel="score a", title=f"Trajectories, lambda = beta = {LAMBDA:g}")
    ax.legend(frameon=False, fontsize=8)


def rates(ax: Axes) -> None:
    """Draw the gap of the Lagrangian against the step, beside the rate and its bound."""
    steps, lr = 600, 0.02
    search = example.start_search(Rarts, START, **RARTS, lr=lr)
    gap = example.lagrangian_gap(example.trajectory(search, steps), LAMBDA, BETA)
    t = np.arange(steps + 1)
    late = steps // 2
    ax.semilogy(t, gap, color=BLUE, label="measured")
    rate, bound = (f(LAMBDA, BETA, lr) for f in (example.linear_rate, example.rate_bound))
    ax.semilogy(t, gap[late] * rate ** (t - late), "--", color="black", lw=1, label=f"rate {rate:.4f}, closed form")
    ax.semilogy(t, gap[0] * bound**t, ":", color=GREY, label=f"bound {bound:.5f}, corollary 2.6")
    ax.set(xlabel="step", ylabel="L - L*", title="Full gradients", ylim=(1e-9, None))
    ax.legend(frameon=False, fontsize=8)


def noisy_rates(ax: Axes) -> None:
    """Draw the mean gap over noisy runs at three learning rates, beside the level that it falls to."""
    runs, steps, sigma = 40, 400, 0.5
    random = np.random.default_rng(0)
    for lr, color in ((0.02, ORANGE), (0.01, BLUE), (0.005, GREEN)):
        gaps = [
            example.lagrangian_gap(
                example.trajectory(
                    example.start_search(Rarts, START, **RARTS, lr=lr), steps, lambda: sigma * random.standard_normal()
                ),
                LAMBDA,
                BETA,
            )
            for _ in range(runs)
        ]
        ax.semilogy(np.mean(gaps, 0), color=color, lw=1, label=f"lr {lr:g}")
        ax.axhline(example.noise_floor(LAMBDA, BETA, lr, sigma), color=color, ls="--", lw=1)
    ax.set(xlabel="step", ylabel="mean of L - L*", title=f"Noisy gradients, {runs} runs; dashed: closed form")
    ax.legend(frameon=False, fontsize=8)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    figure, axes = plt.subplots(1, 3, figsize=(13, 4))
    for draw, ax in zip((trajectories, rates, noisy_rates), axes, strict=True):
        draw(ax)
        ax.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
