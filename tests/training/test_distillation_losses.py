"""The distillation loss against hand-computed numbers and its closed-form gradient."""

from __future__ import annotations

import math

import pytest
import torch

from compress.training.distillation_losses import distillation


def softmax(row: list[float], temperature: float) -> list[float]:
    numbers = [math.exp(value / temperature) for value in row]
    return [n / sum(numbers) for n in numbers]


def test_distillation_is_the_formula_on_hand_computed_numbers() -> None:
    student, teacher, t = [[1.0, 2.0, 0.5], [0.0, -1.0, 3.0]], [[2.0, 0.0, 1.0], [1.0, 1.0, 1.0]], 4.0
    total = 0.0
    for s, h in zip(student, teacher, strict=True):
        p, q = softmax(h, t), softmax(s, t)
        total += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    got = distillation(torch.tensor(student, dtype=torch.float64), torch.tensor(teacher, dtype=torch.float64), t)
    assert float(got) == pytest.approx(total / 2, rel=1e-12)


def test_distillation_on_numbers_worked_out_on_paper() -> None:
    """T = 1, teacher (1/2, 1/2), student (1/4, 3/4): 1/2 ln 2 + 1/2 ln 2/3."""
    student = torch.tensor([[0.0, math.log(3.0)]], dtype=torch.float64)
    teacher = torch.zeros(1, 2, dtype=torch.float64)
    expected = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert float(distillation(student, teacher, 1.0)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("temperature", [0, -1.0, math.nan, math.inf])
def test_distillation_refuses_a_temperature_that_is_not_positive(temperature: float) -> None:
    with pytest.raises(ValueError, match=f"expected a positive temperature, such as 4; got {temperature}"):
        distillation(torch.randn(2, 3), torch.randn(2, 3), temperature)


def test_distillation_refuses_a_teacher_that_would_be_stretched() -> None:
    wanted = r"expected logits of the same shape; got tensor\[8, 10\] of the student and tensor\[1, 10\] of the teacher"
    with pytest.raises(ValueError, match=wanted):
        distillation(torch.randn(8, 10), torch.randn(1, 10))


def test_teacher_as_its_own_student_has_no_loss() -> None:
    logits = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    loss = distillation(logits, logits.detach(), 4.0)
    assert abs(float(loss.detach())) < 1e-15
    (gradient,) = torch.autograd.grad(loss, logits)
    assert float(gradient.abs().max()) < 1e-15


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_gradient_of_distillation_agrees_with_finite_differences_and_the_closed_form(temperature: float) -> None:
    student = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(3, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda s: distillation(s, teacher, temperature), (student,))
    (gradient,) = torch.autograd.grad(distillation(student, teacher, temperature), student)
    p, q = (teacher / temperature).softmax(1), (student / temperature).softmax(1)
    assert torch.allclose(gradient, (q - p) / temperature / 3, atol=1e-14)
