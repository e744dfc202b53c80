"""Sentences about a result, shared by the page and the terminal.

Everything here is plain text: no markup, no colour, and nothing heavier than the records. Sizes
are written for people; a figure that was not measured is said to be so, and is never zero.
"""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING

from memfit.records import DeviceKind, Source, Verdict
from memfit.report.staying import trace_line
from memfit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from memfit.records import (
        Certificate,
        Composition,
        DeviceSpec,
        Evidence,
        ProbeResult,
        Split,
        Timeline,
        TrialResult,
    )

NOT_MEASURED = "not measured"
TIMES = "\N{MULTIPLICATION SIGN}"

VERDICTS = {
    Verdict.FITS: "fits",
    Verdict.OOM: "out of memory",
    Verdict.HOST_OOM: "out of host memory",
    Verdict.THRASH: "thrashes",
    Verdict.SIZE_LIMIT: "index limit",
    Verdict.TIMEOUT: "timed out",
    Verdict.ERROR: "failed",
    Verdict.CRASH: "crashed",
}
"""Verdicts as they follow a microbatch: `24: out of memory`."""

PHASES = {
    "imported": "import",
    "build": "building the model and optimizer",
    "built": "building the model and optimizer",
    "forward": "forward",
    "backward": "backward",
    "optimizer_step": "the optimizer step",
    "group_done": "the end of the group",
    "evaluate": "evaluation",
}
"""Phases as they stand in a sentence; an unknown one is shown as it is stored."""

GROUPS = {"none": "before the groups", "first": "first group", "later": "later groups"}
"""Which groups the figures of a phase are over."""

PURPOSES = {
    "search": "search",
    "confirm": "confirm, full groups",
    "diagnose": "diagnose, no limit",
    "trace": "trace growth",
    "evaluate": "evaluation",
}
"""What a trial was for."""

VIRTUAL_EXPLANATION = (
    "These figures are virtual. PyTorch's own CUDA build and its caching allocator ran the "
    "workload, but over a stand-in driver: no kernel was executed and no such card was used. "
    "Confirm the answer on the real card where the last few hundred MiB matter."
)
"""What `virtual` means, for a reader who has not met it."""

_MANY_SIZES = 4
_SHADED = 150


def is_virtual(result: ProbeResult) -> bool:
    """Whether the figures come from a virtual GPU."""
    return result.source is Source.VIRTUAL


def on_cpu(result: ProbeResult) -> bool:
    """Whether the trials ran on a CPU, where there is no caching allocator."""
    return result.spec.device.kind is DeviceKind.CPU


def sentence(text: str) -> str:
    """Give a text a capital and a full stop; a name such as cuDNN keeps its own first letter."""
    first = text.split(maxsplit=1)[0] if text.strip() else ""
    made = text[:1].upper() + text[1:] if first == first.lower() else text
    return made if not made or made.endswith((".", "!", "?")) else f"{made}."


def size(value: int | None) -> str:
    """Write bytes for people: `22.90 GiB`."""
    return NOT_MEASURED if value is None else format_bytes(value)


def exact(value: int | None) -> str:
    """Write bytes in full: `24,588,025,856 bytes`."""
    return NOT_MEASURED if value is None else f"{value:,} bytes"


def count(value: int | None) -> str:
    """Write a count, or say that there is none."""
    return NOT_MEASURED if value is None else f"{value:,}"


def duration(seconds: float | None) -> str:
    """Write seconds for people, or say that they were not measured."""
    return NOT_MEASURED if seconds is None else format_seconds(seconds)


def share(part: int, whole: int) -> str:
    """Write a part in per cent of a whole: `12.3 %`; only the whole itself is 100 %."""
    percent = 100 * part / whole if whole else 0.0
    near = 99.95 <= percent < 100  # noqa: PLR2004
    return f"{math.floor(percent * 100) / 100:.2f} %" if near else f"{percent:.1f} %"


def number(value: int, noun: str) -> str:
    """Write a count with its noun, in the plural where it belongs: `1 trial`, `6 trials`."""
    ending = "" if value == 1 else "es" if noun.endswith("ch") else "s"
    return f"{value:,} {noun}{ending}"


def listing(items: Sequence[str]) -> str:
    """Join items as a sentence does: `21, 22 and 24`."""
    if len(items) <= 1:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"


def verdict(value: Verdict) -> str:
    """Write a verdict for people."""
    return VERDICTS[value]


def phase(name: str) -> str:
    """Write a phase as it stands in a sentence."""
    return PHASES.get(name, name.replace("_", " "))


