"""The verdict of a trial, from what it left behind: a table of endings."""

from __future__ import annotations

import dataclasses
import signal
from typing import Any

import pytest

from memfit.records import (
    DeviceKind,
    DeviceMemory,
    DeviceSpec,
    HostRecord,
    Split,
    TrialResult,
    TrialSpec,
    Verdict,
)
from memfit.trial.classify import Ending, classify, helpers_lost
from memfit.trial.protocol import Link, Mark, WorkerFailure, WorkerReport
from memfit.units import GIB, MIB
from tests import sample

GPU = dataclasses.replace(sample.RTX_4090, limit_bytes=20 * GIB)
CPU = dataclasses.replace(sample.CPU, limit_bytes=4 * GIB)
WELL = Ending(exit_code=0, wall_s=1.5)


def spec(device: DeviceSpec = GPU, **changes: Any) -> TrialSpec:
    fields: dict[str, Any] = {
        "index": 3,
        "purpose": "search",
        "split": Split(microbatch=4, accumulation_steps=2),
        "group_microbatches": 2,
        "device": device,
        "timeout_s": 90.0,
    }
    return TrialSpec(**{**fields, **changes})


def memory(**changes: int | None) -> DeviceMemory:
    fields: dict[str, Any] = {field.name: None for field in dataclasses.fields(DeviceMemory)}
    return DeviceMemory(**{**fields, "rank": 0, "device": 0, "phases": (), **changes})


def failure(*chain: tuple[str, str] | Link, **changes: Any) -> WorkerFailure:
    links = [c if isinstance(c, Link) else Link(kind=c[0], message=c[1]) for c in chain]
    fields: dict[str, Any] = {
        "rule": None,
        "chain": links,
        "traceback": "the user's traceback",
        "free_bytes": 10 * GIB,
        "demand_bytes": None,
    }
    return WorkerFailure(**{**fields, **changes})


def report(*devices: DeviceMemory, failed: WorkerFailure | None = None) -> WorkerReport:
    return WorkerReport(
        devices=list(devices),
        composition=None,
        timeline=None,
        groups_run=2,
        optimizer_steps_attempted=2,
        optimizer_steps_applied=1,
        failure=failed,
    )


def judged(
    left: WorkerReport | None,
    *,
    device: DeviceSpec = GPU,
    ending: Ending = WELL,
    mark: Mark | None = None,
    **more: Any,
) -> TrialResult:
    return classify(spec(device), ending=ending, report=left, mark=mark, **more)


def told(result: TrialResult) -> tuple[Verdict, str]:
    return result.verdict, result.evidence.rule


# -- ends without a report ---------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS])
def test_a_signal_is_a_crash_with_the_signals_name(number: signal.Signals) -> None:
    result = judged(None, ending=Ending(exit_code=-number))

    assert told(result) == (Verdict.CRASH, number.name)
    assert f"ended by {number.name}" in result.evidence.text


def host(**changes: Any) -> HostRecord:
    fields: dict[str, Any] = {
        "cgroup": "/user.slice/job_7",
        "cgroup_limit_bytes": 2 * GIB,
        "cgroup_oom_kills": 0,
        "system_oom_kills": 0,
        "kernel_log": "unreadable",
    }
    return HostRecord(**{**fields, **changes})


NAMED: dict[str, Any] = {
    "kernel_log": "names it",
    "kernel_line": "Memory cgroup out of memory: Killed process 28088 (python3) anon-rss:108936kB",
}


