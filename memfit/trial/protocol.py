"""What parent, nursery and worker say to each other.

Parent and nursery exchange one JSON message a line over a socket. The worker reports through files
in the trial's folder, which outlive it however it ends.
"""

from __future__ import annotations

import os
import select
import socket
import time
from pathlib import Path
from typing import Literal

import msgspec

from memfit.records import (
    Composition,
    DeviceMemory,
    Environment,
    Ledger,
    Observed,
    Parameter,
    Timeline,
    TrialSpec,
    WorkloadInfo,
)
from memfit.trial.stacks import readable

MARKS = "marks"
REPORT = "report.json"
OUTPUT = "output"
NEEDS_VALUES = "needs-values"
SCRIPT = "reads.json"

ReadPass = Literal["watch", "record", "play"]
"""How a trial on a virtual GPU treats what the host reads of unknown values: leave at the first;
work values out and record what is read; answer from the record."""


class Load(msgspec.Struct, tag=True, kw_only=True):
    """Parent to nursery: import the user's code, or give it other parameters or another card."""

    target: str
    parameters: dict[str, Parameter]
    may_fork: bool
    """False in a process that is to run the trial itself."""
    card: str | None = None
    """Description of the virtual card for the trials that follow; None to keep what there is."""


class RunTrial(msgspec.Struct, tag=True, kw_only=True):
    """Parent to nursery: run this trial."""

    spec: TrialSpec
    folder: str
    reads: ReadPass | None = None
    """None where values are real."""


class Double(msgspec.Struct, tag=True, kw_only=True):
    """Parent to nursery: fork a nursery with the same imports, which serves the second channel."""


class DescribeGpu(msgspec.Struct, tag=True, kw_only=True):
    """Parent to nursery: what CUDA says of the current device."""


class Ready(msgspec.Struct, tag=True, kw_only=True):
    """Nursery to parent: the user's code is imported."""

    workload: WorkloadInfo
    environment: Environment
    fork_refusal: str | None
    """Why trials cannot be forked from here, or None when they can."""


class CardTaken(msgspec.Struct, tag=True, kw_only=True):
    """Nursery to parent: the user's code looked at the former card, so there can be no other."""


class Failed(msgspec.Struct, tag=True, kw_only=True):
    """Nursery to parent: the user's code could not be imported."""

    blame: Literal["usage", "workload"]
    message: str
    hint: str | None = None
    details: str | None = None


class Gpu(msgspec.Struct, tag=True, kw_only=True):
    """Nursery to parent: the current CUDA device, or why there is none."""

    name: str = ""
    total_bytes: int = 0
    compute_capability: str = ""
    failure: str | None = None
    virtual: bool = False
    """Whether the stand-in driver answers instead of a real one."""


class Started(msgspec.Struct, tag=True, kw_only=True):
    """Nursery to parent: the worker or the second nursery runs, as leader of its own group."""

    pid: int


class Ended(msgspec.Struct, tag=True, kw_only=True):
    """Nursery to parent: the worker ended."""

    exit_code: int
    """As in `subprocess`: negative for a signal."""


Message = (
    Load | RunTrial | Double | DescribeGpu | Ready | CardTaken | Failed | Gpu | Started | Ended
)


class Link(msgspec.Struct, kw_only=True):
    """One exception of those behind a failure."""

    kind: str
    """Class with its module, such as `builtins.RuntimeError`."""
    message: str
    bases: list[str] = msgspec.field(default_factory=list)
    """Classes that it derives from; empty where only its name is known."""
    raised_by: str | None = None
    """Top package whose Python code raised it; None where compiled code did."""


class WorkerFailure(msgspec.Struct, kw_only=True):
    """Why a worker's trial did not run to its end, as the worker saw it."""

    rule: str | None
    """Name of the check that failed, or None for an exception."""
    chain: list[Link]
    """The exception and everything behind it, the outermost first."""
    traceback: str | None
    hint: str | None = None
    """What memfit advises, where it raised the error itself."""
    free_bytes: int | None = None
    """Free memory of the device, within its limit, when it failed."""
    demand_bytes: int | None = None
    """Device memory needed when an allocation failed."""
    refused_here: bool = False
    """Whether the allocator had refused a request in the same phase of the same microbatch."""
    shared_full: bool = False
    """Whether the host's shared memory (/dev/shm) was next to full when it failed."""