def device(spec: DeviceSpec) -> str:
    """Name a device, and say when it is a virtual one."""
    return f"virtual {spec.name}" if spec.kind is DeviceKind.VIRTUAL else spec.name


def source(result: ProbeResult) -> str:
    """Say where the figures come from, in one line."""
    where = result.spec.device.name
    if is_virtual(result):
        return f"virtual: {where}, kernels not executed"
    return f"measured on {where}"


def headroom_left(result: ProbeResult) -> int | None:
    """Bytes between the peak of the answer and the limit; None where there is no peak."""
    peak = result.answer.peak_bytes
    return None if peak is None else result.spec.device.limit_bytes - peak


def device_used(trial: TrialResult) -> int | None:
    """Memory in use on the most loaded device, as its driver reports it."""
    known = [d.device_used_bytes for d in trial.devices if d.device_used_bytes is not None]
    return max(known, default=None)


def retries(trial: TrialResult) -> int | None:
    """Allocator retries of a trial on all devices; None where no device counted them."""
    known = [d.alloc_retries for d in trial.devices if d.alloc_retries is not None]
    return sum(known) if known else None


def arithmetic(split: Split) -> str:
    """Write the split as a calculation: `20 x 24 x 1 = 480`.

    Equal microbatches give `m x A x D = B`; uneven ones are summed, and gathered when many.
    """
    sizes = split.sizes
    if len(set(sizes)) <= 1:
        each, total = f"{split.microbatch} {TIMES} {split.accumulation_steps}", sum(sizes)
    elif len(sizes) <= _MANY_SIZES:
        each, total = f"({' + '.join(str(s) for s in sizes)})", sum(sizes)
    else:
        runs = [(value, len(list(run))) for value, run in groupby(sizes)]
        each, total = f"({' + '.join(f'{n} {TIMES} {value}' for value, n in runs)})", sum(sizes)
    return f"{each} {TIMES} {split.replicas} = {total * split.replicas}"


def instruction(split: Split) -> str:
    """Say what to set: `microbatch 20 and 24 accumulation steps`."""
    steps = number(split.accumulation_steps, "accumulation step")
    if len(set(split.sizes)) > 1:
        return f"microbatches of {listing([str(s) for s in _distinct(split.sizes)])} and {steps}"
    return f"microbatch {split.microbatch} and {steps}"


def answer(result: ProbeResult) -> str:
    """Say the answer in one sentence, with its peak, its limit and where they come from."""
    split = result.split
    if split.logical_batch is None:
        what = f"Train with microbatch {split.microbatch} (no logical batch was asked for)"
    else:
        replicas = f" on {split.replicas} replicas" if split.replicas > 1 else ""
        what = f"Train with {instruction(split)}{replicas}: {arithmetic(split)}"
    return f"{what}, {peak(result)}."


def peak(result: ProbeResult) -> str:
    """Say the answer's peak, the limit and the device: `peak 22.90 GiB of 23.05 GiB on a …`."""
    spec = result.spec.device
    top = result.answer.peak_bytes
    told = "its peak was not measured" if top is None else f"peak {size(top)}"
    limit = size(spec.limit_bytes)
    where = f"on a virtual {spec.name}" if is_virtual(result) else f"measured on {spec.name}"
    if top is None:
        return f"{told}, the limit is {limit} on {device(spec)}"
    return f"{told} of {limit} {where}"


def title(result: ProbeResult) -> str:
    """Name the result in a few words, for a window's title."""
    split = result.split
    sizes = f"microbatch {split.microbatch}"
    if split.logical_batch is not None:
        sizes += f" {TIMES} {split.accumulation_steps}"
    article = "a " if is_virtual(result) else ""
    return f"{result.workload.name}: {sizes} on {article}{device(result.spec.device)} · memfit"


def certificate(result: ProbeResult) -> str:
    """Say why the answer is the answer: what ran, and what was tried above it."""
    return f"{_proof(result)} {_ceiling(result)}"


def _proof(result: ProbeResult) -> str:
    stands_on, given = result.answer, result.certificate
    groups = number(stands_on.groups_run, "full group")
    steps = number(len(stands_on.spec.sizes), "microbatch")
    return (
        f"Microbatch {given.microbatch} ran {groups} of {steps} in trial {given.trial}, "
        "in a fresh process."
    )


