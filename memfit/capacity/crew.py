"""Lanes in threads: they import the user's code side by side and take orders from one queue."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from memfit.capacity.cells import Column
from memfit.capacity.question import PlanRequest
from memfit.capacity.table import Setting
from memfit.errors import UsageError
from memfit.trial.lane import Lane
from memfit.trial.protocol import Ready
from memfit.trial.runner import TrialRunner

_LOAD_TIMEOUT_S = 900.0
"""Longest time that importing torch and the user's code may take."""

Answer = TypeVar("Answer")


class Crew:
    """The lanes. A process that a thread starts ends with it, so each lane is one thread's own."""

    def __init__(
        self,
        request: PlanRequest,
        columns: tuple[Column, ...],
        rows: tuple[Setting, ...],
        stop: threading.Event,
        *,
        jobs: int,
    ) -> None:
        self.columns = columns
        self.rows = rows
        self.jobs = jobs
        self.stop = stop
        self._request = request
        self._orders: queue.SimpleQueue[Callable[[Lane], None] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(jobs)]

    def load(self) -> list[Ready]:
        """Import the user's code in every lane, and resolve the parameters of every row.

        Raises:
            UsageError: When there is no such workload or parameter, or two rows are the same.
            WorkloadError: When the user's code fails while it is imported.
        """
        for thread in self._threads:
            thread.start()
        answers: queue.SimpleQueue[list[Ready] | BaseException] = queue.SimpleQueue()

        def resolve(lane: Lane) -> None:
            try:
                answers.put([self._open(row, lane) for row in self.rows])
            except BaseException as error:  # noqa: BLE001 - told to the thread that waits
                answers.put(error)

        self.order(resolve)
        answer = wait_for(answers)
        if isinstance(answer, BaseException):
            raise answer
        _refuse_same(self.rows, answer)
        return answer

    def order(self, work: Callable[[Lane], None]) -> None:
        """Have a lane do something."""
        self._orders.put(work)

    def close(self) -> None:
        """End the lanes once they have heard that they are to stop."""
        for _ in self._threads:
            self._orders.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _work(self) -> None:
        lane = Lane(self.stop)
        try:
            with contextlib.suppress(Exception):  # whoever resolves the rows meets it too
                self._open(self.rows[0], lane)
            while (work := self._orders.get()) is not None:
                work(lane)
        finally:
            lane.close()

    def _open(self, row: Setting, lane: Lane) -> Ready:
        with TrialRunner(
            self._request.target,
            row.parameters,
            environment=self.columns[0].environment,
            load_timeout_s=_LOAD_TIMEOUT_S,
            lane=lane,
        ) as runner:
            return runner.open()


def wait_for(answers: queue.SimpleQueue[Answer]) -> Answer:
    """Wait for an answer and hear Ctrl-C meanwhile."""
    while True:
        with contextlib.suppress(queue.Empty):
            return answers.get(timeout=0.2)


def _refuse_same(rows: tuple[Setting, ...], answers: list[Ready]) -> None:
    """Refuse rows that differ in how they were written only: 1024 and 01024."""
    seen: dict[object, Setting] = {}
    for row, answer in zip(rows, answers, strict=True):
        resolved = (tuple(answer.workload.parameters.items()), row.precision, row.replicas)
        twin = seen.setdefault(resolved, row)
        if twin is not row:
            name = next(n for n in row.parameters if row.parameters[n] != twin.parameters[n])
            raise UsageError(
                f"--set {name} names {twin.parameters[name]} and {row.parameters[name]}, "
                "which are the same value",
                hint="name each value once",
            )