@pytest.mark.parametrize(
    ("seen", "verdict", "rule", "doubtful", "said"),
    [
        (host(**NAMED), Verdict.HOST_OOM, "kernel's record of the kill", False, "process 28088"),
        (
            host(**NAMED, cgroup=None, cgroup_limit_bytes=None, cgroup_oom_kills=None),
            Verdict.HOST_OOM,
            "kernel's record of the kill",
            False,
            "the kernel killed it for want of host memory: Memory cgroup",
        ),
        (
            host(cgroup_oom_kills=1),
            Verdict.HOST_OOM,
            "control group's count of kills",
            False,
            "counted 1 kill for want of host memory (control group /user.slice/job_7, limit 2.00",
        ),
        (
            host(cgroup_oom_kills=None, system_oom_kills=2),
            Verdict.HOST_OOM,
            "machine's count of kills",
            True,
            "counted 2 kills for want of host memory on this machine",
        ),
        # Somebody else's kills: the log names every process, or our own group counted none.
        (
            host(kernel_log="does not name it", cgroup_oom_kills=1, system_oom_kills=1),
            Verdict.CRASH,
            "SIGKILL",
            False,
            "the kernel's log does not name it",
        ),
        (
            host(system_oom_kills=3),
            Verdict.CRASH,
            "SIGKILL",
            False,
            "its control group counted no kill",
        ),
        (
            host(cgroup=None, cgroup_limit_bytes=None, cgroup_oom_kills=None),
            Verdict.CRASH,
            "SIGKILL",
            False,
            "is unknown, because neither a control group nor the kernel's log can be read",
        ),
        (None, Verdict.CRASH, "SIGKILL", False, "is unknown"),
    ],
)
def test_a_kill_is_the_kernels_only_where_it_says_so(
    seen: HostRecord | None, verdict: Verdict, rule: str, said: str, *, doubtful: bool
) -> None:
    result = judged(None, ending=Ending(exit_code=-signal.SIGKILL, host=seen))

    assert told(result) == (verdict, rule)
    assert result.evidence.doubtful is doubtful
    assert said in result.evidence.text
    assert result.evidence.host == seen
    assert result.evidence.exit_code == -9


def test_the_hosts_record_has_no_part_in_other_signals() -> None:
    seen = host(cgroup_oom_kills=1)
    result = judged(None, ending=Ending(exit_code=-signal.SIGSEGV, host=seen))

    assert told(result) == (Verdict.CRASH, "SIGSEGV")


@pytest.mark.parametrize(
    ("lines", "verdict", "rule"),
    [
        (
            (
                "terminate called after throwing an instance of 'c10::Error'",
                "  what():  CUDA error: out of memory",
            ),
            Verdict.OOM,
            "CUDA runtime",
        ),
        (
            (
                "terminate called after throwing an instance of 'std::bad_alloc'",
                "  what():  std::bad_alloc",
            ),
            Verdict.HOST_OOM,
            "C++ allocation",
        ),
        (
            ("  what():  CUDA error: an illegal memory access was encountered",),
            Verdict.CRASH,
            "SIGABRT",
        ),
        (("the log said: CUDA error: out of memory",), Verdict.CRASH, "SIGABRT"),
        ((), Verdict.CRASH, "SIGABRT"),
    ],
)
def test_an_abort_counts_by_the_exception_that_nobody_caught_and_is_doubtful(
    lines: tuple[str, ...], verdict: Verdict, rule: str
) -> None:
    result = judged(None, ending=Ending(exit_code=-signal.SIGABRT), output_tail=lines)

    assert told(result) == (verdict, rule)
    assert result.evidence.doubtful is verdict.limits_size
    assert result.evidence.output_tail == lines


def test_a_bus_error_comes_with_advice_on_shared_memory() -> None:
    result = judged(None, ending=Ending(exit_code=-signal.SIGBUS))

    assert told(result) == (Verdict.CRASH, "SIGBUS")
    assert "/dev/shm" in (result.evidence.hint or "")


@pytest.mark.parametrize("code", [0, 1, 3, 70])
def test_leaving_without_a_report_is_a_crash(code: int) -> None:
    result = judged(None, ending=Ending(exit_code=code))

    assert told(result) == (Verdict.CRASH, "no report")
    assert f"exit status {code}" in result.evidence.text


def test_a_timeout_is_told_with_its_limit_and_place() -> None:
    result = judged(
        None,
        ending=Ending(exit_code=None, timed_out=True),
        mark=Mark(phase="backward", group=2, microbatch=1),
    )

    assert told(result) == (Verdict.TIMEOUT, "timeout")
    assert result.evidence.text == "it had not ended after 1 min 30 s in backward"
    assert (result.evidence.group, result.evidence.microbatch_index) == (2, 1)


def test_a_timeout_before_any_mark_has_no_place() -> None:
    result = judged(None, ending=Ending(exit_code=None, timed_out=True))

    assert result.evidence.text == "it had not ended after 1 min 30 s"
    assert result.evidence.phase is None


def test_a_timeout_stands_even_where_a_report_was_left() -> None:
    late = Ending(exit_code=None, timed_out=True)
    assert judged(report(), ending=late).verdict is Verdict.TIMEOUT