def _ceiling(result: ProbeResult) -> str:
    given = result.certificate
    tried = _tried_above(result)
    if given.ceiling == "cap":
        cap = given.cap if given.cap is not None else given.microbatch
        if not tried:
            return f"No larger candidate exists: the cap is {cap}."
        return f"{tried} No candidate exists above {cap}."
    if given.ceiling in ("budget", "time"):
        untried = _untried(given)
        budget = f"The ceiling of {number(result.spec.max_trials, 'trial')} was reached first"
        if given.ceiling == "time":
            budget = f"The time budget of {duration(result.spec.time_budget_s)} ended first"
        return f"{tried} {budget}, so {untried}.".lstrip()
    return tried or "Every larger candidate was tried, and none fitted."


def _untried(given: Certificate) -> str:
    if not given.untried:
        return "larger sizes were not tried"
    shown = [str(m) for m in given.untried[:_MANY_SIZES]]
    more = len(given.untried) - len(shown)
    if more:
        return f"{', '.join(shown)} and {more:,} more were not tried"
    return f"{listing(shown)} {'was' if len(shown) == 1 else 'were'} not tried"


def _tried_above(result: ProbeResult) -> str:
    """Say what was tried above the answer, the nearest size first."""
    above = sorted(result.certificate.tried_above, key=lambda t: (t.microbatch, t.trial))
    if not above:
        return ""
    trials = {trial.spec.index: trial for trial in result.trials}
    parts = []
    for tried in above[:_MANY_SIZES]:
        what = verdict(tried.verdict)
        trial = trials.get(tried.trial)
        need = trial.demand_bytes if trial else None
        if tried.demand_exceeds_limit and need is not None:
            what = f"{what}, {size(need)} needed"
        parts.append(f"{tried.microbatch} (trial {tried.trial}: {what})")
    more = len(above) - len(parts)
    if more:
        parts.append(f"{more:,} more")
    were = "was" if len(above) == 1 else "were"
    text = f"Above it, {listing(parts)} {were} tried and did not fit"
    closed = next((t.microbatch for t in above if t.demand_exceeds_limit), None)
    if closed is None:
        return f"{text}{_closed_otherwise(result.certificate)}."
    limit = size(result.spec.device.limit_bytes)
    layout = "" if on_cpu(result) else ", whatever the allocator's layout"
    return f"{text}; the demand of {closed} alone exceeds the limit of {limit}{layout}."


def _closed_otherwise(given: Certificate) -> str:
    """Say what set the ceiling where it was not the measured demand."""
    closed = given.closed_by
    if closed is None:
        return ""
    why = {
        Verdict.HOST_OOM: "the host's memory refused it",
        Verdict.SIZE_LIMIT: "a kernel's index limit refused it, whatever the memory",
    }.get(closed.verdict, "it ran out of memory, and growth leaves no room above it")
    return f"; {closed.microbatch} set the ceiling, because {why}"


def holes(result: ProbeResult) -> tuple[int, ...]:
    """Sizes below the answer that did not fit: where memory is not monotone in the microbatch."""
    fitted = {t.spec.split.microbatch for t in result.trials if t.verdict is Verdict.FITS}
    failed = {
        t.spec.split.microbatch
        for t in result.trials
        if t.verdict.limits_size and t.spec.purpose != "diagnose"
    }
    return tuple(sorted(m for m in failed - fitted if m < result.certificate.microbatch))


def hole_sentence(result: ProbeResult) -> str | None:
    """Warn of sizes below the answer that did not fit; None when there are none."""
    found = holes(result)
    if not found:
        return None
    sizes, largest = listing([str(m) for m in found]), result.certificate.microbatch
    return (
        f"Memory is not monotone here: {sizes} did not fit although {largest} does. A smaller "
        "microbatch is not automatically a safe one; use the size that was certified."
    )


def composition(trial: TrialResult, made_of: Composition) -> str:
    """Say where the peak was reached and what most of it is."""
    text = (
        f"The highest point of the answer's trial was in {phase(made_of.phase)}; the largest part "
        f"is {made_of.dominant}."
    )
    if len(trial.spec.sizes) == 1 and not made_of.by_block:
        text += (
            " With one microbatch in a group, gradients come into being while activations go, and "
            "are counted among the activations."
        )
    return text


def bands(timeline: Timeline) -> str:
    """Explain the shading of a timeline's chart."""
    last = "the dark band at the end is the optimizer step"
    summed = "Drawn from what was requested; the allocator's own peak can lie a little higher."
    if shades_forward(timeline):
        return f"Shaded bands are forward, plain ones backward; {last}. {summed}"
    return f"There are too many microbatches to shade each of them; {last}. {summed}"


def shades_forward(timeline: Timeline) -> bool:
    """Whether the microbatches of a group are few enough to shade each forward."""
    return sum(p.phase == "forward" for p in timeline.phases) <= _SHADED


