"""The parent's side of a trial: start the nursery, watch the clock, end what hangs, classify."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Self

import psutil

from memfit.errors import CannotJudge, UsageError, WorkloadError
from memfit.records import DeviceKind, Parameter, TrialResult, TrialSpec
from memfit.trial import stacks
from memfit.trial.classify import Ending, classify, helpers_lost
from memfit.trial.host import HostWatch
from memfit.trial.lane import Lane
from memfit.trial.lazy import NEEDS_BACKEND, NEEDS_COMPILER, NEEDS_KERNELS
from memfit.trial.protocol import (
    OUTPUT,
    CardTaken,
    Channel,
    DescribeGpu,
    Double,
    Ended,
    Failed,
    Gpu,
    Load,
    Mark,
    Message,
    ReadPass,
    Ready,
    RunTrial,
    Started,
    needs_values,
    read_mark,
    read_output,
    read_report,
    read_script,
    write_script,
)
from memfit.trial.start import start
from memfit.units import TIB
from memfit.virtual import CARD_VARIABLE

_WATCH_S = 0.01
"""How often the resident memory of a CPU trial is looked at."""
_MARK_S = 0.25
"""How often progress inside a trial is told."""
_FOLDER = "memfit-trials-"


class Abandoned(Exception):
    """The trial was ended because nobody waits for it any more."""


class TrialRunner:
    """Runs trials of one workload, each in a process of its own."""

    def __init__(
        self,
        target: str,
        parameters: Mapping[str, Parameter],
        *,
        environment: Mapping[str, str],
        load_timeout_s: float | None = None,
        on_mark: Callable[[Mark], None] | None = None,
        lane: Lane | None = None,
    ) -> None:
        """Prepare a runner; `open` starts it.

        Args:
            target: The user's file or module.
            parameters: Workload parameters.
            environment: Variables added to the workers' environment.
            load_timeout_s: Longest time that importing the user's code may take.
            on_mark: Told now and then where the running trial is.
            lane: Where a nursery of an earlier runner waits, and where this one's is left.
        """
        self._target = target
        self._parameters = dict(parameters)
        self._environment = dict(environment)
        self._load_timeout_s = load_timeout_s
        self._on_mark = on_mark
        self._lane = lane or Lane()
        self._leaves_nursery = lane is not None
        _sweep()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))
        self._nursery: Nursery | None = None
        self._forks = True
        self._reads_values = False
        """Whether a trial of this workload read values that kernels compute."""
        self.tells = True
        """Whether the running trial's progress is told."""
        self._worker: int | None = None
        """Process of the trial that runs."""
        self._abandoned = threading.Event()

    def __enter__(self) -> Self:
        """Enter a context that closes the runner."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the runner."""
        self.close()

    def open(self) -> Ready:
        """Import the user's code, and say what was found.

        Raises:
            UsageError: When there is no such workload or parameter.
            WorkloadError: When the user's code fails, hangs or crashes while it is imported.
        """
        self._nursery, ready = self._start(may_fork=True)
        self._forks = ready.fork_refusal is None
        return ready

    def double(self) -> TrialRunner | None:
        """Return a runner beside this one, with the same imports; None where there can be none.

        Its nursery ends with this one's.
        """
        nursery = self._nursery
        if not self._forks or nursery is None or not nursery.idle:
            return None
        forked = nursery.double()
        if forked is None:
            return None
        other = TrialRunner(
            self._target,
            self._parameters,
            environment=self._environment,
            load_timeout_s=self._load_timeout_s,
            on_mark=self._on_mark,
        )
        other._nursery = forked
        other._reads_values = self._reads_values
        return other

    def stop(self) -> None:
        """Have the running trial, which another thread waits for, end with `Interrupted`."""
        self._lane.stop()

    def go_on(self) -> None:
        """Let trials run again after `stop`."""
        self._lane.go_on()

    def abandon(self) -> None:
        """Have the running trial, which another thread waits for, end with `Abandoned`.

        Until `take_up`, so does one that begins; unlike after `stop`, the nursery goes on.
        """
        self._abandoned.set()
        worker = self._worker
        if worker is not None:
            _kill_group(worker)

    def take_up(self) -> None:
        """Let trials run again after `abandon`."""
        self._abandoned.clear()

    def describe_gpu(self) -> Gpu:
        """Ask CUDA for its current device."""
        assert self._nursery is not None
        try:
            self._nursery.channel.send(DescribeGpu())
            answer = self._nursery.channel.receive(120)
        except (EOFError, OSError):
            answer = None
        return answer if isinstance(answer, Gpu) else Gpu(failure="CUDA did not answer")

    def run(self, spec: TrialSpec) -> TrialResult:
        """Run one trial to whatever end it comes to.

        Raises:
            Abandoned: When `abandon` was called meanwhile.
        """
        started = time.monotonic()
        folder = self._new_folder(spec)
        ending: Ending | None = None
        if spec.device.kind is not DeviceKind.VIRTUAL:
            ending = self._attempt(spec, folder, None, started)
        elif not self._reads_values:
            ending = self._attempt(spec, folder, "watch", started)
            self._reads_values = needs_values(folder)
        if self._reads_values:
            ending = self._run_twice(spec, started)
        assert ending is not None
        result = classify(
            spec,
            ending=ending,
            report=read_report(folder),
            mark=read_mark(folder),
            output_tail=read_output(folder),
        )
        shutil.rmtree(folder, ignore_errors=True)
        return result

    def _run_twice(self, spec: TrialSpec, started: float) -> Ending:
        """Work out what the trial reads from the device, then measure it with those answers.

        The first pass has no limit on memory, for it is not the one that is measured.
        """
        folder = self._new_folder(spec)
        unlimited = replace(
            spec,
            record_timeline=False,
            record_ledger=False,
            device=replace(spec.device, limit_bytes=TIB),
        )
        ending = self._attempt(unlimited, folder, "record", started)
        script = read_script(folder)
        if ending.timed_out or (script is not None and script.endless):
            return ending
        folder = self._new_folder(spec)
        if script is not None:
            write_script(folder, script)
        return self._attempt(spec, folder, "play", started)

    def close(self) -> None:
        """End every process, but for a nursery that the lane keeps, and remove what they left."""
        nursery, self._nursery = self._nursery, None
        if nursery is not None and self._leaves_nursery and self._forks and nursery.idle:
            self._lane.keep(self._target, self._environment, nursery)
        else:
            self._stop(nursery)
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- inside ------------------------------------------------------------------------------

    def _new_folder(self, spec: TrialSpec) -> Path:
        folder = self._folder / f"trial-{spec.index}-{spec.purpose}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def _attempt(
        self, spec: TrialSpec, folder: Path, reads: ReadPass | None, started: float
    ) -> Ending:
        """Run one process of a trial to its end."""
        nursery = self._nursery
        if not self._forks:
            self._stop(nursery)
            nursery, _ = self._start(may_fork=False)
        elif nursery is None:
            nursery, _ = self._start(may_fork=True)
        self._nursery = nursery
        try:
            ending = self._watch(nursery, spec, folder, reads, started)
            for lacked in (NEEDS_KERNELS, NEEDS_COMPILER, NEEDS_BACKEND):
                if ending.exit_code == lacked:  # the nursery has it by now
                    (folder / OUTPUT).unlink(missing_ok=True)
                    ending = self._watch(nursery, spec, folder, reads, started)
        except Abandoned:
            raise
        except BaseException:
            nursery.idle = False
            self.close()
            raise
        if not self._forks or not nursery.idle:  # gone, or not waiting for orders
            self._stop(nursery)
            self._nursery = None
        return ending

    def _start(self, *, may_fork: bool) -> tuple[Nursery, Ready]:
        nursery = self._lane.take(self._target, self._environment) if may_fork else None
        if nursery is None:
            nursery = Nursery(self._environment)
        try:
            answer = self._load(nursery, may_fork=may_fork)
            if isinstance(answer, CardTaken):
                nursery.kill()
                nursery = Nursery(self._environment)
                answer = self._load(nursery, may_fork=may_fork)
        except (EOFError, OSError):
            code = nursery.kill(ends_by_itself=True)
            raise WorkloadError(
                f"the process that imports {self._target} ended with {_exit_words(code)}",
                details=nursery.output(),
            ) from None
        except BaseException:
            nursery.kill()
            raise
        if isinstance(answer, Ready):
            nursery.idle = True
            return nursery, answer
        nursery.kill()
        if isinstance(answer, Failed):
            kind = UsageError if answer.blame == "usage" else WorkloadError
            raise kind(answer.message, hint=answer.hint, details=answer.details)
        raise WorkloadError(
            f"importing {self._target} had not ended after {self._load_timeout_s:.0f} s",
            hint="keep training out of the module's top level",
            details=nursery.output(),
        )

    def _load(self, nursery: Nursery, *, may_fork: bool) -> Message | None:
        """Have the user's code imported, and return the nursery's answer; None when it is late."""
        nursery.idle = False
        nursery.channel.send(
            Load(
                target=self._target,
                parameters=self._parameters,
                may_fork=may_fork,
                card=self._environment.get(CARD_VARIABLE),
            )
        )
        limit = self._load_timeout_s
        deadline = math.inf if limit is None else time.monotonic() + limit
        while (left := deadline - time.monotonic()) > 0:
            self._lane.check()
            answer = nursery.channel.receive(min(_MARK_S, left))
            if answer is not None:
                return answer
        return None

    def _watch(
        self,
        nursery: Nursery,
        spec: TrialSpec,
        folder: Path,
        reads: ReadPass | None,
        started: float,
    ) -> Ending:
        """Wait for a trial's end, or bring it about, and ask the host what it knows of it."""
        host = HostWatch(nursery.pid)
        pids = [nursery.pid]
        try:
            ending = self._watch_worker(nursery, spec, folder, reads, started, pids)
            if ending.exit_code == -signal.SIGKILL:
                return replace(ending, host=host.record(pids))
            report = read_report(folder)
            if report is not None and report.failure is not None:
                lost = helpers_lost(report.failure)
                return replace(ending, host=host.record(lost)) if lost is not None else ending
            return ending
        finally:
            host.close()

    def _watch_worker(
        self,
        nursery: Nursery,
        spec: TrialSpec,
        folder: Path,
        reads: ReadPass | None,
        started: float,
        pids: list[int],
    ) -> Ending:
        try:
            nursery.idle = False
            nursery.channel.send(RunTrial(spec=spec, folder=str(folder), reads=reads))
            answer = nursery.channel.receive(60)
        except (EOFError, OSError):
            return self._ended(nursery.kill(ends_by_itself=True), started)
        if not isinstance(answer, Started):
            raise CannotJudge("the process that starts trials does not answer", hint="try again")
        pids.insert(0, answer.pid)
        self._worker = answer.pid
        try:
            if self._abandoned.is_set():  # before it was known which process it is
                _kill_group(answer.pid)
            return self._wait(nursery, answer.pid, spec, folder, started)
        except (EOFError, OSError):
            # The nursery is gone; alone, or because it was the worker itself.
            _kill_group(answer.pid)
            return self._ended(nursery.kill(ends_by_itself=True), started)
        finally:
            self._worker = None
            _kill_group(answer.pid)  # whatever the worker started and left behind

    def _wait(
        self, nursery: Nursery, pid: int, spec: TrialSpec, folder: Path, started: float
    ) -> Ending:
        """Wait until the worker ends, its time is up, or it passes a limit on host memory."""
        limit = spec.device.limit_bytes if spec.device.kind is DeviceKind.CPU else None
        deadline = math.inf if spec.timeout_s is None else started + spec.timeout_s
        told = -math.inf
        while True:
            self._lane.check()
            now = time.monotonic()
            if now >= deadline:
                stacks.ask(pid, folder / OUTPUT)
                self._kill_worker(nursery, pid)
                return self._ended(None, started, timed_out=True)
            resident = None if limit is None else _resident_bytes(pid)
            if limit is not None and resident is not None and resident > limit:
                self._kill_worker(nursery, pid)
                return self._ended(None, started, over_limit_bytes=resident)
            if now - told >= _MARK_S:
                told = now
                self._tell(folder)
            pause = _MARK_S if limit is None else _WATCH_S
            message = nursery.channel.receive(max(min(pause, deadline - now), 0))
            if isinstance(message, Ended):
                nursery.idle = True
                if self._abandoned.is_set():
                    raise Abandoned
                return self._ended(message.exit_code, started)

    def _tell(self, folder: Path) -> None:
        mark = None if self._on_mark is None or not self.tells else read_mark(folder)
        if mark is not None and self._on_mark is not None:
            self._on_mark(mark)

    def _ended(
        self,
        exit_code: int | None,
        started: float,
        *,
        timed_out: bool = False,
        over_limit_bytes: int | None = None,
    ) -> Ending:
        return Ending(
            exit_code=exit_code,
            timed_out=timed_out,
            over_limit_bytes=over_limit_bytes,
            wall_s=time.monotonic() - started,
        )

    def _kill_worker(self, nursery: Nursery, pid: int) -> None:
        """Kill a worker and wait until the nursery has seen it go, so that it may go on."""
        _kill_group(pid)
        with contextlib.suppress(EOFError, OSError):
            while (message := nursery.channel.receive(10)) is not None:
                if isinstance(message, Ended):
                    nursery.idle = True
                    return

    def _stop(self, nursery: Nursery | None) -> None:
        if nursery is not None:
            nursery.kill()