def test_passing_the_limit_on_resident_memory_is_host_oom_with_its_demand() -> None:
    result = judged(None, device=CPU, ending=Ending(exit_code=None, over_limit_bytes=5 * GIB))

    assert told(result) == (Verdict.HOST_OOM, "resident memory above the limit")
    assert result.demand_bytes == 5 * GIB
    assert "4.00 GiB with 5.00 GiB resident" in result.evidence.text


# -- ends with an exception --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError"])
def test_the_allocators_own_exception_is_oom(name: str) -> None:
    result = judged(report(failed=failure((name, "CUDA out of memory."), demand_bytes=21 * GIB)))

    assert told(result) == (Verdict.OOM, "torch.OutOfMemoryError")
    assert result.demand_bytes == 21 * GIB
    assert result.evidence.text == "21.00 GiB were needed of 20.00 GiB"
    assert result.evidence.exception == name


def test_an_oom_below_the_limit_is_said_to_be_fragmentation() -> None:
    oom = failure(("torch.OutOfMemoryError", "CUDA out of memory."), demand_bytes=19 * GIB)
    assert "19.00 GiB of 20.00 GiB were needed" in judged(report(failed=oom)).evidence.text
    assert "fragmentation" in judged(report(failed=oom)).evidence.text


def test_an_oom_of_unknown_demand_has_none() -> None:
    result = judged(report(failed=failure(("torch.OutOfMemoryError", "CUDA out of memory."))))

    assert result.demand_bytes is None
    assert result.evidence.text == "the allocator ran out of memory within 20.00 GiB"


@pytest.mark.parametrize(
    "chain",
    [
        (("builtins.RuntimeError", "step failed"), ("torch.OutOfMemoryError", "CUDA out of")),
        (("builtins.ValueError", "bad batch"), ("torch.OutOfMemoryError", "CUDA out of")),
    ],
)
def test_an_oom_that_the_users_code_wrapped_is_found(chain: tuple[tuple[str, str], ...]) -> None:
    assert judged(report(failed=failure(*chain))).verdict is Verdict.OOM


@pytest.mark.parametrize(
    ("kind", "message", "verdict", "rule"),
    [
        ("builtins.MemoryError", "", Verdict.HOST_OOM, "MemoryError"),
        (
            "builtins.RuntimeError",
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.",
            Verdict.HOST_OOM,
            "host allocator",
        ),
        (
            "builtins.RuntimeError",
            "only supports output tensors with less than INT_MAX elements",
            Verdict.SIZE_LIMIT,
            "32-bit index",
        ),
        (
            "builtins.RuntimeError",
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            Verdict.OOM,
            "cuBLAS",
        ),
        ("torch.AcceleratorError", "CUDA error: out of memory", Verdict.OOM, "CUDA runtime"),
        (
            "torch._inductor.exc.Wrapped",
            "Triton Error [CUDA]: out of memory",
            Verdict.OOM,
            "Triton",
        ),
        (
            "torch.distributed.DistBackendError",
            "Cuda failure 2 'out of memory'",
            Verdict.OOM,
            "NCCL",
        ),
    ],
)
def test_a_message_decides_where_the_class_does_not(
    kind: str, message: str, verdict: Verdict, rule: str
) -> None:
    assert told(judged(report(failed=failure((kind, message))))) == (verdict, rule)


@pytest.mark.parametrize(
    "link",
    [
        Link(kind="builtins.ValueError", message="CUDA out of memory. Tried to allocate 2 GiB"),
        Link(kind="builtins.KeyError", message="'CUDA error: out of memory'"),
        Link(kind="builtins.SystemExit", message="CUBLAS_STATUS_ALLOC_FAILED"),
        Link(
            kind="train.OutOfLuck",
            bases=["builtins.RuntimeError", "builtins.Exception"],
            message="CUDA error: out of memory",
        ),
        Link(kind="builtins.RuntimeError", message="CUDA out of memory.", raised_by="train"),
        Link(kind="builtins.RuntimeError", message="CUDA out of memory.", raised_by="nobody"),
        Link(kind="builtins.OSError", message="[Errno 12] out of memory", raised_by="train"),
        Link(kind="builtins.OSError", message="[Errno 28] No space left on device"),
        Link(kind="builtins.OSError", message="cannot allocate memory in static TLS block"),
        Link(kind="builtins.RuntimeError", message="mat1 and mat2 shapes cannot be multiplied"),
        Link(kind="builtins.RuntimeError", message="CUDA error: device-side assert triggered"),
        Link(
            kind="torch.AcceleratorError",
            message="CUDA error: an illegal memory access was encountered",
        ),
        Link(
            kind="triton.runtime.errors.OutOfResources",
            message="out of resource: shared memory, Required: 147456, Hardware limit: 101376.",
            raised_by="triton",
        ),
        Link(kind="builtins.RuntimeError", message=""),
    ],
    ids=lambda link: f"{link.kind}-{link.message[:20]}",
)
def test_every_other_exception_is_the_users_error(link: Link) -> None:
    result = judged(report(failed=failure(link, free_bytes=0, refused_here=True)))

    assert told(result) == (Verdict.ERROR, "exception")
    assert result.demand_bytes is None
    assert result.evidence.traceback == "the user's traceback"
    assert not result.evidence.doubtful


