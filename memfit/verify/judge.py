"""What is wrong with a watched loop: clearing, stepping, clipping, scaling, schedules, graphs.

The weights of its losses are judged in `shares`, replicas beside one another in `across`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from memfit.verification import Finding, GroupSeen, LoopSeen, Place
from memfit.verify.events import CLOSE, Event, Expected, Group, group_events, usual_size
from memfit.verify.findings import finding
from memfit.verify.shares import judge_weights

_KEPT_GROUPS = 100
_MANY_GRAPHS = 2


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
    usual = usual_size(judged)
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
    if "MF503" not in codes and expected.logical_batch is not None:
        found += _logical_batch(judged, usual, expected.logical_batch)
    found += judge_weights(judged, usual, codes)
    return found, _seen(judged, groups, events, ended)


def _whole_divisor(event: Event) -> int | None:
    """The whole number that a mean was divided by, when it was one above 1."""
    if event.reduction != "mean" or not event.factor or event.factor >= 1 - CLOSE:
        return None
    by = 1 / event.factor
    return round(by) if abs(by - round(by)) < CLOSE * by else None


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


def _logical_batch(groups: Sequence[Group], usual: int, named: int) -> Iterator[Finding]:
    """Find groups that have another number of examples than was named.

    Which dimension of the model's input holds the examples is not known: any that adds up to the
    number will do.
    """
    whole = [g for g in groups if g.size == usual and all(e.shape for e in g.backward)]
    sums = [
        [sum(dims) for dims in zip(*(e.shape for e in g.backward), strict=False)] for g in whole
    ]
    if not sums or any(named in dims for dims in sums):
        return
    has = sums[0][0]
    yield finding(
        "MF604",
        f"The groups have {has:,} examples, {usual} times {whole[0].backward[0].shape[0]:,}, where "
        f"{named:,} were asked for: a learning rate that suits {named:,} is to be multiplied by "
        f"{has / named:.3g} for linear scaling, by {(has / named) ** 0.5:.3g} for square-root.",
        place=whole[0].step.place if whole[0].step else None,
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


def _seen(
    judged: Sequence[Group], groups: Sequence[Group], events: Sequence[Event], ended: str
) -> LoopSeen:
    skipped = sum(1 for g in judged if g.step is not None and not g.step.applied)
    return LoopSeen(
        groups=tuple(
            GroupSeen(
                microbatches=g.size,
                elements=tuple(e.counted for e in g.backward),
                factors=tuple(e.share for e in g.backward),
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
