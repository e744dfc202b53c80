"""What a loss is, by its gradients: a mean or a sum, over examples or over elements, or neither."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memfit.verification import LossNature
from memfit.verify.worker.equality import Equality
from memfit.verify.worker.examples import Splitter
from memfit.verify.worker.gradients import Sketch, fits, mixture
from memfit.verify.worker.randomness import Draws
from memfit.verify.worker.subject import Subject

_MARGIN = 100.0
"""Times the tolerance of a gradient that a weighted sum of examples may be off."""
_ALIKE = 1e-3
"""Relative difference of weights that are taken to be the same."""


def loss_nature(
    subject: Subject, batch: Any, splitter: Splitter, size: int, equality: Equality
) -> tuple[LossNature, str]:
    """Compute every example alone, and express the batch's gradient by theirs.

    Returns:
        The nature, and words on examples whose own loss is no number (empty when there are none).
    """
    shapes = {n: p.numel() for n, p in subject.model.named_parameters() if p.requires_grad}
    sketch = Sketch(shapes, seed=1)
    whole = sketch.of(equality.whole)
    parts, broken = [], []
    examples = splitter.cut(batch, (1,) * size)
    for index, example in enumerate(examples):
        try:
            with Draws(still=True):
                gradient, _ = subject.physical(example)
        except Exception:  # noqa: BLE001 - a layer that refuses a single example shows nothing
            return LossNature(kind="unknown", over=None), ""
        parts.append(sketch.of(gradient))
        if not bool(torch.isfinite(parts[-1]).all()):
            broken.append(index + 1)
    if broken:
        words = f": examples {', '.join(map(str, broken))} alone have a loss that is no number"
        return LossNature(kind="unknown", over=None), words
    counts: tuple[int, ...] = ()
    if subject.workload.counts_elements():
        counts = tuple(subject.counts(examples, (1,) * size))
    return _nature(whole, parts, counts, limit=_MARGIN * equality.tolerance()), ""


def _nature(  # noqa: PLR0911 - one return a hypothesis
    whole: torch.Tensor, parts: Sequence[torch.Tensor], counts: tuple[int, ...], *, limit: float
) -> LossNature:
    size = len(parts)
    total = sum(counts)
    if counts and total and fits(whole, parts, [c / total for c in counts]) <= limit:
        weights = tuple(c / total for c in counts)
        return LossNature(kind="mean", over="elements", weights=weights, counts=counts, factor=1.0)
    if fits(whole, parts, [1 / size] * size) <= limit:
        return LossNature(
            kind="mean", over="examples", weights=(1 / size,) * size, counts=counts, factor=1.0
        )
    if fits(whole, parts, [1.0] * size) <= limit:
        return LossNature(
            kind="sum", over="elements", weights=(1.0,) * size, counts=counts, factor=float(size)
        )
    solved = mixture(whole, parts)
    if solved.residual > limit:
        return LossNature(kind="coupled", over=None, counts=counts)
    if solved.weights is None:
        return LossNature(kind="unknown", over=None, counts=counts)
    factor = sum(solved.weights)
    if abs(factor - 1) <= _ALIKE and min(solved.weights) > -_ALIKE:
        return LossNature(
            kind="mean", over="elements", weights=solved.weights, counts=counts, factor=1.0
        )
    return LossNature(
        kind="scaled", over="elements", weights=solved.weights, counts=counts, factor=factor
    )
