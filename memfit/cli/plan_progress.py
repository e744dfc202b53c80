"""A plan as it is told on stderr: a bar on a terminal, a line for each cell elsewhere."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from memfit.cli.progress import import_pages
from memfit.report import capacity_words, words

if TYPE_CHECKING:
    from rich.console import Console

    from memfit.capacity.cells import Ask
    from memfit.capacity.table import CapacityCell, CapacitySpec
    from memfit.records import TrialResult, WorkloadInfo


class PlanTeller:
    """Tells a plan's events on a console; `quiet` leaves only warnings."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        """Tell on `console`."""
        self._console = console
        self._quiet = quiet
        self._bar = None
        if not quiet and console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[at]}", style="dim"),
                console=console,
                transient=True,
            )
        self._task = None if self._bar is None else self._bar.add_task("", total=None, at="")
        self._names: tuple[str, ...] = ()
        self._running: dict[int, str] = {}
        self._done = self._cells = self._trials = 0

    def chosen(self, sentence: str) -> None:
        """Tell which device was chosen where the user left it open."""
        self._say(sentence)

    def importing(self, target: str) -> None:
        """Tell that the user's code is being imported, and use the wait."""
        threading.Thread(target=import_pages, daemon=True).start()
        if self._bar is not None:
            self._bar.start()
        self._show(f"importing torch and {target}")

    def planned(self, workload: WorkloadInfo, spec: CapacitySpec, cells: int, jobs: int) -> None:
        """Tell how many cells there are, and how many run at once."""
        self._names = capacity_words.names_of(spec)
        self._cells = cells
        rows = words.number(len(spec.settings), "setting")
        devices = words.number(len(spec.devices), "device")
        self._say(
            f"planning {workload.name}: {rows} on {devices}, {words.number(cells, 'cell')}, "
            f"{jobs} at once"
        )
        self._show(f"probing {workload.name}")

    def resumed(self, cells: int) -> None:
        """Tell that finished cells of an earlier run are used."""
        self._done = cells
        self._say(f"going on after {words.number(cells, 'finished cell')} of an earlier run")
        self._show()

    def began(self, ask: Ask) -> None:
        """Tell that a cell's probe begins."""
        self._running[ask.index] = ask.column.device.slug
        self._show()

    def tried(self, ask: Ask, trial: TrialResult) -> None:
        """Tell how a trial of a cell ended."""
        self._trials += 1
        m = trial.spec.split.microbatch
        self._running[ask.index] = f"{ask.column.device.slug} {m} {words.verdict(trial.verdict)}"
        self._show()

    def ended(self, ask: Ask, cell: CapacityCell) -> None:
        """Tell what a cell came to."""
        self._running.pop(ask.index, None)
        self._done += 1
        line = capacity_words.cell_line(self._names, cell)
        self._say(f"cell {self._done}/{self._cells}: {line}")
        self._show()

    def warned(self, sentence: str) -> None:
        """Tell what went wrong without ending the plan."""
        self._console.print(Text.assemble(("warning: ", "bold yellow"), sentence), soft_wrap=True)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()

    def _say(self, sentence: str) -> None:
        if not self._quiet:
            self._console.print(Text(sentence), soft_wrap=True)

    def _show(self, description: str | None = None) -> None:
        if self._bar is None or self._task is None:
            return
        at = ", ".join(self._running.values())
        if description is not None:
            self._bar.update(self._task, description=description)
        self._bar.update(self._task, completed=self._done, total=self._cells or None, at=at)
