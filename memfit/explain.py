"""What a probe found, in words: why nothing fits, how a workload failed, what figures leave out."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.errors import NothingFits, WorkloadError
from memfit.records import Composition, DeviceKind, DeviceSpec, ProbeSpec, TrialResult, Verdict
from memfit.trial.classify import ONE_VALUE
from memfit.units import format_bytes

_DOING = {
    "imported": "starting",
    "build": "building the model and optimizer",
    "built": "making a microbatch",
}
"""What a worker was doing after a mark whose name does not say it."""


def workload_error(
    result: TrialResult,
    target: str,
    *,
    earlier: Sequence[TrialResult],
    kept: str | None,
    searched: bool = False,
) -> WorkloadError:
    """Turn a trial that failed into the user's own words.

    Args:
        result: The trial.
        target: The user's file or module.
        earlier: Trials that had finished before it.
        kept: What is said of them, or None.
        searched: Whether the size was one of a search, and another one would do.
    """
    evidence = result.evidence
    phase = evidence.phase or "imported"
    at = [_DOING.get(phase, phase.replace("_", " "))]
    if evidence.group:
        at.append(f"group {evidence.group}")
    if evidence.microbatch_index:
        at.append(f"microbatch {evidence.microbatch_index}")
    parts = []
    if evidence.traceback:
        parts.append(evidence.traceback)
    if evidence.output_tail:
        parts.append("last lines of its output:\n" + "\n".join(evidence.output_tail))
    advice = [evidence.hint]
    if result.verdict is Verdict.TIMEOUT:
        advice.append("raise --trial-timeout if the workload is only slow")
    if searched and evidence.rule == ONE_VALUE and result.spec.split.microbatch == 1:
        advice.append("--min-microbatch 2 begins with two examples")
    first = next((t for t in earlier if t.spec.index == result.spec.repeats), None)
    if first is not None:
        advice.append(f"{_doubt_words(first)}, and this repetition of it did not")
    smaller = max(
        (t.spec.split.microbatch for t in earlier if t.verdict is Verdict.FITS), default=0
    )
    # What memfit's own checks find is so at every size.
    if evidence.hint is None and 0 < smaller < result.spec.split.microbatch:
        advice.append(
            f"microbatch {smaller} ran: if only larger ones fail, --max-microbatch "
            f"{result.spec.split.microbatch - 1} leaves them out"
        )
    advice.append(kept)
    hint = "; ".join(part for part in advice if part) or None
    m = result.spec.split.microbatch
    return WorkloadError(
        f"{target} failed at microbatch {m} in {', '.join(at)}: {evidence.text}",
        hint=hint,
        details="\n\n".join(parts) or None,
    )


_REMEDIES = {
    "parameters": "a smaller model, or one sharded over GPUs (FSDP), is needed",
    "gradients": "freezing parameters (LoRA) or sharding over GPUs (FSDP) would help",
    "optimizer state": "an optimizer with less state, or one sharded over GPUs, would help",
    "activations": "activation checkpointing, 16-bit precision or smaller examples would help",
    "temporaries": "smaller examples, or a loss computed in parts, would help",
    "activations and temporaries": "activation checkpointing, 16-bit precision or smaller "
    "examples would help",
}


def nothing_fits(
    device: DeviceSpec,
    microbatch: int,
    trial: TrialResult,
    shown: TrialResult,
    *,
    whole: bool,
    least: int = 1,
    untried: str | None = None,
) -> NothingFits:
    """Say what a microbatch that does not fit is made of, and what would help.

    Args:
        device: Where it does not fit.
        microbatch: The smallest candidate.
        trial: The trial that showed it.
        shown: The trial whose composition is told: the same one, or one without a limit.
        whole: Whether `shown` ran to its end, so that its figures are the whole need.
        least: The smallest microbatch that was asked for.
        untried: A setting of the allocator that no trial was left for, or None.
    """
    name = f"a virtual {device.name}" if device.kind is DeviceKind.VIRTUAL else device.name
    limit = format_bytes(device.limit_bytes)
    said, it = f"microbatch {microbatch} does not fit on {name}", "it"
    if least > 1:
        said, it = f"no microbatch of {microbatch} or more fits on {name}", str(microbatch)
    if whole and shown.peak_bytes is not None:
        said += f": {it} needs {format_bytes(shown.peak_bytes)} of {limit}"
    else:
        said += f": {trial.evidence.text}"
    details = None
    hint = "a larger device is needed"
    made = shown.composition
    if made is not None:
        details = _composition_words(made, device, whole=whole)
        said += (
            f"; {made.dominant} dominate"
            if made.dominant[-1] == "s"
            else (f"; {made.dominant} dominates")
        )
        hint = _REMEDIES.get(made.dominant, hint)
    if microbatch == 1:
        hint = f"accumulation cannot help, a microbatch is already one example; {hint}"
    else:
        ways = [f"below --min-microbatch {least}"] if least > 1 else []
        if microbatch > least:
            ways.append("with another --logical-batch")
        hint = f"smaller microbatches are possible {' or '.join(ways)}; {hint}"
    if untried is not None:
        hint += f"; {untried} was not tried: raise --max-trials"
    return NothingFits(said, hint=hint, details=details)


def _composition_words(made: Composition, device: DeviceSpec, *, whole: bool) -> str:
    """A small table of what one microbatch needs."""
    when = "at the peak" if whole else f"when it failed in {made.phase}"
    rows: Sequence[tuple[str, int]] = [
        *((name.removeprefix("the "), size) for name, size in made.parts.items()),
        ("CUDA context", device.context_bytes or 0),
    ]
    lines = [f"{name:<28} {format_bytes(size):>12}" for name, size in rows if size]
    virtual_word = ", virtual" if device.kind is DeviceKind.VIRTUAL else ""
    return "\n".join([f"needed {when} (in {made.phase}{virtual_word}):", *lines])


def disagreements(trials: Sequence[TrialResult]) -> tuple[str, ...]:
    """Tell of doubtful trials whose repetition came out differently, one sentence each."""
    known = {trial.spec.index: trial for trial in trials}
    said = []
    for again in trials:
        first = known.get(again.spec.repeats or 0)
        if first is not None and first.verdict is not again.verdict:
            said.append(
                f"microbatch {again.spec.split.microbatch} did not come out the same twice: "
                f"{_doubt_words(first)}, and trial {again.spec.index}, its repetition, "
                f"{_CAME_OUT.get(again.verdict, 'failed otherwise')}; the repetition counts"
            )
    return tuple(said)


_CAME_OUT = {
    Verdict.FITS: "fits",
    Verdict.OOM: "ran out of memory",
    Verdict.HOST_OOM: "ran out of host memory",
    Verdict.THRASH: "thrashes",
    Verdict.SIZE_LIMIT: "met an index limit",
}


def _doubt_words(first: TrialResult) -> str:
    lack = "host memory" if first.verdict is Verdict.HOST_OOM else "device memory"
    return f"trial {first.spec.index} looked like a lack of {lack} ({first.evidence.rule})"


def limits_of(spec: ProbeSpec) -> tuple[str, ...]:
    """What the figures leave out, one sentence each."""
    said = []
    if spec.device.kind is DeviceKind.VIRTUAL:
        said += [
            "The GPU is virtual: PyTorch, its allocator and its libraries ran, but kernels were "
            "not executed, so what they compute is not there.",
            "Where a size depends on values that kernels compute (masks, routing, early exits), "
            f"{spec.data_dependent:.0%} of the elements concerned count; the first such places "
            "are named.",
            f"The CUDA context is charged with {spec.device.context_source}.",
        ]
    if spec.device.kind is DeviceKind.CPU:
        said.append(
            "Peak resident memory of a process varies from run to run by some megabytes, and "
            "includes the interpreter and its libraries."
        )
    if spec.replicas > 1:
        said.append(
            f"One replica of {spec.replicas} ran, with peers that answer at once: the buffers of "
            "the wrapper are measured, those of the communication library are not."
        )
    return tuple(said)


def last_group_of(spec: ProbeSpec) -> str:
    """How a last group with fewer examples is to be treated, without a full stop."""
    said = (
        "a last group with fewer examples is split by the same rule and weighted by its own "
        "number of elements"
    )
    if spec.min_microbatch > 1:
        said += f"; where that leaves a microbatch below {spec.min_microbatch}, leave it out"
    return said


def noticed(answer: TrialResult) -> tuple[str, ...]:
    """What the answer's trial showed by the way, one sentence each without a full stop."""
    seen, said = answer.observed, []
    if seen.unlike_shapes:
        said.append(
            f"batch({answer.spec.sizes[0]}) returned unlike shapes from call to call "
            f"({' and '.join(f'({shape})' for shape in seen.unlike_shapes)}): the answer holds for "
            "what was drawn; return the longest batch that training will see"
        )
    if seen.unlike_counts is not None:
        low, high = seen.unlike_counts
        said.append(
            f"count() of microbatches of one size lay between {low:,} and {high:,}: weights follow "
            "the counts, but memory follows the longest batch, so batch() has to make that one"
        )
    if seen.graphs_first_group is not None or seen.graphs_later:
        first, later = seen.graphs_first_group or 0, seen.graphs_later or 0
        again = "none after it" if not later else f"{later} more after it: it recompiled"
        said.append(f"torch.compile compiled {first} graphs up to the end of group 1 and {again}")
    for other in seen.other_processes:
        used = "an unknown part" if other.used_bytes is None else format_bytes(other.used_bytes)
        name = f"{other.name} (pid {other.pid})" if other.name else f"pid {other.pid}"
        said.append(f"{name} used {used} of the GPU beside the trial; its memory is not free")
    if answer.spec.resumed:
        said.append(
            "the optimizer's state was there from the start; loading a checkpoint straight onto "
            "the device holds a second copy of it for a moment, which map_location='cpu' avoids"
        )
    return tuple(said)
