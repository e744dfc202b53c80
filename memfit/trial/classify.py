"""How a trial ended, told from what it left behind. Pure: no processes, no torch.

Evidence is weighed in this order: the class of an exception, along everything behind it; the words
of messages that torch and compiled code wrote; what was next to full when a doubtful message was
written; how the process ended; what the host's kernel counted and wrote of processes it killed.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace

from memfit.records import (
    DeviceKind,
    Evidence,
    HostRecord,
    Observed,
    TrialResult,
    TrialSpec,
    Verdict,
)
from memfit.trial.protocol import Link, Mark, WorkerFailure, WorkerReport
from memfit.trial.signatures import Doubt, Signature, match
from memfit.units import format_bytes, format_seconds

_NEARLY_FULL_SHARE = 0.05
"""Free share of the limit under which a doubtful message is taken for a lack of memory."""
_OUT_OF_MEMORY = {"torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError"}
_TRUSTED = (None, "torch", "triton")
"""Who raises an exception whose words count: compiled code and torch's own. What the user's code
raises with the same words are the user's words."""
_STARTS_PROCESSES = (*_TRUSTED, "subprocess", "multiprocessing", "concurrent", "os")
_REFUSED = re.compile(r"^\[Errno 12\] ")
"""ENOMEM, with which the system refuses a fork or a mapping."""
_LOST_HELPER = re.compile(
    r"DataLoader worker \(pid\(?s?\)? (?P<pids>[\d, ]+)\) (?:is killed by signal: Killed|exited)"
    r"|process pool was terminated abruptly"
    r"|process \d+ terminated with signal SIGKILL"
)
"""How torch and Python tell that a process that works for the trial was killed."""
_TERMINATED = re.compile(r"^\s*what\(\):\s*(?P<message>.*)")
"""How the C++ library tells the exception that nobody caught, before it aborts the process."""
ONE_VALUE = "one value per channel"
"""Rule of a batch normalisation that was given one example, and can train on no such microbatch."""
_ONE_VALUE = "Expected more than 1 value per channel when training"
"""How torch refuses it; `_verify_batch_size` in torch/nn/functional.py, and SyncBatchNorm."""
_ONE_VALUE_HINT = "batch normalisation cannot train on a single value per channel"
_BUS_ERROR_HINT = (
    "a bus error is often shared memory that is full: enlarge /dev/shm (--shm-size of a container)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What the parent saw of a worker's end."""

    exit_code: int | None
    """As in `subprocess`; None when the worker was killed by its own parent."""
    timed_out: bool = False
    over_limit_bytes: int | None = None
    """Resident memory at which the parent ended a worker on the CPU device, or None."""
    host: HostRecord | None = None
    """What the host's kernel counted while the trial ran; None where nobody looked."""
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judgement:
    verdict: Verdict
    rule: str
    text: str
    demand_bytes: int | None = None
    seen_in: str | None = None
    doubtful: bool = False
    host: HostRecord | None = None
    hint: str | None = None


def classify(
    spec: TrialSpec,
    *,
    ending: Ending,
    report: WorkerReport | None,
    mark: Mark | None,
    output_tail: tuple[str, ...] = (),
) -> TrialResult:
    """Make the result of a trial from its report, its last mark and its end."""
    judged = _judge(spec, ending=ending, report=report, mark=mark, output_tail=output_tail)
    failure = report.failure if report else None
    ended_well = judged.verdict in (Verdict.FITS, Verdict.THRASH)
    where = None if ended_well else mark
    evidence = Evidence(
        rule=judged.rule,
        text=judged.text,
        phase=where.phase if where else None,
        group=(where.group or None) if where else None,
        microbatch_index=(where.microbatch or None) if where else None,
        exception=failure.chain[0].kind if failure and failure.chain else None,
        traceback=failure.traceback if failure else None,
        hint=(failure.hint if failure else None) or judged.hint,
        output_tail=() if ended_well else output_tail,
        seen_in=judged.seen_in,
        doubtful=judged.doubtful,
        free_bytes=failure.free_bytes if failure else None,
        exit_code=None if report else ending.exit_code,
        host=judged.host,
    )
    return TrialResult(
        spec=spec,
        verdict=judged.verdict,
        evidence=evidence,
        demand_bytes=judged.demand_bytes,
        devices=tuple(report.devices) if report else (),
        composition=report.composition if report else None,
        ledger=report.ledger if report else None,
        timeline=report.timeline if report else None,
        observed=report.observed if report else Observed(),
        groups_run=report.groups_run if report else 0,
        optimizer_steps_attempted=report.optimizer_steps_attempted if report else 0,
        optimizer_steps_applied=report.optimizer_steps_applied if report else 0,
        limits=tuple(report.limits) if report else (),
        wall_s=ending.wall_s,
    )


def _judge(
    spec: TrialSpec,
    *,
    ending: Ending,
    report: WorkerReport | None,
    mark: Mark | None,
    output_tail: tuple[str, ...],
) -> _Judgement:
    if ending.over_limit_bytes is not None:
        return _Judgement(
            verdict=Verdict.HOST_OOM,
            rule="resident memory above the limit",
            text=f"the process passed the limit of {format_bytes(spec.device.limit_bytes)} "
            f"with {format_bytes(ending.over_limit_bytes)} resident and was stopped",
            demand_bytes=ending.over_limit_bytes,
        )
    if ending.timed_out:
        at = f" in {mark.phase}" if mark else ""
        limit = format_seconds(spec.timeout_s or 0)
        return _Judgement(
            verdict=Verdict.TIMEOUT, rule="timeout", text=f"it had not ended after {limit}{at}"
        )
    if report is None:
        return _judge_exit(ending, output_tail)
    if report.failure is not None:
        return _judge_failure(spec, report.failure, ending.host)
    return _judge_completed(spec, report)


# -- ends without a report ---------------------------------------------------------------------


def _judge_exit(ending: Ending, output_tail: tuple[str, ...]) -> _Judgement:
    code = ending.exit_code
    if code is None or code >= 0:
        text = f"the worker ended with exit status {code} and left no report"
        return _Judgement(verdict=Verdict.CRASH, rule="no report", text=text)
    name = signal.Signals(-code).name
    text = f"the worker was ended by {name}"
    if -code == signal.SIGKILL:
        return _judge_kill(text, ending.host)
    if -code == signal.SIGABRT:
        aborted = _judge_abort(output_tail)
        if aborted is not None:
            return aborted
    hint = _BUS_ERROR_HINT if -code == signal.SIGBUS else None
    return _Judgement(verdict=Verdict.CRASH, rule=name, text=text, hint=hint)


def _judge_kill(text: str, host: HostRecord | None) -> _Judgement:
    """Tell the kernel's kill for want of memory from everybody else's."""
    killed = None if host is None else _killed_by_kernel(host)
    if killed is not None:
        return replace(killed, text=f"{text}: {killed.text}")
    text = f"{text}: {_by_somebody(host)}"
    return _Judgement(verdict=Verdict.CRASH, rule="SIGKILL", text=text, host=host)


def _killed_by_kernel(host: HostRecord) -> _Judgement | None:
    """Return the verdict where the kernel killed for want of host memory, else None."""
    where = "for want of host memory"
    if host.cgroup_limit_bytes is not None:
        where += f" (control group {host.cgroup}, limit {format_bytes(host.cgroup_limit_bytes)})"
    if host.kernel_log == "names it":
        said = f"the kernel killed it {where}: {host.kernel_line}"
        return _Judgement(
            verdict=Verdict.HOST_OOM, rule="kernel's record of the kill", text=said, host=host
        )
    if host.kernel_log == "does not name it":
        return None  # the log tells every such kill, with its process
    if host.cgroup_oom_kills:
        count = _times(host.cgroup_oom_kills)
        said = f"the kernel counted {count} {where} while the trial ran"
        return _Judgement(
            verdict=Verdict.HOST_OOM, rule="control group's count of kills", text=said, host=host
        )
    if host.cgroup_oom_kills is None and host.system_oom_kills:
        count = _times(host.system_oom_kills)
        said = (
            f"the kernel counted {count} for want of host memory on this machine while the trial "
            "ran, and does not tell us which process it was"
        )
        return _Judgement(
            verdict=Verdict.HOST_OOM,
            rule="machine's count of kills",
            text=said,
            doubtful=True,
            host=host,
        )
    return None


def _times(kills: int) -> str:
    return "1 kill" if kills == 1 else f"{kills} kills"


def _by_somebody(host: HostRecord | None) -> str:
    """Say what is known of a kill that was not the kernel's for want of memory."""
    if host is not None and host.kernel_log == "does not name it":
        return "the kernel's log does not name it among those it killed for want of memory"
    if host is not None and host.cgroup_oom_kills is not None:
        return "its control group counted no kill for want of memory"
    return (
        "whether the kernel did it for want of host memory is unknown, because neither a control "
        "group nor the kernel's log can be read"
    )


def _judge_abort(output_tail: tuple[str, ...]) -> _Judgement | None:
    """Return what an exception that no C++ code caught says, where that is a lack of memory."""
    for line in output_tail:
        told = _TERMINATED.match(line)
        signature = match(told["message"]) if told else None
        if told and signature is not None and signature.verdict is not Verdict.SIZE_LIMIT:
            return _Judgement(
                verdict=signature.verdict,
                rule=signature.name,
                text=f"the worker was ended by SIGABRT: {told['message'].strip()}",
                seen_in=signature.source,
                doubtful=True,
            )
    return None


# -- ends with an exception --------------------------------------------------------------------


def _judge_failure(spec: TrialSpec, failure: WorkerFailure, host: HostRecord | None) -> _Judgement:
    first = failure.chain[0]
    first_line = first.message.strip().splitlines()[0] if first.message.strip() else ""
    kind = first.kind.removeprefix("builtins.")
    said = f"{kind}: {first_line}" if first_line else kind
    if failure.rule is not None:
        return _Judgement(verdict=Verdict.ERROR, rule=failure.rule, text=first_line)
    decided = (
        _judge_classes(spec, failure, said)
        or _judge_words(spec, failure, said)
        or _judge_helper(failure, host, said)
    )
    if decided is not None:
        return decided
    if any(_normalises_one_value(link) for link in failure.chain):
        return _Judgement(verdict=Verdict.ERROR, rule=ONE_VALUE, text=said, hint=_ONE_VALUE_HINT)
    lost_on_bus = any("killed by signal: Bus error" in link.message for link in failure.chain)
    hint = _BUS_ERROR_HINT if lost_on_bus else None
    return _Judgement(verdict=Verdict.ERROR, rule="exception", text=said, hint=hint)


def _normalises_one_value(link: Link) -> bool:
    known = link.kind == "builtins.ValueError" and link.raised_by == "torch"
    return known and link.message.startswith(_ONE_VALUE)


def _judge_classes(spec: TrialSpec, failure: WorkerFailure, said: str) -> _Judgement | None:
    """Decide by the class of an exception, along everything behind it."""
    for link in failure.chain:
        if _OUT_OF_MEMORY & {link.kind, *link.bases}:
            return _Judgement(
                verdict=Verdict.OOM,
                rule="torch.OutOfMemoryError",
                text=_oom_text(spec, failure),
                demand_bytes=failure.demand_bytes,
            )
    for link in failure.chain:
        classes = {link.kind, *link.bases}
        if "builtins.MemoryError" in classes or link.kind.endswith("._ArrayMemoryError"):
            return _Judgement(verdict=Verdict.HOST_OOM, rule="MemoryError", text=said)
        refused = "builtins.OSError" in classes and _REFUSED.match(link.message)
        if refused and link.raised_by in _STARTS_PROCESSES:
            return _Judgement(verdict=Verdict.HOST_OOM, rule="refused by the system", text=said)
    return None


def _judge_words(spec: TrialSpec, failure: WorkerFailure, said: str) -> _Judgement | None:
    """Decide by what torch and compiled code said, and by what was next to full then."""
    full: set[Doubt] = set()
    free = failure.free_bytes
    short = free is not None and free < _NEARLY_FULL_SHARE * spec.device.limit_bytes
    if short or failure.refused_here:
        full.add("device")
    if failure.shared_full:
        full.add("shared")
    for link in failure.chain:
        signature = match(link.message, full=frozenset(full)) if _counts(link) else None
        if signature is not None:
            return _Judgement(
                verdict=signature.verdict,
                rule=signature.name,
                text=f"{said}{_free_words(signature, failure)}",
                demand_bytes=failure.demand_bytes if failure.refused_here else None,
                seen_in=signature.source,
                doubtful=signature.doubt is not None,
            )
    return None


def _counts(link: Link) -> bool:
    """Whether the words of an exception are those of torch or of compiled code."""
    library = link.kind.startswith(("torch.", "triton."))
    return link.raised_by in _TRUSTED and (library or link.kind == "builtins.RuntimeError")


def _free_words(signature: Signature, failure: WorkerFailure) -> str:
    """Say what makes a doubtful message count."""
    if signature.doubt == "shared":
        return " (shared memory is full)"
    if signature.doubt is None:
        return ""
    if failure.refused_here:
        return " (the allocator had just been refused memory)"
    return f" ({format_bytes(failure.free_bytes or 0)} of the device free)"


def _judge_helper(failure: WorkerFailure, host: HostRecord | None, said: str) -> _Judgement | None:
    """Decide where a process that worked for the trial was killed."""
    lost = any(_LOST_HELPER.search(link.message) for link in failure.chain)
    killed = _killed_by_kernel(host) if lost and host is not None else None
    return None if killed is None else replace(killed, text=f"{said}; {killed.text}")


def helpers_lost(failure: WorkerFailure) -> tuple[int, ...] | None:
    """Return the processes that a failure says were killed while they worked for the trial.

    Empty where it does not say which; None where it speaks of none.
    """
    found = [m for m in (_LOST_HELPER.search(link.message) for link in failure.chain) if m]
    if not found:
        return None
    return tuple(int(pid) for m in found for pid in re.findall(r"\d+", m["pids"] or ""))


def _oom_text(spec: TrialSpec, failure: WorkerFailure) -> str:
    limit = format_bytes(spec.device.limit_bytes)
    if failure.demand_bytes is None:
        return f"the allocator ran out of memory within {limit}"
    need = format_bytes(failure.demand_bytes)
    if failure.demand_bytes > spec.device.limit_bytes:
        return f"{need} were needed of {limit}"
    return f"{need} of {limit} were needed, but no free stretch was large enough (fragmentation)"


# -- ends with all groups run ------------------------------------------------------------------


def _judge_completed(spec: TrialSpec, report: WorkerReport) -> _Judgement:
    limit = spec.device.limit_bytes
    peaks = [peak for device in report.devices if (peak := device.peak_bytes) is not None]
    peak = max(peaks) if peaks else None
    if spec.device.kind is DeviceKind.CPU:
        if peak is not None and peak > limit:
            text = f"peak resident memory {format_bytes(peak)} passed {format_bytes(limit)}"
            return _Judgement(
                verdict=Verdict.HOST_OOM,
                rule="resident memory above the limit",
                text=text,
                demand_bytes=peak,
            )
        demand = peak
    else:
        demands = [
            device.peak_allocated_bytes + (device.outside_allocator_bytes or 0)
            for device in report.devices
            if device.peak_allocated_bytes is not None
        ]
        demand = max(demands) if demands else None
    if spec.device.kind is DeviceKind.CUDA and peak is not None and peak > limit:
        text = (
            f"all groups ran, but {format_bytes(peak)} were used of {format_bytes(limit)}: what "
            "lies outside the allocator is not held back by the limit on it"
        )
        return _Judgement(
            verdict=Verdict.OOM,
            rule="device memory above the limit",
            text=text,
            demand_bytes=demand,
        )
    retries = max((device.alloc_retries_last_group or 0 for device in report.devices), default=0)
    if retries:
        text = f"the allocator flushed its cache {retries} times in group {report.groups_run}"
        return _Judgement(
            verdict=Verdict.THRASH,
            rule="allocator retries in a steady group",
            text=text,
            demand_bytes=demand,
        )
    used = f"{format_bytes(peak)} of {format_bytes(limit)}" if peak is not None else "no figure"
    text = f"{report.groups_run} groups ran, {used} used"
    return _Judgement(verdict=Verdict.FITS, rule="all groups ran", text=text, demand_bytes=demand)