class Nursery:
    """The nursery process and the channel to it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._started = start(environment)
        self.idle = False
        """Whether it waits for orders, with no answer outstanding."""
        self.pid = self._started.process.pid
        self.channel = Channel(self._started.channel)

    def double(self) -> Nursery | None:
        """Have it fork a nursery beside it; None where that has happened already, or fails."""
        second = self._started.second
        if second.fileno() < 0:
            return None
        try:
            self.channel.send(Double())
            answer = self.channel.receive(60)
        except (EOFError, OSError):
            answer = None
        if not isinstance(answer, Started):
            self.idle = False
            return None
        return ForkedNursery(answer.pid, Channel(socket.socket(fileno=second.detach())))

    def kill(self, *, ends_by_itself: bool = False) -> int:
        """End the process with everything in its group, and return its exit code."""
        # Closing the channel ends it by itself, with the worker that it watches.
        return self._started.end(10 if ends_by_itself else 0.5)

    def output(self) -> str | None:
        """Last lines that the user's code printed while it was imported, if they are kept."""
        return "\n".join(self._started.output().rstrip().splitlines()[-20:]) or None


class ForkedNursery(Nursery):
    """A nursery that another one forked; it is no child of this process."""

    def __init__(self, pid: int, channel: Channel) -> None:
        self.pid = pid
        self.channel = channel
        self.idle = True

    def double(self) -> None:
        """Return None: it forks no further one."""

    def kill(self, *, ends_by_itself: bool = False) -> int:
        """End it; how it ended by itself is not known."""
        del ends_by_itself
        self.channel.close()
        _kill_group(self.pid)
        return -signal.SIGKILL

    def output(self) -> None:
        """Return None: the other one has what was printed."""


def _sweep() -> None:
    """Remove the folders of runners that were killed, and so could not remove their own."""
    for left in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        pid = left.name.removeprefix(_FOLDER).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _resident_bytes(pid: int) -> int | None:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return None


def _exit_words(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"