@pytest.mark.parametrize(
    ("link", "verdict", "rule"),
    [
        (
            Link(
                kind="train.MyOutOfMemory",
                bases=["torch.OutOfMemoryError", "builtins.RuntimeError"],
                message="",
            ),
            Verdict.OOM,
            "torch.OutOfMemoryError",
        ),
        (
            Link(
                kind="numpy._core._exceptions._ArrayMemoryError",
                bases=["builtins.MemoryError"],
                message="Unable to allocate 7.45 GiB for an array with shape (1000000000,)",
            ),
            Verdict.HOST_OOM,
            "MemoryError",
        ),
        (
            Link(kind="numpy.core._exceptions._ArrayMemoryError", message="Unable to allocate"),
            Verdict.HOST_OOM,
            "MemoryError",
        ),
        (
            Link(kind="builtins.OSError", message="[Errno 12] Cannot allocate memory"),
            Verdict.HOST_OOM,
            "refused by the system",
        ),
        (
            Link(
                kind="builtins.OSError",
                message="[Errno 12] Cannot allocate memory: 'ffmpeg'",
                raised_by="subprocess",
            ),
            Verdict.HOST_OOM,
            "refused by the system",
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, Link) else None,
)
def test_a_class_decides_by_what_it_derives_from(link: Link, verdict: Verdict, rule: str) -> None:
    outer = ("builtins.ValueError", "bad batch")
    assert told(judged(report(failed=failure(outer, link)))) == (verdict, rule)


def test_the_source_of_a_message_is_told() -> None:
    found = judged(report(failed=failure(("builtins.RuntimeError", "CUDA error: out of memory"))))

    assert found.evidence.seen_in == "mosaicml/composer#3397"
    assert not found.evidence.doubtful


KILLED = (
    "builtins.RuntimeError",
    "DataLoader worker (pid 4912) is killed by signal: Killed. ",
)


@pytest.mark.parametrize(
    ("link", "seen", "verdict"),
    [
        (KILLED, host(**NAMED), Verdict.HOST_OOM),
        (KILLED, host(cgroup_oom_kills=1), Verdict.HOST_OOM),
        (KILLED, host(), Verdict.ERROR),
        (KILLED, None, Verdict.ERROR),
        (
            ("builtins.RuntimeError", "DataLoader worker (pid(s) 4912, 4913) exited unexpectedly"),
            host(cgroup_oom_kills=1),
            Verdict.HOST_OOM,
        ),
        (
            (
                "concurrent.futures.process.BrokenProcessPool",
                "A process in the process pool was terminated abruptly while the future was "
                "running or pending.",
            ),
            host(cgroup_oom_kills=1),
            Verdict.HOST_OOM,
        ),
        (
            (
                "torch.multiprocessing.spawn.ProcessExitedException",
                "process 0 terminated with signal SIGKILL",
            ),
            host(cgroup_oom_kills=1),
            Verdict.HOST_OOM,
        ),
        # The kernel killed something, and this failure is of another kind.
        (("builtins.ValueError", "bad batch"), host(cgroup_oom_kills=1), Verdict.ERROR),
        (
            ("builtins.RuntimeError", "DataLoader worker (pid 1) is killed by signal: Aborted. "),
            host(cgroup_oom_kills=1),
            Verdict.ERROR,
        ),
    ],
)
def test_a_helper_that_the_kernel_killed_is_host_oom(
    link: tuple[str, str], seen: HostRecord | None, verdict: Verdict
) -> None:
    result = judged(report(failed=failure(link)), ending=Ending(exit_code=0, host=seen))
    assert result.verdict is verdict


@pytest.mark.parametrize(
    ("message", "pids"),
    [
        (KILLED[1], (4912,)),
        ("DataLoader worker (pid(s) 4912, 4913) exited unexpectedly", (4912, 4913)),
        ("process 0 terminated with signal SIGKILL", ()),
        ("bad batch", None),
    ],
)
def test_helpers_that_were_lost_are_named(message: str, pids: tuple[int, ...] | None) -> None:
    assert helpers_lost(failure(("builtins.RuntimeError", message))) == pids


NOT_SUPPORTED = ("builtins.RuntimeError", "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED")


@pytest.mark.parametrize(
    ("free", "verdict"),
    [
        (0, Verdict.OOM),
        (GIB - 1, Verdict.OOM),
        (GIB, Verdict.ERROR),
        (10 * GIB, Verdict.ERROR),
        (None, Verdict.ERROR),
    ],
)
def test_a_doubtful_message_needs_a_device_with_under_a_twentieth_free(
    free: int | None, verdict: Verdict
) -> None:
    result = judged(report(failed=failure(NOT_SUPPORTED, free_bytes=free)))

    assert result.verdict is verdict
    assert result.evidence.doubtful is (verdict is Verdict.OOM)
    assert result.evidence.free_bytes == free


@pytest.mark.parametrize(("refused", "demand"), [(True, 21 * GIB), (False, None)])
def test_an_allocator_that_was_just_refused_memory_settles_a_doubt_and_gives_the_demand(
    demand: int | None, *, refused: bool
) -> None:
    free = 10 * GIB if refused else 20 * MIB
    doubtful = failure(NOT_SUPPORTED, free_bytes=free, refused_here=refused, demand_bytes=21 * GIB)
    result = judged(report(failed=doubtful))

    assert result.verdict is Verdict.OOM
    assert result.demand_bytes == demand
    assert ("just been refused" if refused else "20.00 MiB of the device free") in (
        result.evidence.text
    )


def test_a_broken_rule_of_the_contract_is_told_in_its_own_words() -> None:
    broken = failure(
        ("memfit.errors.WorkloadError", "loss() returned float\nmore"), rule="contract"
    )
    result = judged(report(failed=broken))

    assert told(result) == (Verdict.ERROR, "contract")
    assert result.evidence.text == "loss() returned float"


def test_an_exception_is_told_by_class_and_first_line() -> None:
    own = judged(report(failed=failure(("builtins.ValueError", "\nfirst\nsecond"))))
    other = judged(report(failed=failure(("jax.Error", ""))))

    assert own.evidence.text == "ValueError: first"
    assert other.evidence.text == "jax.Error"


# -- ends well -----------------------------------------------------------------------------------


def test_groups_that_all_ran_fit_and_show_their_demand() -> None:
    used = memory(
        peak_allocated_bytes=10 * GIB, peak_reserved_bytes=12 * GIB, outside_allocator_bytes=GIB
    )
    result = judged(report(used))

    assert told(result) == (Verdict.FITS, "all groups ran")
    assert result.evidence.text == "2 groups ran, 13.00 GiB of 20.00 GiB used"
    assert result.demand_bytes == 11 * GIB
    assert (result.groups_run, result.optimizer_steps_attempted) == (2, 2)
    assert result.optimizer_steps_applied == 1
    assert result.wall_s == 1.5


def test_demand_is_that_of_the_most_loaded_device() -> None:
    light = memory(peak_allocated_bytes=3, peak_reserved_bytes=9)
    heavy = memory(peak_allocated_bytes=5, peak_reserved_bytes=6, outside_allocator_bytes=2)
    assert judged(report(light, heavy)).demand_bytes == 7


def test_a_fit_without_figures_says_so() -> None:
    result = judged(report(memory()))

    assert result.evidence.text == "2 groups ran, no figure used"
    assert result.demand_bytes is None


def test_retries_in_a_steady_group_are_thrash() -> None:
    thrashing = memory(
        peak_allocated_bytes=5, peak_reserved_bytes=6, alloc_retries=9, alloc_retries_last_group=4
    )
    result = judged(report(thrashing))

    assert told(result) == (Verdict.THRASH, "allocator retries in a steady group")
    assert "4 times in group 2" in result.evidence.text
    assert result.demand_bytes == 5


def test_retries_in_earlier_groups_only_are_no_thrash() -> None:
    settled = memory(peak_allocated_bytes=5, alloc_retries=9, alloc_retries_last_group=0)
    assert judged(report(settled)).verdict is Verdict.FITS


def test_on_the_cpu_resident_memory_is_the_demand() -> None:
    result = judged(report(memory(device_used_bytes=3 * GIB)), device=CPU)

    assert result.verdict is Verdict.FITS
    assert result.demand_bytes == 3 * GIB


def test_on_the_cpu_a_peak_above_the_limit_does_not_fit_however_it_ended() -> None:
    result = judged(report(memory(device_used_bytes=5 * GIB)), device=CPU)

    assert told(result) == (Verdict.HOST_OOM, "resident memory above the limit")
    assert result.demand_bytes == 5 * GIB


@pytest.mark.parametrize(
    ("kind", "reserved", "verdict"),
    [
        (DeviceKind.CUDA, 19 * GIB, Verdict.OOM),
        (DeviceKind.CUDA, 18 * GIB, Verdict.FITS),
        # A virtual card is as large as the limit: its driver refuses what does not fit.
        (DeviceKind.VIRTUAL, 19 * GIB, Verdict.FITS),
    ],
)
def test_on_a_real_gpu_what_lies_outside_the_allocator_counts_towards_the_limit(
    kind: DeviceKind, reserved: int, verdict: Verdict
) -> None:
    used = memory(
        peak_allocated_bytes=15 * GIB,
        peak_reserved_bytes=reserved,
        outside_allocator_bytes=2 * GIB,
    )
    result = judged(report(used), device=dataclasses.replace(GPU, kind=kind))

    assert result.verdict is verdict
    assert result.demand_bytes == 17 * GIB
    assert ("21.00 GiB were used of 20.00 GiB" in result.evidence.text) is (verdict is Verdict.OOM)


# -- evidence ------------------------------------------------------------------------------------


def test_a_trial_that_failed_keeps_its_place_and_its_last_lines() -> None:
    result = judged(
        report(failed=failure(("builtins.ValueError", "no"))),
        mark=Mark(phase="forward", group=1, microbatch=2),
        output_tail=("one", "two"),
    )

    assert (result.evidence.phase, result.evidence.group) == ("forward", 1)
    assert result.evidence.microbatch_index == 2
    assert result.evidence.output_tail == ("one", "two")


def test_before_the_first_group_there_is_no_group() -> None:
    result = judged(None, mark=Mark(phase="built", group=0, microbatch=0))

    assert (result.evidence.phase, result.evidence.group) == ("built", None)
    assert result.evidence.microbatch_index is None


def test_a_trial_that_ended_well_has_no_place_and_no_lines() -> None:
    result = judged(
        report(memory()),
        mark=Mark(phase="group_done", group=2, microbatch=0),
        output_tail=("epoch 1",),
    )

    assert result.evidence.phase is None
    assert result.evidence.output_tail == ()
    assert result.evidence.traceback is None


ONE_VALUE = "Expected more than 1 value per channel when training, got input size [1, 64]"


def test_a_batch_normalisation_of_a_single_value_is_told_as_what_it_is() -> None:
    torchs = Link(kind="builtins.ValueError", message=ONE_VALUE, raised_by="torch")
    result = judged(report(failed=failure(torchs)))

    assert (result.verdict, result.evidence.rule) == (Verdict.ERROR, "one value per channel")
    assert result.evidence.text == f"ValueError: {ONE_VALUE}"
    assert result.evidence.hint == "batch normalisation cannot train on a single value per channel"


@pytest.mark.parametrize(
    "link",
    [
        Link(kind="builtins.ValueError", message=ONE_VALUE, raised_by="train"),
        Link(kind="builtins.RuntimeError", message=ONE_VALUE, raised_by="torch"),
        Link(
            kind="builtins.ValueError",
            message="Expected more than 1 spatial element when training, got [1, 64, 1]",
            raised_by="torch",
        ),
    ],
)
def test_nothing_else_is_taken_for_a_batch_normalisation_of_a_single_value(link: Link) -> None:
    evidence = judged(report(failed=failure(link))).evidence
    assert (evidence.rule, evidence.hint) == ("exception", None)
