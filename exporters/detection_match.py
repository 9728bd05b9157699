"""Compare the detections of a file with those of the detector: pair them by label and box, then compare the pairs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

SCORE_FLOOR = 0.05  # detections with lower scores are not compared
MAX_PIXELS, MAX_SCORE_DIFFERENCE, MIN_MASK_OVERLAP = 0.5, 1e-3, 0.99


@dataclass(frozen=True)
class Detections:
    """The detections on one image; masks have the size of the image."""

    boxes: Tensor
    scores: Tensor
    labels: Tensor
    masks: Tensor | None = None


@dataclass
class DetectionMatch:
    """The largest differences between the detections of file and detector; the fields are keys in report.json."""

    images: int = 0
    compared: int = 0  # pairs with at least one score above SCORE_FLOOR
    pixels: float = 0.0  # largest difference of a box coordinate
    score: float = 0.0  # largest difference of scores
    overlap: float | None = None  # smallest intersection over union of two masks
    edge: int = 0  # unpaired detections that are allowed: within tolerance of the score threshold or the top-k cutoff
    wrong: list[str] = field(default_factory=list)  # a sentence for each difference above tolerance

    def __str__(self) -> str:
        masks = "" if self.overlap is None else f", masks share {self.overlap:.4f}"
        edge = f"; {self.edge} at the limit left out" if self.edge else ""
        return (
            f"{self.pixels:.1e} px, scores {self.score:.1e}{masks} ({self.compared} detections on {self.images} "
            f"images{edge})"
        )


@dataclass(frozen=True)
class DetectionLimits:
    """Limits that a detector applies to its detections on an image."""

    min_score: float = 0.0
    max_detections: int | None = None
    mask_threshold: float = 0.5


def match_detections(
    images: Iterable[tuple[str, Detections, Detections]], limits: DetectionLimits | None = None
) -> DetectionMatch:
    """Compare detections image by image.

    Args:
        images: (name of the image, detections of the detector, detections of the file).
        limits: those of the detector. A detection close to a limit may be present on one side only.
    """
    limits = limits or DetectionLimits()
    total = DetectionMatch()
    for name, expected, actual in images:
        total.images += 1
        partners = dict(_pair_by_label_and_box(expected, actual))
        _compare_pairs_(total, name, expected, actual, partners)
        unpaired = sorted(set(range(len(expected.scores))) - set(partners))
        _check_unpaired_(total, f"{name}: the file does not find", expected, unpaired, actual, limits)
        unpaired = sorted(set(range(len(actual.scores))) - set(partners.values()))
        _check_unpaired_(total, f"{name}: only the file finds", actual, unpaired, expected, limits)
    return total


def _compare_pairs_(
    total: DetectionMatch, name: str, expected: Detections, actual: Detections, partners: dict[int, int]
) -> None:
    """Add the differences between paired detections of an image to the total."""
    for a, b in partners.items():
        if max(float(expected.scores[a]), float(actual.scores[b])) <= SCORE_FLOOR:
            continue
        pixels = float((expected.boxes[a] - actual.boxes[b]).abs().max())
        score = float((expected.scores[a] - actual.scores[b]).abs())
        total.compared += 1
        total.pixels, total.score = max(total.pixels, pixels), max(total.score, score)
        described = _describe_detection(expected, a)
        if score > MAX_SCORE_DIFFERENCE:
            total.wrong.append(f"{name}: the score of {described} is {float(actual.scores[b]):.4f} in the file")
        if expected.masks is not None and actual.masks is not None:
            overlap = _mask_iou(expected.masks[a], actual.masks[b])
            total.overlap = overlap if total.overlap is None else min(total.overlap, overlap)
            if overlap < MIN_MASK_OVERLAP:
                total.wrong.append(f"{name}: the mask of {described} shares {overlap:.3f} with that of the file")


def _check_unpaired_(
    total: DetectionMatch,
    problem: str,
    detections: Detections,
    unpaired: Iterable[int],
    other: Detections,
    limits: DetectionLimits,
) -> None:
    """Report detections without a partner, except where the other side may have dropped them at a limit."""
    is_full = limits.max_detections is not None and len(other.scores) >= limits.max_detections
    cutoff = float(other.scores.min()) if is_full and len(other.scores) else 0.0
    threshold = max(SCORE_FLOOR, limits.min_score, cutoff)
    for i in unpaired:
        score = float(detections.scores[i])
        if score > threshold + MAX_SCORE_DIFFERENCE:
            total.wrong.append(f"{problem} {_describe_detection(detections, i)}")
        elif score > SCORE_FLOOR:
            total.edge += 1


def _pair_by_label_and_box(expected: Detections, actual: Detections) -> Iterator[tuple[int, int]]:
    """Pair each expected detection, best first, with the nearest unpaired box of the same label."""
    if not len(expected.scores) or not len(actual.scores):
        return
    pixels = (expected.boxes[:, None] - actual.boxes[None]).abs().amax(2)
    # Of two detections in the same place, the one with the nearer score is the partner.
    distance = pixels + (expected.scores[:, None] - actual.scores[None]).abs()
    distance[(expected.labels[:, None] != actual.labels[None]) | (pixels > MAX_PIXELS)] = torch.inf
    for a in expected.scores.argsort(descending=True).tolist():
        b = int(distance[a].argmin())
        if distance[a, b] < torch.inf:
            distance[:, b] = torch.inf
            yield a, b


def _mask_iou(a: Tensor, b: Tensor) -> float:
    union = float((a | b).sum())
    return float((a & b).sum()) / union if union else 1.0


def _describe_detection(detections: Detections, i: int) -> str:
    box = ", ".join(f"{x:.1f}" for x in detections.boxes[i].tolist())
    return f"label {int(detections.labels[i])} at [{box}] with score {float(detections.scores[i]):.4f}"
