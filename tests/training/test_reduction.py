"""Gradients of two processes are those of all samples, whatever a process uses and however often it has to repeat."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.reduced_gradients import overflowing_gradients, parameters, per_sample_losses, reduced_gradients, samples
from helpers.two_processes import run_in_two_processes


def test_processes_reduce_to_the_gradients_of_all_samples(tmp_path: Path) -> None:
    """The oracle: one backward pass over the samples of both processes."""
    weights = parameters()
    losses = [per_sample_losses(samples(number), weights, number == 1) for number in range(2)]
    loss = torch.cat(losses).mean()
    exact = torch.autograd.grad(loss, weights, allow_unused=True)
    reports = run_in_two_processes(reduced_gradients, tmp_path)
    for case in ("whole", "micro", "forward", "backward"):
        for report in reports:
            found = report[case]
            assert found["unused"] == [False, False, False, True]
            assert found["loss"] == pytest.approx(loss.item(), rel=1e-12)
            assert found["clean"]
            for ours, oracle in zip(found["gradients"], exact, strict=True):
                expected = [0.0] * 16 if oracle is None else oracle.flatten().tolist()
                assert ours == pytest.approx(expected, rel=1e-10, abs=1e-13)
    parts = {case: [report[case]["parts"] for report in reports] for case in reports[0]}
    assert parts == {"whole": [1, 1], "micro": [3, 3], "forward": [1, 2], "backward": [1, 2]}


def test_an_overflow_in_one_process_lowers_the_loss_scale_of_both(tmp_path: Path) -> None:
    reports = run_in_two_processes(overflowing_gradients, tmp_path)
    assert reports[0] == reports[1]
    assert reports[0]["scale"] < 2.0**16
    assert reports[0]["gradient"] == [2.5, 2.5]
