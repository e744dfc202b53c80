"""Trials side by side: while one is waited for, another core runs one that is likely to follow.

Trials on a virtual card share nothing but the host, so one that ran beside another has the same
figures as one that ran alone. What the host may have caused is not taken from there: such a trial
is run again, by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Self

import psutil

from memfit.devices.cores import cores
from memfit.records import TrialResult, TrialSpec, Verdict
from memfit.trial.runner import TrialRunner
from memfit.units import GIB

Following = Callable[[Sequence[TrialResult]], Iterable[TrialSpec]]
"""Trials that are likely to be asked for next, the likeliest first, when some have ended ahead."""
_ROOM_BYTES = 4 * GIB
"""Free host memory without which trials run one at a time."""
_SOUND = {Verdict.FITS, Verdict.OOM, Verdict.THRASH, Verdict.SIZE_LIMIT}
"""Verdicts that another trial on the same host cannot have brought about."""


def nothing(ended: Sequence[TrialResult]) -> tuple[TrialSpec, ...]:
    """Foresee nothing."""
    del ended
    return ()


@dataclass(eq=False)
class _Job:
    """A trial that runs on one of the sides."""

    side: _Side
    future: Future[TrialResult]
    beside: bool = False
    """Whether another trial ran at the same time."""


class _Side:
    """A runner and the thread that waits for its trials; what a thread starts ends with it."""

    def __init__(self, runner: TrialRunner) -> None:
        self.runner = runner
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="memfit-trial")
        self.job: _Job | None = None

    def start(self, spec: TrialSpec) -> _Job:
        self.runner.take_up()
        self.job = _Job(self, self.thread.submit(self.runner.run, spec))
        return self.job

    @property
    def busy(self) -> bool:
        return self.job is not None and not self.job.future.done()

    def halt(self) -> None:
        """End the trial that runs, and wait until it has."""
        if self.job is not None and self.busy:
            self.runner.stop()
            self.job.future.exception()
            self.runner.go_on()
        self.job = None


class TrialPool:
    """Runs the trials that are asked for, and ahead of them those that are foreseen."""

    def __init__(self, runner: TrialRunner, *, side_by_side: bool) -> None:
        """Take over a runner, which the caller closes.

        Args:
            runner: Runs the first trial, and all of them where nothing can run beside it.
            side_by_side: Whether trials may run at the same time.
        """
        self._runner = runner
        self._may_double = side_by_side
        self._sides: list[_Side] = []
        self._jobs: dict[TrialSpec, _Job] = {}
        """What runs or has run, by its question."""

    def __enter__(self) -> Self:
        """Enter a context that ends what still runs."""
        return self

    def __exit__(self, *exception: object) -> None:
        """End what still runs."""
        self.close()

    def run(self, spec: TrialSpec, following: Following = nothing) -> TrialResult:
        """Run a trial to whatever end it comes to, or take the result of one that ran ahead.

        Args:
            spec: The trial.
            following: Foresees the trials after it.
        """
        self._double()
        if not self._sides:
            return self._runner.run(spec)
        question = _question(spec)
        job = self._jobs.get(question) or self._start(spec)
        assert job is not None
        self._wait(job, following)
        del self._jobs[question]
        if job.beside and not _is_sound(job.future):
            self.close()
            return self._runner.run(spec)
        return replace(job.future.result(), spec=spec)

    def close(self) -> None:
        """End what still runs, and the second runner; from now on trials run one at a time."""
        self._may_double = False
        for side in self._sides:
            side.halt()
            side.thread.shutdown()
            if side.runner is not self._runner:
                side.runner.close()
        self._sides.clear()
        self._jobs.clear()
        self._runner.tells = True

    # -- inside ------------------------------------------------------------------------------

    def _double(self) -> None:
        """Make the second side, before the first trial."""
        may, self._may_double = self._may_double, False
        if not may or cores() < 2 or psutil.virtual_memory().available < _ROOM_BYTES:  # noqa: PLR2004
            return
        other = self._runner.double()
        if other is None:
            return
        self._sides = [_Side(self._runner), _Side(other)]

    def _start(self, spec: TrialSpec) -> _Job | None:
        """Start a trial on a side that is free, if there is one."""
        for side in self._sides:
            if not side.busy:
                beside = [other for other in self._jobs.values() if not other.future.done()]
                job = self._jobs[_question(spec)] = side.start(spec)
                for each in (job, *beside) if beside else ():
                    each.beside = True
                return job
        return None

    def _wait(self, job: _Job, following: Following) -> None:
        for side in self._sides:
            side.runner.tells = side is job.side
        self._drop_in_vain(job, following)
        while not job.future.done():
            if not self._start_next(following):
                running = [s.job.future for s in self._sides if s.job is not None and s.busy]
                wait([*running, job.future], return_when=FIRST_COMPLETED)

    def _drop_in_vain(self, job: _Job, following: Following) -> None:
        """End what was started ahead and has since become unlikely to be asked for."""
        running = {
            question: other
            for question, other in self._jobs.items()
            if other is not job and not other.future.done()
        }
        if not running:
            return
        wanted = {_question(spec) for spec in following(self._ended())}
        for question, other in running.items():
            if question not in wanted:
                del self._jobs[question]
                other.side.runner.abandon()

    def _start_next(self, following: Following) -> bool:
        """Start the likeliest trial that has not been started, if a side is free for it."""
        if all(side.busy for side in self._sides):
            return False
        for spec in following(self._ended()):
            if _question(spec) not in self._jobs:
                return self._start(spec) is not None
        return False

    def _ended(self) -> list[TrialResult]:
        """Return what has ended ahead."""
        futures = [job.future for job in self._jobs.values()]
        return [future.result() for future in futures if future.done() and _is_sound(future)]


def _is_sound(future: Future[TrialResult]) -> bool:
    return future.exception() is None and future.result().verdict in _SOUND


def _question(spec: TrialSpec) -> TrialSpec:
    """Leave out what does not change how a trial ends."""
    return replace(spec, index=0, reason="", timeout_s=None)
