"""What a watched loop did, event by event, and what that means.

The watcher notes events; this reads them. It knows no torch, so that every rule can be tested by a
table of events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from memfit.verification import Finding, GroupSeen, LoopSeen, Place
from memfit.verify.findings import finding

Kind = Literal[
    "backward",
    "step",
    "clip",
    "unscale",
    "update",
    "schedule",
    "zero",
]

_CLOSE = 1e-3
_KEPT_GROUPS = 100
_MANY_GRAPHS = 2
_FEW = 8
_DRIFT = 1e-6
"""Relative difference of parameters over replicas that one arithmetic does not lead to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that the loop did."""

    kind: Kind
    place: Place | None = None
    factor: float | None = None
    """Of a backward pass: what the mean (or sum) of the loss was multiplied by, without the
    scaler's scale; None where the loss could not be read."""
    reduction: Literal["mean", "sum"] | None = None
    elements: int | None = None
    """Elements that the loss is over."""
    examples: int | None = None
    """Examples of the microbatch: the first dimension of what the model was given."""
    digest: int | None = None
    """Checksum of what the model was given."""
    scale: float | None = None
    """Of a backward pass: the scaler's scale; None without a scaler."""
    cleared: bool | None = None
    """Of a backward pass: whether every gradient was None or zero when it began."""
    graphs: int = 0
    """Of a backward pass: graphs of earlier microbatches that were still alive."""
    retained: bool = False
    synced: Literal["both", "none", "forward", "backward"] | None = None
    """Of a backward pass of a data-parallel model: where gradients were to be reduced."""
    applied: bool = True
    """Of a step: whether the scaler let it happen."""
    scaled: bool = False
    """Of a clip: whether the gradients carried the scaler's scale."""
    fresh: bool = True
    """Of a schedule's step: whether an optimizer step came before it."""
    error: float | None = None
    """Of a step: relative error of its gradient against the mean over the group's elements."""


@dataclass(slots=True)
class Group:
    """The microbatches of one optimizer step, and what happened among them."""

    backward: list[Event] = field(default_factory=list)
    between: list[Event] = field(default_factory=list)
    """Everything else, before the last backward."""
    after: list[Event] = field(default_factory=list)
    """Everything else, after the last backward and before the step."""
    step: Event | None = None

    @property
    def size(self) -> int:
        """Microbatches."""
        return len(self.backward)


