"""Which splits of the batch are compared."""

from __future__ import annotations

from memfit.errors import UsageError

DEFAULT_LOGICAL_BATCH = 8
"""Examples of the physical batch unless the user says otherwise: small, and with uneven splits."""
FEWEST = 3
"""Examples where that many take long: still with an uneven split, 2+1."""
_LEAST = 2


def default_logical_batch(microbatch: int | None) -> int:
    """Return the examples of the physical batch where they are not named."""
    return DEFAULT_LOGICAL_BATCH if microbatch is None else 4 * max(1, microbatch)


def choose_splits(logical_batch: int, microbatch: int | None) -> tuple[tuple[int, ...], ...]:
    """Return the sizes of the microbatches of each split, the one asked for first.

    One split is as equal as the batch allows and two are not; 8 examples at microbatch 2 are
    2+2+2+2, 3+3+2 and 5+2+1.

    Raises:
        UsageError: When there is nothing to accumulate.
    """
    if logical_batch < _LEAST:
        raise UsageError(
            f"a logical batch of {logical_batch} has nothing to accumulate",
            hint=f"the smallest is {_LEAST}",
        )
    size = max(1, logical_batch // 4) if microbatch is None else microbatch
    if not 1 <= size < logical_batch:
        raise UsageError(
            f"a microbatch of {size} does not split {logical_batch} examples",
            hint=f"it is from 1 to {logical_batch - 1}",
        )
    whole, rest = divmod(logical_batch, size)
    asked = (size,) * whole + ((rest,) if rest else ())
    steps = -(-logical_batch // (size + 1))
    base, larger = divmod(logical_batch, steps) if steps > 1 else (0, 0)
    ragged = (base + 1,) * larger + (base,) * (steps - larger) if steps > 1 else ()
    return tuple(s for s in dict.fromkeys((asked, ragged, _lopsided(logical_batch))) if s)


def _lopsided(logical_batch: int) -> tuple[int, ...]:
    """Cut off a half and one more, again and again."""
    sizes = []
    left = logical_batch
    while left:
        size = min(left, left // 2 + 1)
        sizes.append(size if left != logical_batch or size < left else left - 1)
        left -= sizes[-1]
    return tuple(sizes)
