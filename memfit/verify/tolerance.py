"""How far two sums of the same terms may lie apart when only rounding tells them apart."""

from __future__ import annotations

import math

UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24}
"""Half the distance from 1 to the next number of each type."""

_LAMBDA = 8.0
_MARGIN = 32.0
_TRAINS = 0.01
"""Relative error of a gradient in float32 that training survives."""
_LEAST = {"float64": _TRAINS / UNIT_ROUNDOFF["float32"], "float32": 1.0}
"""Least amplification that is allowed for, in units of roundoff: in float64 that of any network
that trains in float32, for one measurement may be lucky; the other type has no digits to spare."""


def tolerance(dtype: str, *, terms: int, amplification: float) -> float:
    """Return the largest relative error that rounding explains.

    A sum of `n` terms, each rounded at random, is off by at most `lambda * sqrt(n) * u` of the sum
    of their magnitudes, except with probability `2 exp(-lambda**2 / 2)` (Higham and Mary 2019, "A
    new approach to probabilistic rounding error analysis", theorem 2.4); `lambda` is 8. A network
    is no single sum: what it does to rounding is not bounded but measured, as the error of the
    same gradient in float32, counted in units of roundoff, and allowed 32 times. In float64 at
    least the amplification is allowed for that leaves a gradient in float32 two digits, which
    puts the tolerance at 6e-10: far above rounding, and far below an error of one percent.

    Args:
        dtype: `float64` or `float32`, the type that both sides were computed in.
        terms: Terms that one entry of a gradient is a sum of, at most.
        amplification: The measured error of one gradient, in units of roundoff.
    """
    allowed = max(amplification, _LEAST[dtype])
    return UNIT_ROUNDOFF[dtype] * (_LAMBDA * math.sqrt(terms) + _MARGIN * allowed)