def group_events(events: Sequence[Event]) -> list[Group]:
    """Gather events into groups: backward passes up to the optimizer step that follows them."""
    groups: list[Group] = []
    current = Group()
    for event in events:
        if event.kind == "backward":
            if current.step is not None:
                groups.append(current)
                current = Group()
            current.between += current.after
            current.after = []
            current.backward.append(event)
        elif event.kind == "step":
            if current.step is None:
                current.step = event
        else:
            current.after.append(event)
    if current.backward:
        groups.append(current)
    return groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the user said of the loop."""

    microbatches: int | None = None
    """Accumulation steps, where they were named."""


def judge(
    events: Sequence[Event],
    *,
    expected: Expected,
    ended: Literal["by itself", "time", "groups"],
    unscaled_twice: Place | None = None,
) -> tuple[list[Finding], LoopSeen]:
    """Return what is wrong with a loop, and what was seen of it.

    Args:
        events: Everything that was seen, in order.
        expected: What the user said of the loop.
        ended: How the watching ended; an unfinished group at the end says nothing after `time`.
        unscaled_twice: Where torch refused a second unscale_, if it did.
    """
    groups = group_events(events)
    judged = [g for g in groups if g.step is not None]
    usual = _usual(judged)
    intended = expected.microbatches or usual
    found = [
        *_stepping(judged, intended, usual),
        *_clearing(judged),
        *_between(judged, unscaled_twice),
        *_schedule(events),
        *_graphs(groups),
        *_syncing(judged),
        *_tail(groups, ended),
        *_skipped(judged),
    ]
    codes = {f.code for f in found}
    found += _weights(judged, usual, codes)
    return found, _seen(judged, groups, events, ended)


def _usual(groups: Sequence[Group]) -> int:
    """The number of microbatches that most groups have."""
    sizes = Counter(g.size for g in groups)
    return max(sizes, key=lambda size: (sizes[size], size)) if sizes else 1


def _whole_divisor(event: Event) -> int | None:
    """The whole number that a mean was divided by, when it was one above 1."""
    if event.reduction != "mean" or not event.factor or event.factor >= 1 - _CLOSE:
        return None
    by = 1 / event.factor
    return round(by) if abs(by - round(by)) < _CLOSE * by else None


def _stepping(groups: Sequence[Group], intended: int, usual: int) -> Iterator[Finding]:
    """Find steps after every microbatch of a group that was meant to have several."""
    if not groups or usual > 1:
        return
    divisors = {_whole_divisor(g.backward[-1]) for g in groups}
    by = divisors.pop() if len(divisors) == 1 else None
    if by is not None and by > 1:
        yield finding(
            "MF503",
            f"The loss is divided by {by}, and {len(groups)} of {len(groups)} optimizer steps "
            "came after a single microbatch.",
            place=groups[0].step.place if groups[0].step else None,
        )
    elif intended > 1:
        yield finding(
            "MF503",
            f"A group was to have {intended} microbatches, and the optimizer stepped "
            f"{len(groups)} times, after each one.",
            place=groups[0].step.place if groups[0].step else None,
        )


def _clearing(groups: Sequence[Group]) -> Iterator[Finding]:
    """Find gradients that are cleared within a group, or not at all."""
    inside = [g for g in groups if g.size > 1 and all(e.cleared is True for e in g.backward[1:])]
    if inside:
        cleared = next((e for e in inside[0].between if e.kind == "zero"), None)
        yield finding(
            "MF501",
            f"In {len(inside)} of {len(groups)} groups, every microbatch after the first found "
            f"its gradients cleared: {inside[0].size - 1} of {inside[0].size} are thrown away.",
            place=cleared.place if cleared else inside[0].backward[0].place,
        )
    left = [g for g in groups[1:] if g.backward[0].cleared is False]
    if left:
        yield finding(
            "MF502",
            f"The first microbatch of {len(left)} of {len(groups) - 1} later groups found "
            "gradients of the group before it.",
            place=left[0].backward[0].place,
        )


def _between(groups: Sequence[Group], unscaled_twice: Place | None) -> Iterator[Finding]:
    """Find what belongs after the last backward and came before it."""
    for code, kind, words in (
        ("MF504", "clip", "clipped"),
        ("MF507", "update", "updated the scale"),
    ):
        wrong = [e for g in groups for e in g.between if e.kind == kind]
        if wrong:
            yield finding(
                code,
                f"{len(groups)} groups {words} {len(wrong)} times before their last microbatch.",
                place=wrong[0].place,
            )
    changed = [g for g in groups if len({e.scale for e in g.backward}) > 1]
    if changed and not any(e.kind == "update" for g in groups for e in g.between):
        scales = ", ".join(f"{e.scale:g}" for e in changed[0].backward if e.scale is not None)
        yield finding(
            "MF507",
            f"The microbatches of one group were scaled by {scales}.",
            place=changed[0].backward[-1].place,
        )
    early = [e for g in groups for e in g.between if e.kind == "unscale"]
    twice = [e for g in groups for e in [x for x in g.after if x.kind == "unscale"][1:]]
    if early or twice or unscaled_twice is not None:
        place = unscaled_twice or (early or twice)[0].place
        how = (
            f"{len(early)} times before the last microbatch of their group"
            if early
            else "twice for one optimizer step"
        )
        yield finding("MF506", f"Gradients were unscaled {how}.", place=place)
    scaled = [e for g in groups for e in g.after if e.kind == "clip" and e.scaled]
    if scaled:
        yield finding(
            "MF505",
            f"In {len(scaled)} of {len(groups)} groups, the gradients that were clipped carried "
            f"the scale of {groups[0].backward[-1].scale or 0:g}.",
            place=scaled[0].place,
        )


def _schedule(events: Sequence[Event]) -> Iterator[Finding]:
    """Find a schedule that steps more often than the optimizer."""
    steps = sum(e.kind == "step" for e in events)
    schedule = [e for e in events if e.kind == "schedule"]
    stale = [e for e in schedule if not e.fresh]
    if not stale or not steps:
        return
    if len(schedule) <= steps:
        yield finding(
            "MF512",
            "The schedule stepped before the first optimizer step.",
            place=schedule[0].place,
        )
    else:
        yield finding(
            "MF508",
            f"The schedule stepped {len(schedule)} times in {steps} optimizer steps.",
            place=stale[-1].place,
        )


def _graphs(groups: Sequence[Group]) -> Iterator[Finding]:
    passes = [e for g in groups for e in g.backward]
    retained = [e for e in passes if e.retained]
    most = max(passes, key=lambda e: e.graphs, default=None)
    if retained and len(retained) == len(passes):
        yield finding(
            "MF509",
            f"All {len(passes)} backward passes retained their graphs.",
            place=retained[0].place,
        )
    elif most is not None and most.graphs >= _MANY_GRAPHS:
        yield finding(
            "MF509",
            f"At one backward pass the graphs of {most.graphs} earlier microbatches were still "
            "alive.",
            place=most.place,
        )


def _syncing(groups: Sequence[Group]) -> Iterator[Finding]:
    """Find microbatches before the last that reduce gradients over replicas."""
    early = [e for g in groups for e in g.backward[:-1] if e.synced is not None]
    reducing = [e for e in early if e.synced in ("both", "forward")]
    if reducing:
        inside = sum(e.synced == "forward" for e in reducing)
        how = ", with only backward inside no_sync()" if inside else ""
        yield finding(
            "MF510",
            f"{len(reducing)} of {len(early)} microbatches before the last of their group reduced "
            f"gradients{how}.",
            place=reducing[0].place,
        )
    last = [g.backward[-1] for g in groups if g.backward[-1].synced in ("none", "backward")]
    if last:
        yield finding(
            "MF704",
            f"{len(last)} of {len(groups)} groups never reduced their gradients: forward of their "
            "last microbatch ran inside no_sync().",
            place=last[0].place,
        )


def _tail(groups: Sequence[Group], ended: str) -> Iterator[Finding]:
    if ended == "by itself" and len(groups) > 1 and groups[-1].step is None:
        left = groups[-1]
        yield finding(
            "MF511",
            f"The loop ended after {left.size} backward "
            f"{'pass' if left.size == 1 else 'passes'} that no optimizer step followed.",
            place=left.backward[0].place,
        )


def _skipped(groups: Sequence[Group]) -> Iterator[Finding]:
    skipped = [g for g in groups if g.step is not None and not g.step.applied]
    if skipped:
        yield finding(
            "MF602",
            f"{len(skipped)} of {len(groups)} optimizer steps were skipped.",
            place=skipped[0].step.place if skipped[0].step else None,
        )


# -- weights ---------------------------------------------------------------------------------


def _elements(event: Event) -> int | None:
    return event.elements if event.elements is not None else event.examples


def _share(event: Event) -> float | None:
    """What the microbatch's mean loss counts in the group's loss."""
    if event.factor is None:
        return None
    if event.reduction == "mean":
        return event.factor
    elements = event.elements
    return None if elements is None else event.factor * elements


def _weights(groups: Sequence[Group], usual: int, codes: set[str]) -> Iterator[Finding]:
    """Find weights other than each microbatch's elements over those of its group."""
    if codes & {"MF501", "MF502", "MF503"}:
        return  # the group's gradient is another for that reason already
    known = [g for g in groups if all(_share(e) is not None for e in g.backward)]
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


