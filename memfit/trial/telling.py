"""What a worker tells of its trial in words: how it failed, and what its figures leave out."""

from __future__ import annotations

import shutil
from typing import Any

from memfit.errors import MemfitError
from memfit.records import DeviceKind, TrialSpec
from memfit.trial.chain import links
from memfit.trial.checks import CheckFailed
from memfit.trial.protocol import WorkerFailure
from memfit.trial.reads import TrialReads
from memfit.units import MIB, format_bytes
from memfit.workload import user_traceback

_NEARLY_FULL_SHARE = 0.05
_MUCH_HOST_MEMORY = 512 * MIB


def describe_failure(
    error: BaseException,
    *,
    free_bytes: int | None,
    demand_bytes: int | None,
    refused_here: bool,
) -> WorkerFailure:
    """Turn whatever ended a trial into words, without keeping its frames.

    Args:
        error: What was raised.
        free_bytes: Free memory of the device, within its limit, when it was raised.
        demand_bytes: Device memory needed when an allocation failed.
        refused_here: Whether the allocator was refused memory in the same phase.
    """
    known = isinstance(error, MemfitError)
    return WorkerFailure(
        rule=error.rule if isinstance(error, CheckFailed) else "contract" if known else None,
        chain=links(error),
        traceback=error.details if isinstance(error, MemfitError) else user_traceback(error),
        hint=error.hint if isinstance(error, MemfitError) else None,
        free_bytes=free_bytes,
        demand_bytes=demand_bytes,
        refused_here=refused_here,
        shared_full=_shared_memory_is_full(),
    )


def _shared_memory_is_full() -> bool:
    try:
        room = shutil.disk_usage("/dev/shm")  # noqa: S108 - looked at, not written to
    except OSError:
        return False
    return room.free < _NEARLY_FULL_SHARE * room.total


def host_build_note(taken_bytes: int) -> str | None:
    """Say that a model was built on the host first, when that took much of its memory."""
    if taken_bytes < _MUCH_HOST_MEMORY:
        return None
    return (
        f"Building the model took {format_bytes(taken_bytes)} of host memory: model() makes "
        "parameters on the CPU and moves them. Made on the default device, which is the trial's, "
        "they take none on a virtual GPU."
    )


def limits_of(model: Any, spec: TrialSpec, reads: TrialReads) -> list[str]:
    """What the virtual GPU knows that it did not know, one sentence each."""
    if spec.device.kind is not DeviceKind.VIRTUAL:
        return []
    from memfit.virtual import control, words  # noqa: PLC0415

    said: list[str] = []
    modules = model.modules() if hasattr(model, "modules") else ()
    convolves = any("Conv" in type(module).__name__ for module in modules)
    if convolves and not control.asks_cudnn():
        said.append(
            "The installed cuDNN is older than 9.8 and cannot plan for a device that is not "
            "there: the workspaces of convolutions are not counted."
        )
    said += words.invented(control.unknown_calls(), control.unknown_names())
    said += words.benchmark(*control.benchmarked())
    said += words.pool(control.rounding_bytes())
    return [*said, *reads.limits()]
