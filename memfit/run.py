"""Run any program on a virtual card, and gather what each of its processes did to the card.

The program is started unmodified, with the stand-in driver and an observer in its environment (see
`virtual.observer`), and in a session of its own: a signal to memfit is passed on to it once.
Whatever the program leaves behind is adopted by this process, and ended with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import importlib.metadata
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from memfit import __version__, virtual
from memfit.devices.select import Choice, describe
from memfit.errors import CannotJudge, UsageError
from memfit.records import DeviceKind, DeviceSpec, RunProcess, RunResult, Source
from memfit.units import format_bytes
from memfit.virtual import words
from memfit.virtual.build import find_torch

_GRACE_S = 15.0
"""What a program may take to end after the signal that was passed on to it."""
_LEFTOVER_S = 2.0
"""What processes that outlive the program may take to end once they are asked to."""
_POLL_S = 0.2
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_CHILD_SUBREAPER = 36
_CUDNN_THAT_PLANS = (9, 8)
_FEW = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What is to be run, in the user's words."""

    program: Sequence[str]
    device: str
    """Name of the card to imitate."""
    memory_limit: str | None = None
    devices: int = 1
    keep_stdout: bool = False
    """Whether this process's stdout is wanted for something else: the program's then joins its
    stderr."""
    command: str = ""
    """The command that asked."""


def run_program(request: RunRequest) -> RunResult:
    """Run a program to its end and say what its processes did to the virtual device.

    Raises:
        UsageError: When there is no program, no such card, or a size makes no sense.
        CannotJudge: When no virtual GPU can run here.
    """
    executable = _find(request.program)
    if request.device.strip().lower() in ("auto", "cuda", "cpu"):
        raise UsageError(
            f"memfit run imitates a card, and {request.device!r} is none",
            hint="name one, such as --device h100-80gb; `memfit gpus` lists them",
        )
    card = virtual.find_card(request.device)
    reason = virtual.unavailable_reason()
    if reason is not None:
        raise CannotJudge(f"no virtual GPU: {reason}", hint="`memfit doctor` says more")
    choice = Choice(kind=DeviceKind.VIRTUAL, slug=card.slug, card=card)
    device = describe(choice, memory_limit=request.memory_limit, headroom="0%")
    variables = virtual.prepare(card, total_bytes=device.limit_bytes, devices=request.devices)
    with tempfile.TemporaryDirectory(prefix="memfit-run-") as folder:
        started = time.monotonic()
        ended = _Program(
            [*request.program],
            executable=executable,
            environment={
                **os.environ,
                **variables,
                **virtual.shared_by(Path(folder)),
                **_observed(Path(folder)),
            },
            stdout=sys.stderr.fileno() if request.keep_stdout else None,
        ).run()
        wall_s = time.monotonic() - started
        seen = _read_reports(Path(folder))
    processes = _with_ending([p for p in seen if p.virtual and _used(p)], ended)
    return RunResult(
        memfit=__version__,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=request.command,
        program=tuple(request.program),
        device=device,
        device_count=request.devices,
        source=Source.VIRTUAL,
        limits=tuple(_limits(device, processes, [p for p in seen if not p.virtual])),
        processes=tuple(processes),
        exit_status=ended.code if ended.code >= 0 else 128 - ended.code,
        signal=_signal_name(ended.code),
        wall_s=wall_s,
    )


def _find(program: Sequence[str]) -> str:
    """Return the path of the program's file."""
    if not program:
        raise UsageError(
            "there is no program to run", hint="as in: memfit run --device h100-80gb -- python x.py"
        )
    found = shutil.which(program[0])
    if found is not None:
        return found
    path = Path(program[0])
    if path.is_dir():
        raise UsageError(f"{program[0]} is a folder, not a program", hint="name a program in it")
    if path.exists() and os.sep in program[0]:
        raise UsageError(
            f"{program[0]} is not executable", hint=f"as in: memfit run … -- python {program[0]}"
        )
    raise UsageError(
        f"there is no program named {program[0]}", hint="give its path, or look at PATH"
    )


def _observed(folder: Path) -> dict[str, str]:
    """Return the variables that put the observer into every Python process."""
    observer = str(resources.files("memfit.virtual").joinpath("observer"))
    others = os.environ.get("PYTHONPATH")
    built_for = find_torch()
    return {
        "MEMFIT_RUN_TORCH": built_for.version if built_for else "",
        "MEMFIT_RUN_FOLDER": str(folder),
        "PYTHONPATH": f"{observer}{os.pathsep}{others}" if others else observer,
    }


