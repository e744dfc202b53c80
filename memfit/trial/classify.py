"""How a trial ended, told from what it left behind. Pure: no processes, no torch."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from memfit.records import DeviceKind, Evidence, TrialResult, TrialSpec, Verdict
from memfit.trial.protocol import Mark, WorkerFailure, WorkerReport
from memfit.trial.signatures import match
from memfit.units import format_bytes, format_seconds

_NEARLY_FULL_SHARE = 0.05
"""Free share of the limit under which a doubtful message is taken for a lack of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What the parent saw of a worker's end."""

    exit_code: int | None
    """As in `subprocess`; None when the worker was killed by its own parent."""
    timed_out: bool = False
    over_limit_bytes: int | None = None
    """Resident memory at which the parent ended a worker on the CPU device, or None."""
    wall_s: float = 0.0


def classify(
    spec: TrialSpec,
    *,
    ending: Ending,
    report: WorkerReport | None,
    mark: Mark | None,
    output_tail: tuple[str, ...] = (),
) -> TrialResult:
    """Make the result of a trial from its report, its last mark and its end."""
    verdict, rule, text, demand = _judge(spec, ending=ending, report=report, mark=mark)
    failure = report.failure if report else None
    ended_well = verdict in (Verdict.FITS, Verdict.THRASH)
    where = None if ended_well else mark
    evidence = Evidence(
        rule=rule,
        text=text,
        phase=where.phase if where else None,
        group=(where.group or None) if where else None,
        microbatch_index=(where.microbatch or None) if where else None,
        exception=failure.chain[0][0] if failure and failure.chain else None,
        traceback=failure.traceback if failure else None,
        hint=failure.hint if failure else None,
        output_tail=() if ended_well else output_tail,
    )
    return TrialResult(
        spec=spec,
        verdict=verdict,
        evidence=evidence,
        demand_bytes=demand,
        devices=tuple(report.devices) if report else (),
        composition=report.composition if report else None,
        timeline=report.timeline if report else None,
        groups_run=report.groups_run if report else 0,
        optimizer_steps_attempted=report.optimizer_steps_attempted if report else 0,
        optimizer_steps_applied=report.optimizer_steps_applied if report else 0,
        limits=tuple(report.limits) if report else (),
        wall_s=ending.wall_s,
    )


_Judgement = tuple[Verdict, str, str, int | None]


def _judge(
    spec: TrialSpec, *, ending: Ending, report: WorkerReport | None, mark: Mark | None
) -> _Judgement:
    if ending.over_limit_bytes is not None:
        return (
            Verdict.HOST_OOM,
            "resident memory above the limit",
            f"the process passed the limit of {format_bytes(spec.device.limit_bytes)} "
            f"with {format_bytes(ending.over_limit_bytes)} resident and was stopped",
            ending.over_limit_bytes,
        )
    if ending.timed_out:
        at = f" in {mark.phase}" if mark else ""
        limit = format_seconds(spec.timeout_s or 0)
        return Verdict.TIMEOUT, "timeout", f"it had not ended after {limit}{at}", None
    if report is None:
        return _judge_exit(ending.exit_code)
    if report.failure is not None:
        return _judge_failure(spec, report.failure)
    return _judge_completed(spec, report)


def _judge_exit(exit_code: int | None) -> _Judgement:
    if exit_code is not None and exit_code < 0:
        name = signal.Signals(-exit_code).name
        text = f"the worker was ended by {name}"
        if -exit_code == signal.SIGKILL:
            text += "; that is also how the kernel ends a process when host memory runs out"
        return Verdict.CRASH, name, text, None
    return (
        Verdict.CRASH,
        "no report",
        f"the worker ended with exit status {exit_code} and left no report",
        None,
    )


def _judge_failure(spec: TrialSpec, failure: WorkerFailure) -> _Judgement:
    kind, message = failure.chain[0]
    first_line = message.strip().splitlines()[0] if message.strip() else ""
    said = f"{kind.removeprefix('builtins.')}: {first_line}" if first_line else kind
    if failure.rule is not None:
        return Verdict.ERROR, failure.rule, first_line, None
    if any(
        name in ("torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError")
        for name, _ in failure.chain
    ):
        return Verdict.OOM, "torch.OutOfMemoryError", _oom_text(spec, failure), failure.demand_bytes
    if any(name == "builtins.MemoryError" for name, _ in failure.chain):
        return Verdict.HOST_OOM, "MemoryError", said, None
    nearly_full = (
        failure.free_bytes is not None
        and failure.free_bytes < _NEARLY_FULL_SHARE * spec.device.limit_bytes
    )
    for name, text in failure.chain:
        if name.startswith("builtins.") and name != "builtins.RuntimeError":
            continue  # a user's ValueError that merely speaks of memory
        signature = match(text, nearly_full=nearly_full)
        if signature is not None:
            return signature.verdict, signature.name, said, failure.demand_bytes
    return Verdict.ERROR, "exception", said, None


def _oom_text(spec: TrialSpec, failure: WorkerFailure) -> str:
    limit = format_bytes(spec.device.limit_bytes)
    if failure.demand_bytes is None:
        return f"the allocator ran out of memory within {limit}"
    need = format_bytes(failure.demand_bytes)
    if failure.demand_bytes > spec.device.limit_bytes:
        return f"{need} were needed of {limit}"
    return f"{need} of {limit} were needed, but no free stretch was large enough (fragmentation)"


def _judge_completed(spec: TrialSpec, report: WorkerReport) -> _Judgement:
    limit = spec.device.limit_bytes
    peaks = [peak for device in report.devices if (peak := device.peak_bytes) is not None]
    peak = max(peaks) if peaks else None
    if spec.device.kind is DeviceKind.CPU:
        if peak is not None and peak > limit:
            text = f"peak resident memory {format_bytes(peak)} passed {format_bytes(limit)}"
            return Verdict.HOST_OOM, "resident memory above the limit", text, peak
        demand = peak
    else:
        demands = [
            device.peak_allocated_bytes + (device.outside_allocator_bytes or 0)
            for device in report.devices
            if device.peak_allocated_bytes is not None
        ]
        demand = max(demands) if demands else None
    retries = max((device.alloc_retries_last_group or 0 for device in report.devices), default=0)
    if retries:
        text = f"the allocator flushed its cache {retries} times in group {report.groups_run}"
        return Verdict.THRASH, "allocator retries in a steady group", text, demand
    used = f"{format_bytes(peak)} of {format_bytes(limit)}" if peak is not None else "no figure"
    text = f"{report.groups_run} groups ran, {used} used"
    return Verdict.FITS, "all groups ran", text, demand
