"""The verdict of a trial, from what it left behind: a table of endings."""

from __future__ import annotations

import dataclasses
import signal
from typing import Any

import pytest

from memfit.records import DeviceMemory, DeviceSpec, Split, TrialResult, TrialSpec, Verdict
from memfit.trial.classify import Ending, classify
from memfit.trial.protocol import Mark, WorkerFailure, WorkerReport
from memfit.units import GIB
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


def failure(*chain: tuple[str, str], **changes: Any) -> WorkerFailure:
    fields: dict[str, Any] = {
        "rule": None,
        "chain": list(chain),
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


def test_a_kill_is_said_to_be_perhaps_the_kernels() -> None:
    killed = judged(None, ending=Ending(exit_code=-signal.SIGKILL)).evidence.text
    fault = judged(None, ending=Ending(exit_code=-signal.SIGSEGV)).evidence.text

    assert "host memory runs out" in killed
    assert "host memory" not in fault


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
    ("kind", "message"),
    [
        ("builtins.ValueError", "the user's own words: CUDA out of memory. Tried to allocate"),
        ("builtins.KeyError", "'CUDA error: out of memory'"),
        ("builtins.SystemExit", "CUBLAS_STATUS_ALLOC_FAILED"),
        ("builtins.RuntimeError", "mat1 and mat2 shapes cannot be multiplied"),
        ("builtins.RuntimeError", "CUDA error: device-side assert triggered"),
        ("torch.AcceleratorError", "CUDA error: an illegal memory access was encountered"),
        ("builtins.RuntimeError", ""),
    ],
)
def test_every_other_exception_is_the_users_error(kind: str, message: str) -> None:
    result = judged(report(failed=failure((kind, message))))

    assert told(result) == (Verdict.ERROR, "exception")
    assert result.demand_bytes is None
    assert result.evidence.traceback == "the user's traceback"


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
    assert judged(report(failed=failure(NOT_SUPPORTED, free_bytes=free))).verdict is verdict


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