# -- the program and its processes -----------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """The end of the process that was started."""

    pid: int
    code: int
    """Its exit status; a signal's number, negative, when one ended it."""


@dataclass(slots=True)
class _Program:
    """A program and every process below it."""

    words: list[str]
    executable: str
    environment: dict[str, str]
    stdout: int | None
    _others: set[int] = field(default_factory=set)
    """Children that this process has for other reasons."""
    _process: subprocess.Popen[bytes] | None = None
    _asked: int | None = None
    """The signal that asked the program to end."""
    _deadline: float = math.inf
    """When the program is killed."""

    def run(self) -> _Ended:
        """Start the program, wait until it ends, and leave no process of it behind."""
        self._others = {child.pid for child in psutil.Process().children()}
        with _adopting_orphans(), self._passing_signals_on():
            process = self._start()
            try:
                self._wait(process)
            finally:
                self._end_leftovers(process)
            return _Ended(pid=process.pid, code=process.wait())

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            self._process = subprocess.Popen(
                self.words,
                executable=self.executable,
                env=self.environment,
                stdout=self.stdout,
                start_new_session=True,
            )
        except OSError as error:
            raise UsageError(
                f"{self.words[0]} cannot be run: {error.strerror}",
                hint="a script needs its interpreter in front of it, as in: python train.py",
            ) from None
        if self._asked is not None:
            self._signal(self._asked)
        return self._process

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        while time.monotonic() < self._deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
                return

    @contextlib.contextmanager
    def _passing_signals_on(self) -> Iterator[None]:
        """Pass the first signal on to the program's group; the second one ends its patience."""

        def pass_on(number: int, _frame: object) -> None:
            if self._asked is not None:
                self._deadline = time.monotonic()
                return
            self._asked = number
            self._deadline = time.monotonic() + _GRACE_S
            self._signal(number)

        # What is ignored here, by nohup for example, is ignored by the program as well.
        heard = [n for n in _PASSED_ON if signal.getsignal(n) is not signal.SIG_IGN]
        former = {number: signal.signal(number, pass_on) for number in heard}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _signal(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _end_leftovers(self, process: subprocess.Popen[bytes]) -> None:
        """End what still runs: politely when the program ended by itself, else at once."""
        if process.poll() is not None and self._asked is None:
            left = self._descendants()
            for leftover in left:
                with contextlib.suppress(psutil.Error):
                    leftover.terminate()
            psutil.wait_procs(left, timeout=_LEFTOVER_S)
        give_up = time.monotonic() + _GRACE_S  # a process may hang in the kernel
        while (left := self._descendants()) and time.monotonic() < give_up:
            for leftover in left:
                with contextlib.suppress(psutil.Error):
                    leftover.kill()
            process.poll()  # reaped here, so that its exit status is not lost
            psutil.wait_procs([p for p in left if p.pid != process.pid], timeout=_POLL_S)

    def _descendants(self) -> list[psutil.Process]:
        """Return what lives of the program; orphans have become children of this process."""
        children = [c for c in psutil.Process().children() if c.pid not in self._others]
        found = list(children)
        for child in children:
            with contextlib.suppress(psutil.Error):
                found += child.children(recursive=True)
        return found


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Make this process the parent of those whose own parent ends (Linux)."""
    control = ctypes.CDLL(None).prctl
    control(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        control(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


# -- what the processes told -----------------------------------------------------------------


def _read_reports(folder: Path) -> list[RunProcess]:
    """Read what the processes wrote, by rank and then in the order of their start."""
    files = sorted(folder.glob("*.json"), key=lambda path: int(path.stem.split("-")[1]))
    found = [msgspec.json.decode(path.read_bytes(), type=RunProcess) for path in files]
    return sorted(found, key=lambda p: (p.rank is None, p.rank or 0))


def _used(process: RunProcess) -> bool:
    return bool(process.devices or process.out_of_memory_count)


def _with_ending(processes: list[RunProcess], ended: _Ended) -> list[RunProcess]:
    """Add what only a parent knows: the exit status of the process that was started."""
    last = max((i for i, p in enumerate(processes) if p.pid == ended.pid), default=None)
    if last is not None:
        name = _signal_name(ended.code)
        processes[last] = replace(
            processes[last],
            ending="signal" if name else processes[last].ending,
            exit_status=None if name else ended.code,
            signal=name,
        )
    return processes


def _signal_name(code: int) -> str | None:
    if code >= 0:
        return None
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal has no name of its own
        return f"signal {-code}"


def _limits(
    device: DeviceSpec, processes: Sequence[RunProcess], real: Sequence[RunProcess]
) -> Iterator[str]:
    """Say what the figures leave out, one sentence each."""
    yield (
        "The GPU is virtual: PyTorch, its allocator and its libraries ran, but kernels were not "
        "executed, so a program that decides by computed values may take another way."
    )
    yield (
        "Known are small values (up to 64 KiB) that are copied to the device or filled in, and "
        "what comparing, adding, joining, counting and reducing them gives. Memory that depends "
        "on any other value (boolean masks, routing, early exits) is what it would be if nothing "
        "counted; `memfit probe` can take another share."
    )
    yield f"The CUDA context is charged with {device.context_source}."
    if _cudnn_is_old():
        yield (
            "The installed cuDNN is older than 9.8 and cannot plan for a device that is not "
            "there: the workspaces of convolutions, if there are any, are not counted."
        )
    if any((p.world_size or 1) > 1 for p in processes):
        yield (
            "Ranks exchange values of up to 64 KiB that are known; what else they send each other "
            "arrives with unknown values. The communication library's own buffers are not counted."
        )
        yield (
            "DistributedDataParallel's first buckets are gone before it makes them anew, as on a "
            "card whose first step takes longer than the 0.1 s after which PyTorch's watchdog "
            "looks; after a shorter one both are there for a moment."
        )
    for index in sorted({d.device for p in processes for d in p.devices}):
        sharing = [p.pid for p in processes if any(d.device == index for d in p.devices)]
        if len(sharing) > 1:
            yield (
                f"{len(sharing)} processes used device {index}: `device used` is the most that "
                "all processes of the run held together, and depends on when each of them ran."
            )
    built_for = find_torch()
    for process in processes:
        yield from _process_limits(process, built_for.version if built_for else None)
    if real:
        yield (
            f"{len(real)} processes were started without the stand-in driver and used a real "
            "device, or none; they are not listed."
        )


def _process_limits(process: RunProcess, built_for: str | None) -> Iterator[str]:
    yield from words.invented(
        process.invented_calls, process.invented, whose=f" of process {process.pid}"
    )
    yield from words.benchmark(*process.benchmark)
    yield from words.pool(process.rounding_bytes)
    yield from _read_limits(process)
    if process.history_bytes:
        yield (
            f"L-BFGS in process {process.pid} decides by values how many iterations a step has, "
            "and keeps two vectors as long as its parameters for each: its history would take up "
            f"to {format_bytes(process.history_bytes)} more than it held here."
        )
    if process.ending is None or process.ending == "signal":
        yield (
            f"Process {process.pid} was ended before it could say so: its figures are those of "
            "the last moment that it wrote down."
        )
    if process.optimizers > 1:
        yield (
            f"{process.optimizers} optimizers stepped in process {process.pid}: the first "
            "optimizer step is that of whichever stepped first."
        )
    if built_for is not None and process.torch != built_for:
        yield (
            f"Process {process.pid} ran torch {process.torch}, and the stand-in driver was built "
            f"for torch {built_for}."
        )


def _read_limits(process: RunProcess) -> Iterator[str]:
    """Say what the program read that is not known, and where."""
    if process.unknown_reads:
        yield (
            f"Process {process.pid} read {process.unknown_reads:,} values from the device that "
            f"only a kernel could have computed ({_places(process, 'unknown')}), and got 0, or a "
            "check passed that something holds for all elements: where one of them decides how "
            "the program goes on or how large a tensor is, its memory may be another on a card."
        )
    if process.changed_reads:
        yield (
            f"Process {process.pid} read {process.changed_reads:,} values that kernels may have "
            f"changed since they were written ({_places(process, 'changed')}), and got what was "
            "written."
        )
    if process.exception is not None and (process.unknown_reads or process.changed_reads):
        yield (
            f"Process {process.pid} ended by {process.exception} after it had read values that "
            "are not known: an error that comes of one of them would not happen on a card."
        )


def _places(process: RunProcess, kind: Literal["unknown", "changed"]) -> str:
    """Name the first places of one kind of reads."""
    found = [(read.where, times) for read in process.reads if (times := getattr(read, kind))]
    shown = [where if times == 1 else f"{where}, {times:,} times" for where, times in found[:_FEW]]
    left = len(found) - len(shown)
    return "; ".join(shown) + (f"; and {left} other places" if left else "")


def _cudnn_is_old() -> bool:
    for name in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError):
            version = importlib.metadata.version(name).split(".")[:2]
            return tuple(int(part) for part in version) < _CUDNN_THAT_PLANS
    return False


__all__ = ["RunRequest", "run_program"]
