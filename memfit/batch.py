"""Arithmetic of the logical batch: candidate sizes, splits and the weights of microbatches.

With a logical batch of `B` examples over `D` replicas, one replica takes `b = B / D` of them per
optimizer step, as `A` microbatches of at most `m` examples. Nothing here changes `B`: where it
cannot be kept, the error names the nearest one that can.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memfit.errors import UsageError
from memfit.records import Policy, Split

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DEFAULT_MAX_MICROBATCH = 65536
"""The largest size searched when neither a logical batch nor a cap is given."""
MAX_LOGICAL_BATCH = 10**9
"""The largest logical batch that is taken for meant."""
UNSPLIT_ACCUMULATION_STEPS = 2
"""Microbatches of a group without a logical batch: from the second on, gradients are resident."""

_FINE_BITS = 7
"""Below 2**7 every integer is a candidate; above, 64 sizes for each power of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The microbatch sizes that a probe could answer with."""

    sizes: tuple[int, ...]
    """Ascending; never empty."""
    logical_batch: int | None = None
    replicas: int = 1
    policy: Policy = Policy.EXACT
    min_microbatch: int = 1
    """No microbatch of any split is smaller."""
    max_microbatch: int | None = None
    """The cap that was asked for, or None."""

    @property
    def smallest(self) -> int:
        """The smallest candidate."""
        return self.sizes[0]

    @property
    def largest(self) -> int:
        """The largest candidate."""
        return self.sizes[-1]

    @property
    def per_replica(self) -> int | None:
        """Examples that one replica takes per optimizer step, or None without a logical batch."""
        return None if self.logical_batch is None else self.logical_batch // self.replicas

    def __contains__(self, microbatch: int) -> bool:
        position = bisect_left(self.sizes, microbatch)
        return position < len(self.sizes) and self.sizes[position] == microbatch

    def accumulation_steps(self, microbatch: int) -> int:
        """Microbatches of a group whose largest has this size."""
        share = self.per_replica
        return UNSPLIT_ACCUMULATION_STEPS if share is None else -(-share // microbatch)

    def split(self, microbatch: int) -> Split:
        """Return how a group runs at one of the candidate sizes.

        Raises:
            UsageError: When the size is none of the candidates.
        """
        if microbatch not in self:
            raise UsageError(
                f"microbatch {microbatch} cannot be used: {self._rule(microbatch)}",
                hint=f"the nearest that can be used: {_either(*self._neighbours(microbatch))}",
            )
        return Split(
            microbatch=microbatch,
            accumulation_steps=self.accumulation_steps(microbatch),
            replicas=self.replicas,
            logical_batch=self.logical_batch,
        )

    def _rule(self, microbatch: int) -> str:
        if microbatch > self.largest:
            return f"the largest size to consider is {self.largest}"
        if microbatch < self.min_microbatch:
            return f"the smallest size to consider is {self.min_microbatch}"
        if self.logical_batch is None:
            return "it is none of the sizes that are considered"
        if self.policy is Policy.EXACT:
            return f"it does not divide the {self.per_replica} examples of each replica"
        return f"no equal split of {self.per_replica} examples has it as its largest part"

    def _neighbours(self, microbatch: int) -> tuple[int | None, int | None]:
        below = bisect_left(self.sizes, microbatch) - 1
        above = bisect_right(self.sizes, microbatch)
        return (
            self.sizes[below] if below >= 0 else None,
            self.sizes[above] if above < len(self.sizes) else None,
        )


def candidates(
    *,
    logical_batch: int | None,
    replicas: int,
    policy: Policy,
    max_microbatch: int | None,
    min_microbatch: int = 1,
) -> Candidates:
    """List the microbatch sizes that could be emitted.

    `exact`: the divisors of `B / D`. `ragged`: the sizes of the largest part when `B / D` is cut
    into 1, 2, 3, ... parts as equal as possible. Without a logical batch: every integer up to
    128, and above it steps of under 1.6 %, up to `max_microbatch` (65536 when it is None).
    A size stays out where any microbatch of its split would be below `min_microbatch`: `ragged`
    cuts 9 examples at most 2 at a time into 2, 2, 2, 2 and 1.

    Raises:
        UsageError: When a number is not positive, `B` cannot be shared among the replicas, or
            nothing lies between the two bounds.
    """
    _require_positive("the number of replicas", replicas)
    _require_positive("the smallest microbatch", min_microbatch)
    if max_microbatch is not None:
        _require_positive("the largest microbatch", max_microbatch)
    cap = max_microbatch or (DEFAULT_MAX_MICROBATCH if logical_batch is None else None)
    if cap is not None and min_microbatch > cap:
        raise UsageError(
            f"the smallest microbatch is {min_microbatch}, above the largest of {cap}",
            hint="lower --min-microbatch or raise --max-microbatch",
        )
    sizes: tuple[int, ...]
    if logical_batch is None:
        ladder = tuple(_ladder(cap or DEFAULT_MAX_MICROBATCH))
        above = ladder[bisect_right(ladder, min_microbatch) :]
        sizes = (min_microbatch, *above)
    else:
        _check_logical_batch(logical_batch, replicas)
        share = logical_batch // replicas
        every = divisors(share) if policy is Policy.EXACT else _largest_parts(share)
        large = tuple(m for m in every if share // -(-share // m) >= min_microbatch)
        if not large:
            raise _none_so_large(share, min_microbatch, logical_batch)
        sizes = large if cap is None else large[: bisect_right(large, cap)]
        if not sizes:
            raise UsageError(
                f"no split of {share} examples has all its microbatches from {min_microbatch} "
                f"to {cap}",
                hint=f"the smallest that can be used is {large[0]}: raise --max-microbatch",
            )
    return Candidates(
        sizes=sizes,
        logical_batch=logical_batch,
        replicas=replicas,
        policy=policy,
        min_microbatch=min_microbatch,
        max_microbatch=max_microbatch,
    )


def _none_so_large(share: int, least: int, logical_batch: int) -> UsageError:
    return UsageError(
        f"a microbatch of {least} or more cannot be cut from the {share} examples that each "
        f"replica has of a logical batch of {logical_batch}",
        hint=f"lower --min-microbatch to {share} or raise --logical-batch",
    )


def weights(
    counts: Sequence[int | float], *, total: float | None = None, replicas: int = 1
) -> tuple[float, ...]:
    """Return the factor by which each microbatch's mean loss is multiplied.

    The loss of a group is `sum(n_i / N * l_i)`, where `N` counts the elements of the whole group
    on all replicas. Averaging over `D` replicas divides by `D`, so the factor is `D * n_i / N`.

    Args:
        counts: Elements that the mean of each microbatch is over, on this replica.
        total: `N`; the sum of `counts` when None, which only one replica can know by itself.
        replicas: `D`.

    Raises:
        UsageError: When a count is negative, there is no element at all, or `total` is missing
            or less than what this replica alone has.
    """
    _require_positive("the number of replicas", replicas)
    for count in counts:
        if not (count >= 0 and math.isfinite(count)):
            raise UsageError(f"a microbatch counts {count} elements; it needs to be 0 or more")
    own = sum(counts)
    if total is None:
        if replicas > 1:
            raise UsageError(
                f"the weights over {replicas} replicas need the elements of all of them",
                hint="sum the counts of the group over all replicas and pass it as total",
            )
        total = own
    if not (total > 0 and math.isfinite(total)):
        raise UsageError(f"the group has {total} elements, so its mean loss is not defined")
    if total < own * (1 - 1e-9):
        raise UsageError(f"total is {total}, less than the {own} elements of this replica alone")
    return tuple(replicas * count / total for count in counts)


def poor_split_note(
    sizes: Candidates, *, microbatch: int, room: int | None = None
) -> tuple[str, str] | None:
    """Say when `exact` leaves much of the device unused, and what would use it.

    Args:
        sizes: The candidates of the probe.
        microbatch: The size of the answer.
        room: The largest size expected to fit, whether a candidate or not; None when unknown.

    Returns:
        What is poor about the split and what to do about it, or None when the split uses more
        than half of the room (or, with the room unknown, when the next candidate is at most
        twice the answer).
    """
    share = sizes.per_replica
    if sizes.policy is not Policy.EXACT or share is None or microbatch >= share:
        return None
    following = next((m for m in divisors(share) if m > microbatch), share)
    reachable = min(following - 1, room or following, sizes.max_microbatch or following)
    if reachable < 2 * microbatch:
        return None
    expected = "" if room is None else f", though about {room} would fit"
    text = (
        f"microbatch {microbatch} is the largest divisor of {share} below {following}{expected}; "
        f"no size from {microbatch + 1} to {following - 1} divides {share}"
    )
    hint = f"--policy ragged keeps the logical batch {sizes.logical_batch}"
    if room is not None:
        hint += f" with microbatches of at most {-(-share // -(-share // reachable))}"
    better = _nearest_good_share(share, None if room is None else reachable)
    if better is not None:
        hint += f"; the nearest logical batch with a better split is {better * sizes.replicas}"
    return text, hint


def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors of a positive number, ascending."""
    found = [1]
    rest, prime = number, 2
    while rest > 1:
        if prime * prime > rest:
            prime = rest
        power, powers = 1, [1]
        while rest % prime == 0:
            rest //= prime
            power *= prime
            powers.append(power)
        if len(powers) > 1:
            found = [divisor * factor for divisor in found for factor in powers]
        prime += 1
    return tuple(sorted(found))


