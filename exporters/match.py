"""Detections against detections: paired by label and place, in both directions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

FLOOR = 0.05  # the score above which detections are compared
PIXELS, SCORE, OVERLAP = 0.5, 1e-3, 0.99  # what boxes and scores may be off, what masks must share


@dataclass(frozen=True)
class Found:
    """What was found on one image; masks are maps of it."""

    boxes: Tensor
    scores: Tensor
    labels: Tensor
    masks: Tensor | None = None


@dataclass
class Matched:
    """How far detections are off on some images."""

    images: int = 0
    compared: int = 0  # pairs of which one or the other is above the floor
    pixels: float = 0.0  # the most that a corner is off
    score: float = 0.0
    overlap: float | None = None  # the least intersection over union of two masks
    edge: int = 0  # found by one side only, with a score that is at its limit within the tolerance
    wrong: list[str] = field(default_factory=list)  # what is over tolerance, in words

    def __str__(self) -> str:
        masks = "" if self.overlap is None else f", masks share {self.overlap:.4f}"
        edge = f"; {self.edge} at the limit left out" if self.edge else ""
        return (
            f"{self.pixels:.1e} px, scores {self.score:.1e}{masks} ({self.compared} detections on {self.images} "
            f"images{edge})"
        )


def match(pairs: Iterable[tuple[str, Found, Found]], least: float = 0.0, most: int | None = None) -> Matched:
    """Compare what the detector and the file find, image by image.

    `least` is the score below which neither says anything, `most` the number of detections at which both stop: what is
    that near to either may be there or not.
    """
    total = Matched()
    for name, right, here in pairs:
        total.images += 1
        _match_(total, name, right, here, least, most)
    return total


def _match_(total: Matched, name: str, right: Found, here: Found, least: float, most: int | None) -> None:
    partner = dict(_pairs(right, here))
    for a, b in partner.items():
        if max(float(right.scores[a]), float(here.scores[b])) <= FLOOR:
            continue
        off = float((right.boxes[a] - here.boxes[b]).abs().max())
        score = float((right.scores[a] - here.scores[b]).abs())
        total.compared += 1
        total.pixels, total.score = max(total.pixels, off), max(total.score, score)
        if score > SCORE:
            total.wrong.append(f"{name}: the score of {_said(right, a)} is {float(here.scores[b]):.4f} in the file")
        if right.masks is not None and here.masks is not None:
            share = _overlap(right.masks[a], here.masks[b])
            total.overlap = share if total.overlap is None else min(total.overlap, share)
            if share < OVERLAP:
                total.wrong.append(f"{name}: the mask of {_said(right, a)} shares {share:.3f} with that of the file")
    sides = (
        (right, set(range(len(right.scores))) - set(partner), here, "the file does not find"),
        (
            here,
            set(range(len(here.scores))) - set(partner.values()),
            right,
            "the file finds, and the detector does not,",
        ),
    )
    for found, alone, other, words in sides:
        full = most is not None and len(other.scores) >= most
        limit = max(FLOOR, least, float(other.scores.min()) if full and len(other.scores) else 0.0)
        for i in sorted(alone):
            if float(found.scores[i]) > limit + SCORE:
                total.wrong.append(f"{name}: {words} {_said(found, i)}")
            elif float(found.scores[i]) > FLOOR:
                total.edge += 1


def _pairs(right: Found, here: Found) -> Iterable[tuple[int, int]]:
    """The best first, each with the nearest box of its label that is free."""
    if not len(right.scores) or not len(here.scores):
        return
    off = (right.boxes[:, None] - here.boxes[None]).abs().amax(2)
    far = off + (right.scores[:, None] - here.scores[None]).abs()  # of two in one place, the one with its score
    far[(right.labels[:, None] != here.labels[None]) | (off > PIXELS)] = torch.inf
    for a in right.scores.argsort(descending=True).tolist():
        b = int(far[a].argmin())
        if far[a, b] < torch.inf:
            far[:, b] = torch.inf
            yield a, b


def _overlap(a: Tensor, b: Tensor) -> float:
    either = float((a | b).sum())
    return float((a & b).sum()) / either if either else 1.0


def _said(found: Found, i: int) -> str:
    box = ", ".join(f"{x:.1f}" for x in found.boxes[i].tolist())
    return f"label {int(found.labels[i])} at [{box}] with score {float(found.scores[i]):.4f}"
