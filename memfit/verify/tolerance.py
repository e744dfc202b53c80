"""How far two sums of the same terms may lie apart when only rounding tells them apart."""

from __future__ import annotations

import math

UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24}
"""Half the distance from 1 to the next number of each type."""

_LAMBDA = 8.0
_MARGIN = 32.0


def tolerance(dtype: str, *, terms: int, amplification: float) -> float:
    """Return the largest relative error that rounding explains.

    A sum of `n` terms, each rounded at random, is off by at most `lambda * sqrt(n) * u` of the sum
    of their magnitudes, except with probability `2 exp(-lambda**2 / 2)` (Higham and Mary 2019, "A
    new approach to probabilistic rounding error analysis", theorem 2.4); `lambda` is 8. A network
    is no single sum: what it does to rounding is not bounded but measured, as the error of the
    same gradient in float32, counted in units of roundoff, and allowed 32 times.

    Args:
        dtype: `float64` or `float32`, the type that both sides were computed in.
        terms: Terms that one entry of a gradient is a sum of, at most.
        amplification: The measured error of one gradient, in units of roundoff.
    """
    return UNIT_ROUNDOFF[dtype] * (_LAMBDA * math.sqrt(terms) + _MARGIN * amplification)