def _total(group: Group) -> float:
    return sum(_share(e) or 0.0 for e in group.backward)


def _near(value: float, target: float) -> bool:
    return abs(value - target) <= _CLOSE * target


def _sums(groups: Sequence[Group], known: Sequence[Group]) -> Iterator[Finding]:
    """Find sums that are divided by nothing."""
    sums = [
        g
        for g in groups
        if all(e.reduction == "sum" and _near(e.factor or 0, 1.0) for e in g.backward)
    ]
    bare = [g for g in sums if g not in known or _total(g) > 1 + _CLOSE]
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
        if g.backward[0].reduction == "mean" or not _near(g.backward[0].factor or 0, 1.0)
    ]
    added = [g for g in proper if g.size > 1 and _near(_total(g), g.size)]
    if added:
        yield finding(
            "MF204",
            f"In {len(added)} of {len(groups)} groups the shares of {added[0].size} microbatches "
            f"add up to {_total(added[0]):.4g}, where they should to 1.",
            place=added[0].backward[0].place,
        )
        return
    twice = [g for g in proper if g.size > 1 and _near(_total(g), 1 / g.size)]
    if twice:
        yield finding(
            "MF203",
            f"In {len(twice)} of {len(groups)} groups the shares of {twice[0].size} microbatches "
            f"add up to {_total(twice[0]):.4g}, where they should to 1: divided by "
            f"{twice[0].size} twice.",
            place=twice[0].backward[0].place,
        )
        return
    yield from _denominators(proper)
    unequal = [(g, off) for g in proper if (off := _off(g)) > _CLOSE]
    if unequal:
        group, off = max(unequal, key=lambda pair: pair[1])
        counts = [_elements(e) or 0 for e in group.backward]
        error = group.step.error if group.step else None
        told = "" if error is None else f", and its gradient is off by {error:.2g}"
        yield finding(
            "MF201",
            f"In {len(unequal)} of {len(groups)} groups microbatches count otherwise than by "
            f"their elements: one with {_listed(counts)} elements has the shares "
            f"{_listed([round(_share(e) or 0, 4) for e in group.backward])}{told}.",
            place=group.backward[0].place,
        )


