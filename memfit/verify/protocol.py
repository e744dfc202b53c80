"""What the parent and the process that computes say to each other.

The parent leaves a task in a folder; the process writes progress to a pipe, one sentence a line,
and leaves a report in the folder, which outlives it however it ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from memfit.verification import (
    Comparison,
    Finding,
    LoopSeen,
    LossNature,
    Outcome,
    ReplicaCheck,
)

TASK = "task.json"
REPORT = "report.json"
OUTPUT = "output"

Parameter = bool | int | float | str | None


class Task(msgspec.Struct, kw_only=True):
    """What is to be verified."""

    target: str
    kind: Literal["workload", "script"]
    parameters: dict[str, Parameter]
    full_size: bool
    """Whether the workload's own `verify_with` is left out."""
    arguments: list[str]
    """Words of the script."""
    logical_batch: int | None
    """None for a workload: as many examples as do not take long."""
    microbatch: int | None
    replicas: int
    device: Literal["cpu", "cuda"]
    seed: int
    accept: list[str]
    watch_s: float
    """Longest time that a loop is watched."""


class Failure(msgspec.Struct, kw_only=True):
    """Why nothing could be verified."""

    blame: Literal["usage", "workload", "machine"]
    message: str
    hint: str | None = None
    details: str | None = None


class Report(msgspec.Struct, kw_only=True):
    """What the process found."""

    torch: str = ""
    workload: str = ""
    sha256: str | None = None
    parameters: dict[str, Parameter] = {}
    outcome: Outcome = Outcome.UNKNOWN
    logical_batch: int | None = None
    findings: list[Finding] = []
    comparisons: list[Comparison] = []
    loss: LossNature | None = None
    loop: LoopSeen | None = None
    replicas: ReplicaCheck | None = None
    notes: list[str] = []
    failure: Failure | None = None


def write(path: Path, value: Task | Report) -> None:
    """Write to a temporary name and rename it."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(msgspec.json.encode(value))
    partial.rename(path)


def read_task(folder: Path) -> Task:
    """Return the task that the parent left."""
    return msgspec.json.decode((folder / TASK).read_bytes(), type=Task)


def read_report(folder: Path) -> Report | None:
    """Return the report that the process left, or None."""
    try:
        data = (folder / REPORT).read_bytes()
    except FileNotFoundError:
        return None
    return msgspec.json.decode(data, type=Report)
