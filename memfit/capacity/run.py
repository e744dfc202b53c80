"""Run a plan: lanes of probes, one a core, each of which imports the workload once.

A cell is a probe in a folder of its own, so a plan that is stopped goes on at the trial where it
was.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import queue
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import psutil

from memfit.capacity.cells import (
    Ask,
    answered_cell,
    asks_of,
    probe_command,
    refused_cell,
    skipped_cell,
)
from memfit.capacity.crew import Crew, wait_for
from memfit.capacity.folder import CapacityFolder
from memfit.capacity.matrix import ALLOCATOR_VARIABLE, MOST_CELLS, changes_of, settings_of
from memfit.capacity.needs import Agenda, needed_of
from memfit.capacity.question import PlanRequest, check_plan, columns_of, spec_of
from memfit.capacity.table import (
    CapacityCell,
    CapacityProgress,
    CapacitySpec,
    CapacityTable,
)
from memfit.devices.cores import cores
from memfit.errors import Interrupted, MemfitError, NothingFits, UsageError
from memfit.folder import RESULT, slug
from memfit.nothing import NothingFound
from memfit.probe import UnsavedAnswer, run_probe
from memfit.records import (
    NOTHING_FITS,
    DeviceSpec,
    ProbeResult,
    TrialResult,
    TrialSpec,
    WorkloadInfo,
    from_json,
    schema_of,
)
from memfit.resume import changed_since
from memfit.trial.lane import Lane
from memfit.trial.protocol import Mark, Ready
from memfit.units import GIB

_LANE_BYTES = GIB
"""Host memory that a lane is taken to need."""


class PlanListener(Protocol):
    """Told what a plan does while it runs, by one thread at a time."""

    def chosen(self, sentence: str) -> None:
        """Tell which device was chosen where the user left it open."""

    def importing(self, target: str) -> None:
        """Tell that the question is sound, and the user's code is being imported."""

    def planned(self, workload: WorkloadInfo, spec: CapacitySpec, cells: int, jobs: int) -> None:
        """Tell how many cells there are, and how many run at once."""

    def resumed(self, cells: int) -> None:
        """Tell that finished cells of an earlier run are used."""

    def began(self, ask: Ask) -> None:
        """Tell that a cell's probe begins."""

    def tried(self, ask: Ask, trial: TrialResult) -> None:
        """Tell how a trial of a cell ended."""

    def ended(self, ask: Ask, cell: CapacityCell) -> None:
        """Tell what a cell came to."""

    def warned(self, sentence: str) -> None:
        """Tell what went wrong without ending the plan."""


def run_plan(request: PlanRequest, listener: PlanListener) -> tuple[CapacityTable, CapacityFolder]:
    """Probe every cell of a matrix.

    Returns:
        The table, already saved as `capacity.json`, and the folder that holds it.

    Raises:
        UsageError: When the question is wrong.
        WorkloadError: When the user's code cannot be imported; a cell in which it fails says so.
        CannotJudge: When this machine cannot answer, or the answer cannot be written.
        Interrupted: When the user stops it; finished trials and cells are kept.
    """
    started = time.monotonic()
    check_plan(request)
    rows = settings_of(request.parameters, request.precisions, request.replicas)
    columns = columns_of(request, listener.chosen)
    if len(rows) * len(columns) > MOST_CELLS:
        raise UsageError(
            f"{len(rows)} settings on {len(columns)} devices are {len(rows) * len(columns)} cells; "
            f"a plan has at most {MOST_CELLS}",
            hint="name fewer values",
        )
    folder = CapacityFolder(request.out, force=request.force) if request.out else None
    stop = threading.Event()
    crew = Crew(request, columns, rows, stop, jobs=_jobs(request, len(rows) * len(columns)))
    try:
        listener.importing(request.target)
        ready = crew.load()
        folder = folder or CapacityFolder(
            Path("reports") / f"{slug(ready[0].workload.name)}-capacity", force=request.force
        )
        plan = _Plan(request, listener, crew, ready, folder, started)
        return plan.run(), folder
    except KeyboardInterrupt:
        kept = folder is not None and (folder.path / folder.progress).exists()
        raise Interrupted(
            "interrupted",
            hint=f"finished trials are kept in {folder.path}: run the same command to go on"
            if kept and folder
            else None,
        ) from None
    finally:
        stop.set()
        crew.close()
        if folder is not None:
            folder.close()