def _largest_parts(share: int) -> tuple[int, ...]:
    """Return the distinct values of `ceil(share / A)` for `A` from 1, ascending."""
    parts = []
    size = share
    while size > 1:
        parts.append(size)
        # The fewest parts that bring the largest one below `size`, and the largest one then.
        steps = -(-share // (size - 1))
        size = -(-share // steps)
    parts.append(1)
    return tuple(reversed(parts))


def _ladder(cap: int) -> Iterator[int]:
    """Yield every size up to 128, then 64 sizes for each power of two, and the cap itself."""
    size = 1
    while size < cap:
        yield size
        size += 1 << max(0, size.bit_length() - _FINE_BITS)
    yield cap


def _nearest_good_share(share: int, room: int | None) -> int | None:
    """Find the share nearest to this one that splits well, within a tenth of it."""
    for distance in range(1, max(16, share // 10)):
        for other in (share + distance, share - distance):
            if other >= 1 and _splits_well(other, room):
                return other
    return None


def _splits_well(share: int, room: int | None) -> bool:
    """Whether a divisor uses three quarters of the room; without it, whether none is far apart."""
    if room is not None:
        return any(room - room // 4 <= size <= room for size in divisors(share))
    return all(above <= 2 * below for below, above in itertools.pairwise(divisors(share)))


def _check_logical_batch(logical_batch: int, replicas: int) -> None:
    _require_positive("the logical batch", logical_batch)
    if logical_batch > MAX_LOGICAL_BATCH:
        raise UsageError(
            f"the logical batch is {logical_batch}; the largest accepted is {MAX_LOGICAL_BATCH}"
        )
    if logical_batch < replicas:
        raise UsageError(
            f"a logical batch of {logical_batch} leaves some of {replicas} replicas without "
            "an example",
            hint=f"the smallest logical batch for {replicas} replicas is {replicas}",
        )
    rest = logical_batch % replicas
    if rest:
        below = logical_batch - rest
        raise UsageError(
            f"a logical batch of {logical_batch} cannot be shared equally among {replicas} "
            f"replicas: {rest} would be left over",
            hint=f"the nearest logical batches that can: {below} and {below + replicas}",
        )


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise UsageError(f"{name} is {value}; it needs to be at least 1")


def _either(below: int | None, above: int | None) -> str:
    return " and ".join(str(size) for size in (below, above) if size is not None)
