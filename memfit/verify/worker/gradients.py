"""Comparing gradients: norms, errors, and the weights with which examples enter a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

Gradient = dict[str, torch.Tensor]
"""Gradients by the name of their parameter; those that are None are left out."""

_PROJECTIONS = 16
_BLOCK = 1024
_RANK = 1e-6
"""Smallest singular value, relative to the largest, of gradients that determine their weights."""


def norm(gradient: Gradient) -> float:
    """Return the norm of the whole gradient."""
    return math.sqrt(sum(_norm(g) ** 2 for g in gradient.values()))


def _norm(value: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(value, dtype=torch.float64))


def is_finite(gradient: Gradient) -> bool:
    """Whether every entry is a number."""
    return all(bool(torch.isfinite(g).all()) for g in gradient.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far two gradients lie apart, relative to the whole gradient's norm."""

    error: float
    worst_parameter: str
    worst_error: float


def difference(a: Gradient, b: Gradient, scale: float) -> Difference:
    """Compare two gradients; what one of them lacks counts as zero."""
    total, worst, worst_name = 0.0, -1.0, ""
    for name in a.keys() | b.keys():
        left, right = a.get(name), b.get(name)
        if left is None or right is None:
            apart = sum(_norm(side) for side in (left, right) if side is not None)
        else:
            apart = _norm(left - right)
        total += apart**2
        if not apart <= worst:  # a NaN is the worst of all
            worst, worst_name = apart, name
    scale = scale or 1.0
    return Difference(
        error=math.sqrt(total) / scale, worst_parameter=worst_name, worst_error=worst / scale
    )


class Sketch:
    """Random projections of gradients: a few numbers a parameter, the same for all of them."""

    def __init__(self, shapes: dict[str, int], seed: int) -> None:
        """Fix the projections by a seed, for parameters of these numbers of entries."""
        self._shapes = dict(sorted(shapes.items()))
        self._seed = seed

    def of(self, gradient: Gradient) -> torch.Tensor:
        """Project a gradient; linear, so that sums of gradients have sums of sketches."""
        rows = [
            _project(gradient.get(name), entries, self._seed * 100_003 + index)
            for index, (name, entries) in enumerate(self._shapes.items())
        ]
        return torch.cat(rows)


def _project(value: torch.Tensor | None, entries: int, seed: int) -> torch.Tensor:
    """Project one parameter's gradient: blocks are added with random signs, then projected."""
    block = min(entries, _BLOCK)
    number = min(_PROJECTIONS, block)
    if value is None:
        return torch.zeros(number, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    flat = value.detach().flatten()
    rows = entries // block
    folded = (_signs(rows, generator).to(flat) @ flat[: rows * block].view(rows, block)).double()
    folded = folded.cpu()
    folded[: entries - rows * block] += flat[rows * block :].double().cpu()
    return _signs(number * block, generator).view(number, block) @ folded


def _signs(number: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, (number,), generator=generator, dtype=torch.float64) * 2 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The batch's gradient as a weighted sum of those of its examples."""

    weights: tuple[float, ...] | None
    """None where the examples' gradients do not determine them."""
    residual: float
    """What the sum leaves unexplained, relative to the sum of the norms."""


def fits(whole: torch.Tensor, parts: Sequence[torch.Tensor], weights: Sequence[float]) -> float:
    """Return the residual of a guess, relative to the sum of the norms of its terms."""
    made = sum((w * p for w, p in zip(weights, parts, strict=True)), torch.zeros_like(whole))
    terms = sum(abs(w) * float(p.norm()) for w, p in zip(weights, parts, strict=True))
    return float((whole - made).norm()) / max(terms, float(whole.norm())) if terms else math.inf


def mixture(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> Mixture:
    """Solve for the weights by least squares."""
    matrix = torch.stack(list(parts), dim=1)
    lengths = matrix.norm(dim=0)
    some = lengths > 0
    if not bool(some.any()):
        return Mixture(weights=None, residual=1.0)
    scaled = matrix[:, some] / lengths[some]
    solved = torch.linalg.lstsq(scaled, whole.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    residual = float((whole - scaled @ solved).norm()) / (float(whole.norm()) or 1.0)
    values = torch.linalg.svdvals(scaled)
    known = bool(some.all()) and scaled.shape[0] >= scaled.shape[1]
    if not known or float(values[-1]) < _RANK * float(values[0]):
        return Mixture(weights=None, residual=residual)
    return Mixture(weights=tuple(float(w) for w in solved / lengths), residual=residual)
