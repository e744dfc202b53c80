"""What the ranks of one run did, beside one another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memfit.verification import Finding
from memfit.verify.events import CLOSE, Event, Group, group_events, listed, near
from memfit.verify.findings import finding

_DRIFT = 1e-6
"""Relative difference of parameters over replicas that one arithmetic does not lead to."""


def over_replicas(
    ranks: Sequence[Sequence[Event]],
    checksums: Sequence[float | None],
    known: Sequence[Finding] = (),
) -> list[Finding]:
    """Judge what the ranks of one run did, beside one another.

    Args:
        ranks: The events of each rank.
        checksums: A sum over each rank's parameters after the run; None where there are none.
        known: What was found in the first rank alone.
    """
    if len(ranks) < 2:  # noqa: PLR2004
        return []
    found: list[Finding] = []
    passes = [[e for e in events if e.kind == "backward"] for events in ranks]
    pairs = list(zip(*passes, strict=False))
    same = [p for p in pairs if p[0].digest is not None and len({e.digest for e in p}) < len(p)]
    if same:
        found.append(
            finding(
                "MF701",
                f"In {len(same)} of {len(pairs)} microbatches, replicas were given the same "
                "examples.",
                place=same[0][0].place,
            )
        )
    if not {f.code for f in known} & {"MF201", "MF202", "MF203", "MF204", "MF503"}:
        found += _shares_of_replicas([group_events(events) for events in ranks])
    sums = [c for c in checksums if c is not None]
    apart = (max(sums) - min(sums)) / (max(sums) or 1.0) if len(sums) == len(ranks) else 0.0
    if apart > _DRIFT and "MF704" not in {f.code for f in known}:
        found.append(
            finding(
                "MF704",
                f"At the end the norms of the replicas' parameters differ by {apart:.2g} of "
                "themselves.",
                place=pairs[-1][0].place if pairs else None,
            )
        )
    return found


def _shares_of_replicas(ranks: Sequence[Sequence[Group]]) -> Iterator[Finding]:
    """Compare what each replica counts with its elements; the wrapper takes the mean of them."""
    replicas = len(ranks)
    for groups in zip(*ranks, strict=False):
        counts = [sum(e.counted or 0 for e in g.backward) for g in groups]
        shares = [g.share for g in groups]
        if any(e.share is None for g in groups for e in g.backward) or not all(counts):
            return
        total = sum(counts)
        place = groups[0].backward[0].place
        if near(sum(shares), 1.0):
            yield finding(
                "MF703",
                f"The shares of {replicas} replicas with {listed(counts)} elements add up to "
                f"1, and the wrapper takes the mean of them: the gradient is 1/{replicas} of the "
                "batch's.",
                place=place,
            )
            return
        off = max(abs(s - replicas * c / total) for s, c in zip(shares, counts, strict=True))
        if near(sum(shares), replicas) and off > CLOSE:
            yield finding(
                "MF702",
                f"Replicas with {listed(counts)} elements count {listed([*map(_short, shares)])} "
                f"where D * n / N is "
                f"{listed([_short(replicas * c / total) for c in counts])}.",
                place=place,
            )
            return


def _short(value: float) -> float:
    return round(value, 4)
