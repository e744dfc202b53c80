"""What a worker tells of its trial in words: how it failed, and what its figures leave out."""

from __future__ import annotations

from typing import Any

from memfit.errors import MemfitError
from memfit.records import DeviceKind, TrialSpec
from memfit.trial.checks import CheckFailed
from memfit.trial.protocol import WorkerFailure
from memfit.trial.reads import TrialReads
from memfit.workload import user_traceback

_FEW = 5


def describe_failure(
    error: BaseException, *, free_bytes: int | None, demand_bytes: int | None
) -> WorkerFailure:
    """Turn whatever ended a trial into words, without keeping its frames.

    Args:
        error: What was raised.
        free_bytes: Free memory of the device when it was raised.
        demand_bytes: Device memory needed when an allocation failed.
    """
    chain: list[tuple[str, str]] = []
    link: BaseException | None = error
    while link is not None and len(chain) < 10:  # noqa: PLR2004
        kind = type(link)
        chain.append((f"{kind.__module__}.{kind.__qualname__}", str(link)))
        link = link.__cause__ or link.__context__
    known = isinstance(error, MemfitError)
    return WorkerFailure(
        rule=error.rule if isinstance(error, CheckFailed) else "contract" if known else None,
        chain=chain,
        traceback=error.details if isinstance(error, MemfitError) else user_traceback(error),
        hint=error.hint if isinstance(error, MemfitError) else None,
        free_bytes=free_bytes,
        demand_bytes=demand_bytes,
    )


def limits_of(model: Any, spec: TrialSpec, reads: TrialReads) -> list[str]:
    """What the virtual GPU knows that it did not know, one sentence each."""
    if spec.device.kind is not DeviceKind.VIRTUAL:
        return []
    from memfit.virtual import control  # noqa: PLC0415

    said = []
    modules = model.modules() if hasattr(model, "modules") else ()
    convolves = any("Conv" in type(module).__name__ for module in modules)
    if convolves and not control.asks_cudnn():
        said.append(
            "The installed cuDNN is older than 9.8 and cannot plan for a device that is not "
            "there: the workspaces of convolutions are not counted."
        )
    invented = control.unknown_names()
    if invented:
        shown = ", ".join(invented[:_FEW]) + (" and others" if len(invented) > _FEW else "")
        said.append(
            f"{control.unknown_calls()} calls went to functions whose results the stand-in "
            f"driver had to invent: {shown}."
        )
    return [*said, *reads.limits()]
