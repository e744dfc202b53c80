"""What each microbatch's loss counts in its group, beside its elements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memfit.verification import Finding
from memfit.verify.events import CLOSE, Group, listed, near
from memfit.verify.findings import finding


def judge_weights(groups: Sequence[Group], usual: int, codes: set[str]) -> Iterator[Finding]:
    """Find weights other than each microbatch's elements over those of its group."""
    if codes & {"MF501", "MF502", "MF503"}:
        return  # the group's gradient is another for that reason already
    known = [g for g in groups if all(e.share is not None for e in g.backward)]
    unread = [g for g in groups if any(e.factor is None for e in g.backward)]
    if unread:
        yield finding(
            "MF208",
            f"In {len(unread)} of {len(groups)} groups the loss could not be followed to its mean "
            "or sum.",
            place=unread[0].backward[0].place,
        )
    yield from _sums(groups, known)
    means = [g for g in known if g.size == usual]
    yield from _totals(means)
    yield from _last(known, means)


def _sums(groups: Sequence[Group], known: Sequence[Group]) -> Iterator[Finding]:
    """Find sums that are divided by nothing."""
    sums = [
        g
        for g in groups
        if all(e.reduction == "sum" and near(e.factor or 0, 1.0) for e in g.backward)
    ]
    bare = [g for g in sums if g not in known or g.share > 1 + CLOSE]
    if bare:
        yield finding(
            "MF202",
            f"In {len(bare)} of {len(groups)} groups the loss that went to backward is a sum, "
            "divided by nothing.",
            place=bare[0].backward[0].place,
        )


def _totals(groups: Sequence[Group]) -> Iterator[Finding]:
    """Find groups whose shares do not add up to one, or are not those of their elements."""
    proper = [
        g
        for g in groups
        if g.backward[0].reduction == "mean" or not near(g.backward[0].factor or 0, 1.0)
    ]
    added = [g for g in proper if g.size > 1 and near(g.share, g.size)]
    if added:
        yield finding(
            "MF204",
            f"In {len(added)} of {len(groups)} groups the shares of {added[0].size} microbatches "
            f"add up to {added[0].share:.4g}, where they should to 1.",
            place=added[0].backward[0].place,
        )
        return
    twice = [g for g in proper if g.size > 1 and near(g.share, 1 / g.size)]
    if twice:
        yield finding(
            "MF203",
            f"In {len(twice)} of {len(groups)} groups the shares of {twice[0].size} microbatches "
            f"add up to {twice[0].share:.4g}, where they should to 1: divided by "
            f"{twice[0].size} twice.",
            place=twice[0].backward[0].place,
        )
        return
    yield from _denominators(proper)
    unequal = [(g, off) for g in proper if (off := _off(g)) > CLOSE]
    if unequal:
        group, off = max(unequal, key=lambda pair: pair[1])
        counts = [e.counted or 0 for e in group.backward]
        error = group.step.error if group.step else None
        told = "" if error is None else f", and its gradient is off by {error:.2g}"
        yield finding(
            "MF201",
            f"In {len(unequal)} of {len(groups)} groups microbatches count otherwise than by "
            f"their elements: one with {listed(counts)} elements has the shares "
            f"{listed([round(e.share or 0, 4) for e in group.backward])}{told}.",
            place=group.backward[0].place,
        )


def _denominators(groups: Sequence[Group]) -> Iterator[Finding]:
    """Find groups whose elements count alike, over another number than theirs.

    A mean times a constant is an objective of its own; one that changes from group to group, or a
    sum over anything but its elements, is not.
    """
    even = [g for g in groups if _uneven(g) <= CLOSE]
    wrong = [g for g in even if not near(g.share, 1.0)]
    sums = [g for g in wrong if g.backward[0].reduction == "sum"]
    totals = [g.share for g in even]
    varies = len(totals) > 1 and max(totals) - min(totals) > CLOSE * max(totals)
    found = sums or (wrong if varies else [])
    if found:
        worst = max(found, key=lambda g: abs(g.share - 1))
        elements = sum(e.counted or 0 for e in worst.backward)
        yield finding(
            "MF209",
            f"In {len(found)} of {len(groups)} groups the shares do not add up to 1; at worst to "
            f"{worst.share:.4g}, as if {elements:,} elements were "
            f"{elements / worst.share:,.4g}.",
            place=worst.backward[0].place,
        )


def _uneven(group: Group) -> float:
    """Largest difference of what an element counts in one microbatch and in the whole group."""
    counts = [e.counted for e in group.backward]
    total, whole = sum(c or 0 for c in counts), group.share
    if any(not c for c in counts) or not total or not whole:
        return 0.0
    return max(
        abs((e.share or 0) / whole - c / total) * total / c
        for e, c in zip(group.backward, counts, strict=True)
        if c
    )


def _off(group: Group) -> float:
    """How uneven the elements of a group count, where its shares add up to one."""
    return _uneven(group) if group.size > 1 and near(group.share, 1.0) else 0.0


def _last(known: Sequence[Group], usual: Sequence[Group]) -> Iterator[Finding]:
    """Find a smaller group that is divided by the denominator of a full one."""
    if not usual or not near(usual[0].share, 1.0):
        return
    full = usual[0].size
    short = [g for g in known if g.size < full and near(g.share, g.size / full)]
    if short:
        group = short[-1]
        yield finding(
            "MF207",
            f"A group of {group.size} microbatches among groups of {full} has shares that add up "
            f"to {group.share:.4g}, where they should to 1.",
            place=group.step.place if group.step else group.backward[0].place,
        )