def _denominators(groups: Sequence[Group]) -> Iterator[Finding]:
    """Find groups whose elements count alike, over another number than theirs.

    A mean times a constant is an objective of its own; one that changes from group to group, or a
    sum over anything but its elements, is not.
    """
    even = [g for g in groups if _uneven(g) <= _CLOSE]
    wrong = [g for g in even if not _near(_total(g), 1.0)]
    sums = [g for g in wrong if g.backward[0].reduction == "sum"]
    totals = [_total(g) for g in even]
    varies = len(totals) > 1 and max(totals) - min(totals) > _CLOSE * max(totals)
    found = sums or (wrong if varies else [])
    if found:
        worst = max(found, key=lambda g: abs(_total(g) - 1))
        elements = sum(_elements(e) or 0 for e in worst.backward)
        yield finding(
            "MF209",
            f"In {len(found)} of {len(groups)} groups the shares do not add up to 1; at worst to "
            f"{_total(worst):.4g}, as if {elements:,} elements were "
            f"{elements / _total(worst):,.4g}.",
            place=worst.backward[0].place,
        )


def _uneven(group: Group) -> float:
    """Largest difference of what an element counts in one microbatch and in the whole group."""
    counts = [_elements(e) for e in group.backward]
    total, whole = sum(c or 0 for c in counts), _total(group)
    if any(not c for c in counts) or not total or not whole:
        return 0.0
    return max(
        abs((_share(e) or 0) / whole - c / total) * total / c
        for e, c in zip(group.backward, counts, strict=True)
        if c
    )


def _off(group: Group) -> float:
    """How uneven the elements of a group count, where its shares add up to one."""
    return _uneven(group) if group.size > 1 and _near(_total(group), 1.0) else 0.0


def _last(known: Sequence[Group], usual: Sequence[Group]) -> Iterator[Finding]:
    """Find a smaller group that is divided by the denominator of a full one."""
    if not usual or not _near(_total(usual[0]), 1.0):
        return
    full = usual[0].size
    short = [g for g in known if g.size < full and _near(_total(g), g.size / full)]
    if short:
        group = short[-1]
        yield finding(
            "MF207",
            f"A group of {group.size} microbatches among groups of {full} has shares that add up "
            f"to {_total(group):.4g}, where they should to 1.",
            place=group.step.place if group.step else group.backward[0].place,
        )


# -- replicas --------------------------------------------------------------------------------


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
        counts = [sum(_elements(e) or 0 for e in g.backward) for g in groups]
        shares = [_total(g) for g in groups]
        if any(_share(e) is None for g in groups for e in g.backward) or not all(counts):
            return
        total = sum(counts)
        place = groups[0].backward[0].place
        if _near(sum(shares), 1.0):
            yield finding(
                "MF703",
                f"The shares of {replicas} replicas with {_listed(counts)} elements add up to "
                f"1, and the wrapper takes the mean of them: the gradient is 1/{replicas} of the "
                "batch's.",
                place=place,
            )
            return
        off = max(abs(s - replicas * c / total) for s, c in zip(shares, counts, strict=True))
        if _near(sum(shares), replicas) and off > _CLOSE:
            yield finding(
                "MF702",
                f"Replicas with {_listed(counts)} elements count {_listed([*map(_short, shares)])} "
                f"where D * n / N is "
                f"{_listed([_short(replicas * c / total) for c in counts])}.",
                place=place,
            )
            return


def _short(value: float) -> float:
    return round(value, 4)


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{v:,}" for v in values[:_FEW]) + (", …" if len(values) > _FEW else "")


def _seen(
    judged: Sequence[Group], groups: Sequence[Group], events: Sequence[Event], ended: str
) -> LoopSeen:
    skipped = sum(1 for g in judged if g.step is not None and not g.step.applied)
    return LoopSeen(
        groups=tuple(
            GroupSeen(
                microbatches=g.size,
                elements=tuple(_elements(e) for e in g.backward),
                factors=tuple(_share(e) for e in g.backward),
                error=g.step.error if g.step else None,
            )
            for g in judged[:_KEPT_GROUPS]
        ),
        group_count=len(judged),
        backward_passes=sum(g.size for g in groups),
        steps_attempted=len(judged),
        steps_applied=len(judged) - skipped,
        steps_skipped=skipped,
        schedule_steps=sum(e.kind == "schedule" for e in events),
        ended=ended,  # type: ignore[arg-type]
    )