def where(evidence: Evidence) -> str:
    """Say where a trial ended: `backward, group 1, microbatch 2`; empty when it ended well."""
    parts = [phase(evidence.phase)] if evidence.phase else []
    if evidence.group is not None:
        parts.append(f"group {evidence.group}")
    if evidence.microbatch_index is not None:
        parts.append(f"microbatch {evidence.microbatch_index}")
    return ", ".join(parts)


def evidence(trial: TrialResult) -> str:
    """Give the sentence that decided a verdict, and where the trial ended."""
    found = trial.evidence
    ended = where(found)
    text = sentence(found.text)
    return f"{text} Ended in {ended}." if ended else text


def why(trial: TrialResult) -> str:
    """Say why a trial was run, and what decided its verdict."""
    found = trial.evidence
    decided = [f"decided by: {found.rule}"]
    if found.seen_in is not None:
        decided.append(f"known from {found.seen_in}")
    if found.free_bytes is not None and trial.verdict is not Verdict.FITS:
        decided.append(f"{size(found.free_bytes)} free within the limit when it failed")
    if found.exit_code is not None:
        decided.append(f"exit status {found.exit_code}")
    if found.doubtful:
        decided.append("doubtful")
    reason = f"Why this size: {trial.spec.reason}. " if trial.spec.reason else ""
    return f"{reason}{sentence(', '.join(decided))}"


def ceiling(result: ProbeResult) -> str:
    """Say what set the ceiling: the verdict, its size and its trial, or why there is none."""
    given = result.certificate
    closed = given.closed_by
    if closed is not None:
        return f"microbatch {closed.microbatch}: {verdict(closed.verdict)} (trial {closed.trial})"
    if given.ceiling == "cap":
        return "none: no larger candidate exists"
    if given.ceiling == "tried":
        return "none: every larger candidate was tried, one by one"
    return f"none: {'trials' if given.ceiling == 'budget' else 'the time budget'} ended first"


def trial_line(trial: TrialResult) -> str:
    """Write one finished trial as one line of progress.

    The line says `virtual` where the figures are, since it may be read alone.
    """
    spec = trial.spec
    ran, steps = len(spec.sizes), spec.split.accumulation_steps
    sizes = f"microbatch {spec.split.microbatch} {TIMES} {ran}"
    if ran < steps:
        sizes += f" of {steps}"
    limit = f"{size(spec.device.limit_bytes)}"
    if spec.device.kind is DeviceKind.VIRTUAL:
        limit += " (virtual)"
    if spec.purpose == "diagnose":
        told = f"diagnosis: {size(trial.demand_bytes)} needed without a limit, has {limit}"
    elif spec.purpose == "trace":
        told = trace_line(trial)
    elif spec.purpose == "evaluate" and trial.observed.evaluation is not None:
        peak_bytes = trial.observed.evaluation.peak_bytes
        told = f"evaluation fits: peak {size(peak_bytes)} of {limit}"
    elif trial.verdict is Verdict.FITS:
        told = f"fits: peak {size(trial.peak_bytes)} of {limit}"
    else:
        told = _failure(trial, limit)
    if trial.evidence.doubtful and spec.repeats is None:
        told += ", doubtful, so it is repeated before it counts"
    elif spec.repeats is not None:
        told += f", repeating trial {spec.repeats}"
    if spec.allocator is not None:
        told += f", with {spec.allocator}"
    return f"trial {spec.index}: {sizes:<20}  {told}  {format_seconds(trial.wall_s)}"


def _failure(trial: TrialResult, limit: str) -> str:
    """Say how a trial failed, where, and by how much or by which rule."""
    ended, need = where(trial.evidence), trial.demand_bytes
    told = verdict(trial.verdict) + (f" ({ended})" if ended else "")
    if need is None or trial.verdict is Verdict.SIZE_LIMIT:
        return f"{told}: {trial.evidence.rule}"
    if not trial.verdict.limits_size:
        return told
    fits = need <= trial.spec.device.limit_bytes
    apart = "fragmented, " if fits and trial.verdict is Verdict.OOM else ""
    return f"{told}: {apart}{size(need)} needed of {limit}"


def split_note(result: ProbeResult) -> str | None:
    """Tell the largest microbatch that fits apart from the one in use; None when they agree."""
    if result.certificate.microbatch == result.split.microbatch:
        return None
    return (
        f"The largest microbatch that fits is {result.certificate.microbatch}; the split of the "
        f"logical batch uses {result.split.microbatch}."
    )


def _distinct(values: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(values))