def _jobs(request: PlanRequest, cells: int) -> int:
    """How many cells run at once: one for each core that there is memory for."""
    room = psutil.virtual_memory().available // _LANE_BYTES
    return max(1, min(request.jobs or cores(), cells, request.jobs or room))


_Ends = queue.SimpleQueue[tuple[Ask, "TrialResult | str | CapacityCell | BaseException"]]
"""What lanes tell of their cells: a trial, a warning, the end, or why the plan cannot go on."""


class _Plan:
    """One plan as it runs."""

    def __init__(
        self,
        request: PlanRequest,
        listener: PlanListener,
        crew: Crew,
        ready: list[Ready],
        folder: CapacityFolder,
        started: float,
    ) -> None:
        self._request = request
        self._listener = listener
        self._crew = crew
        self._workload = ready[0].workload
        self._environment = ready[0].environment
        self._folder = folder
        self._started = started
        self._spec = spec_of(request, crew.columns, crew.rows)
        values = [answer.workload.parameters for answer in ready]
        changes, self._notes = changes_of(
            request.tries, values[0], allocator=os.environ.get(ALLOCATOR_VARIABLE, "")
        )
        self._asks = asks_of(crew.columns, crew.rows, values, changes)
        self._cells: dict[int, CapacityCell] = {}

    def run(self) -> CapacityTable:
        """Probe what is not probed yet, and save the table."""
        self._listener.planned(self._workload, self._spec, len(self._asks), self._crew.jobs)
        for note in self._notes:
            self._listener.warned(note)
        agenda = Agenda(self._asks, need=self._spec.need)
        self._resume(agenda)
        self._save()
        self._probe(agenda)
        for ask in agenda.left:
            self._cells[ask.index] = skipped_cell(ask, command=self._command(ask))
        return self._table()

    # -- running -----------------------------------------------------------------------------

    def _probe(self, agenda: Agenda) -> None:
        """Keep every lane busy until the agenda is empty."""
        ends: _Ends = queue.SimpleQueue()
        running = 0
        while True:
            while running < self._crew.jobs and (ask := agenda.next()) is not None:
                self._listener.began(ask)
                self._crew.order(_CellProbe(ask, self._request, self._folder, ends))
                running += 1
            if running == 0:
                return
            match wait_for(ends):
                case (ask, TrialResult() as trial):
                    self._listener.tried(ask, trial)
                case (ask, str() as sentence):
                    self._listener.warned(f"{ask.folder}: {sentence}")
                case (_, BaseException() as failure):
                    raise failure
                case (ask, CapacityCell() as cell):
                    running -= 1
                    self._end(agenda, ask, cell)

    def _end(self, agenda: Agenda, ask: Ask, cell: CapacityCell) -> None:
        self._cells[cell.index] = cell
        agenda.ended(ask, cell)
        self._listener.ended(ask, cell)

    # -- saving and resuming -----------------------------------------------------------------

    def _save(self) -> None:
        self._folder.save_progress(
            CapacityProgress(
                command=self._request.command,
                workload=self._workload,
                spec=self._spec,
                environment=self._environment,
            )
        )

    def _resume(self, agenda: Agenda) -> None:
        saved = self._folder.unfinished()
        if saved is None:
            return
        differences = self._differences(saved)
        if differences:
            raise UsageError(
                f"{self._folder.path} holds an unfinished plan of another question: "
                f"{'; '.join(differences)}",
                hint="--force starts again and drops its cells; --out names another folder",
            )
        for ask in agenda.left:
            cell = self._finished(ask)
            if cell is not None:
                agenda.drop(ask)
                agenda.ended(ask, cell)
                self._cells[ask.index] = cell
        self._listener.resumed(len(self._cells))

    def _finished(self, ask: Ask) -> CapacityCell | None:
        path = self._folder.path / ask.folder / RESULT
        if not path.exists():
            return None
        data, origin = path.read_bytes(), str(path)
        if schema_of(data) == NOTHING_FITS:
            none = from_json(data, NothingFound, origin=origin)
            error = NothingFits(none.message, hint=none.hint, details=none.details)
            trials = (*none.other_trials, *none.trials)
            return refused_cell(ask, error, trials, command=none.command, wall_s=none.wall_s)
        return answered_cell(ask, from_json(data, ProbeResult, origin=origin))

    def _differences(self, saved: CapacityProgress) -> list[str]:
        """What a saved plan was asked differently, in words."""
        found = [
            f"{field.name.replace('_', ' ')} are others"
            if isinstance(getattr(self._spec, field.name), tuple)
            else f"{field.name.replace('_', ' ')} was {getattr(saved.spec, field.name)}, "
            f"is {getattr(self._spec, field.name)}"
            for field in dataclasses.fields(CapacitySpec)
            if getattr(saved.spec, field.name) != getattr(self._spec, field.name)
        ]
        return found + changed_since(
            saved.workload, saved.environment, self._workload, self._environment
        )

    # -- the end -----------------------------------------------------------------------------

    def _command(self, ask: Ask) -> str:
        return probe_command(self._request.probe_of(ask), ask.environment)

    def _table(self) -> CapacityTable:
        need = self._spec.need
        table = CapacityTable(
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            command=self._request.command,
            workload=self._workload,
            spec=self._spec,
            cells=tuple(self._cells[ask.index] for ask in self._asks),
            needed=() if need is None else needed_of(self._asks, self._cells, need=need),
            environment=self._environment,
            notes=self._notes,
            wall_s=time.monotonic() - self._started,
        )
        self._folder.save_table(table)
        return table