class WorkerReport(msgspec.Struct, kw_only=True):
    """What a worker leaves behind."""

    devices: list[DeviceMemory]
    composition: Composition | None
    timeline: Timeline | None
    groups_run: int
    optimizer_steps_attempted: int
    optimizer_steps_applied: int
    failure: WorkerFailure | None
    observed: Observed = Observed()
    limits: list[str] = msgspec.field(default_factory=list)
    """What the figures leave out, one sentence each."""
    ledger: Ledger | None = None


class ReadPlace(msgspec.Struct, array_like=True):
    """A place in the user's code at which an assumed value steers the program."""

    where: str
    times: int


class ReadScript(msgspec.Struct, kw_only=True):
    """What the host read from the device in a pass that worked values out."""

    tape: bytes
    """The driver's own record of every read and its answer."""
    groups: list[int]
    """Where in the tape each group begins."""
    values: list[ReadPlace]
    """Reads of values that were assumed."""
    shapes: list[ReadPlace]
    """Sizes that depended on values that were assumed."""
    endless: bool
    """Whether a loop waited in vain for a value."""


class Mark(msgspec.Struct, array_like=True):
    """Where a worker is: phase, group from 1 and microbatch from 1 (0 where there is none)."""

    phase: str
    group: int
    microbatch: int


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Message).decode


class Channel:
    """One end of a socket that carries messages, one a line."""

    def __init__(self, end: socket.socket) -> None:
        """Take over a connected stream socket."""
        self._socket = end
        self._buffer = b""

    def fileno(self) -> int:
        """Descriptor, for select."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send one message; raises OSError when the other end is gone."""
        self._socket.sendall(_encode(message) + b"\n")

    def receive(self, timeout_s: float | None) -> Message | None:
        """Return the next message, or None when none came in time.

        Raises:
            EOFError: When the other end is gone.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = None if deadline is None else max(deadline - time.monotonic(), 0)
            if not select.select([self._socket], [], [], left)[0]:
                return None
            try:
                data = self._socket.recv(65536)
            except ConnectionError:
                data = b""
            if not data:
                raise EOFError
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return _decode(line)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def write_mark(descriptor: int, mark: Mark) -> None:
    """Append a mark; one short write, so that a kill leaves whole lines."""
    os.write(descriptor, _encode(mark) + b"\n")


def read_mark(folder: Path) -> Mark | None:
    """Return the last mark that a worker left, or None when it left none."""
    try:
        lines = (folder / MARKS).read_bytes().splitlines()
    except FileNotFoundError:
        return None
    return msgspec.json.decode(lines[-1], type=Mark) if lines else None


def read_output(folder: Path, *, lines: int = 30) -> tuple[str, ...]:
    """Return the last lines that a worker printed."""
    try:
        data = (folder / OUTPUT).read_bytes()
    except FileNotFoundError:
        return ()
    text = data[-65536:].decode(errors="replace").rstrip()
    return tuple(readable(text.splitlines())[-lines:])


def write_report(folder: Path, report: WorkerReport) -> None:
    """Write a worker's report to a temporary name and rename it."""
    partial = folder / f"{REPORT}.partial"
    partial.write_bytes(_encode(report))
    partial.rename(folder / REPORT)


def read_report(folder: Path) -> WorkerReport | None:
    """Return the report that a worker left, or None."""
    try:
        data = (folder / REPORT).read_bytes()
    except FileNotFoundError:
        return None
    return msgspec.json.decode(data, type=WorkerReport)


def write_needs_values(folder: Path, where: str) -> None:
    """Leave word that a trial reads an unknown value, and where it does so first."""
    (folder / NEEDS_VALUES).write_text(where)


def needs_values(folder: Path) -> bool:
    """Return whether a worker left because its trial reads unknown values."""
    return (folder / NEEDS_VALUES).exists()


def write_script(folder: Path, script: ReadScript) -> None:
    """Leave what a trial read."""
    (folder / SCRIPT).write_bytes(_encode(script))


def read_script(folder: Path) -> ReadScript | None:
    """Return what a trial read, or None when no pass got so far."""
    try:
        data = (folder / SCRIPT).read_bytes()
    except FileNotFoundError:
        return None
    return msgspec.json.decode(data, type=ReadScript)