class _CellProbe:
    """The probe of one cell; what its listener hears goes to the plan's thread."""

    def __init__(self, ask: Ask, request: PlanRequest, folder: CapacityFolder, ends: _Ends) -> None:
        self._ask = ask
        self._question = request.probe_of(ask)
        self._command = probe_command(self._question, ask.environment)
        self._out = folder.path / ask.folder
        self._force = request.force
        self._ends = ends
        self._trials: list[TrialResult] = []

    def __call__(self, lane: Lane) -> None:
        """Run the probe and tell its end."""
        self._ends.put((self._ask, self._end(lane)))

    def _end(self, lane: Lane) -> CapacityCell | BaseException:
        started = time.monotonic()
        question = replace(self._question, out=self._out, force=self._force, command=self._command)
        try:
            result, _ = run_probe(question, self, lane=lane)
        except (Interrupted, UsageError, UnsavedAnswer) as error:
            return error
        except MemfitError as error:
            wall = time.monotonic() - started
            return refused_cell(self._ask, error, self._trials, command=self._command, wall_s=wall)
        except BaseException as error:  # noqa: BLE001 - raised again by the plan's thread
            return error
        return answered_cell(self._ask, result)

    def finished(self, trial: TrialResult) -> None:
        """Pass on how a trial ended."""
        self._trials.append(trial)
        self._ends.put((self._ask, trial))

    def warned(self, sentence: str) -> None:
        """Pass on what went wrong without ending the probe."""
        self._ends.put((self._ask, sentence))

    def chosen(self, sentence: str) -> None:
        """The plan has told which device it is."""

    def importing(self, target: str) -> None:
        """The lane has imported it."""

    def loaded(self, workload: WorkloadInfo, device: DeviceSpec) -> None:
        """The plan has told what is probed."""

    def resumed(self, trials: int) -> None:
        """A cell that goes on is a cell like any other."""

    def asked(self, spec: TrialSpec) -> None:
        """A trial is told when it has ended."""

    def decided(self, result: ProbeResult) -> None:
        """The answer is told with the cell."""

    def progressed(self, mark: Mark) -> None:
        """A trial of a plan is too short for that."""
