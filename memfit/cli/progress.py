"""A probe as it is told on stderr: a live line on a terminal, a line for each trial elsewhere."""

from __future__ import annotations

import contextlib
import importlib
import threading
from typing import TYPE_CHECKING

from rich.text import Text

from memfit.report import words
from memfit.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from memfit.records import DeviceSpec, ProbeResult, TrialResult, TrialSpec, WorkloadInfo
    from memfit.report.page import Charts
    from memfit.trial.protocol import Mark


def import_pages() -> None:
    """Import what the pages need, while workers run."""
    with contextlib.suppress(ImportError):  # told where the page is made
        page = importlib.import_module("memfit.report.page")
        page.templates().get_template(page.TEMPLATE)
        importlib.import_module("pandas")


class ProgressTeller:
    """Tells a probe's events on a console; `quiet` leaves only warnings."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        """Tell on `console`."""
        self._console = console
        self._quiet = quiet
        self._status = None if quiet or not console.is_terminal else console.status("")
        self._trial = ""
        self._groups: tuple[int, int] = (0, 0)
        self._drawing: threading.Thread | None = None
        self._charts: Charts | None = None

    def importing(self, target: str) -> None:
        """Tell that the user's code is being imported, and use the wait."""
        # The parent waits for its workers; meanwhile it imports what the pages need.
        threading.Thread(target=import_pages, daemon=True).start()
        if self._status is not None:
            self._status.update(Text(f"importing torch and {target}"))
            self._status.start()

    def close(self) -> None:
        """Take the live line away."""
        if self._status is not None:
            self._status.stop()

    def chosen(self, sentence: str) -> None:
        """Tell which device was chosen where the user left it open."""
        self._say(sentence)

    def loaded(self, workload: WorkloadInfo, device: DeviceSpec) -> None:
        """Tell that the user's code is imported and the search begins."""
        kept = f", {format_bytes(device.headroom_bytes)} kept free" if device.headroom_bytes else ""
        self._say(
            f"probing {workload.name} on {words.device(device)}: "
            f"limit {format_bytes(device.limit_bytes)}{kept}"
        )

    def resumed(self, trials: int) -> None:
        """Tell that finished trials of an earlier run are used."""
        self._say(f"going on after {words.number(trials, 'finished trial')} of an earlier run")

    def asked(self, spec: TrialSpec) -> None:
        """Tell that a trial begins."""
        self._groups = (spec.groups, len(spec.sizes))
        self._trial = f"trial {spec.index}: microbatch {spec.split.microbatch} ({spec.reason})"
        if self._status is not None:
            self._status.update(Text(self._trial))

    def progressed(self, mark: Mark) -> None:
        """Tell where in a trial the worker is."""
        if self._status is not None and mark.group:
            groups, microbatches = self._groups
            at = f"group {mark.group}/{max(groups, mark.group)}"
            if mark.microbatch:
                at += f", microbatch {mark.microbatch}/{microbatches}"
            self._status.update(Text(f"{self._trial}, {at}, {mark.phase.replace('_', ' ')}"))

    def finished(self, trial: TrialResult) -> None:
        """Tell how a trial ended."""
        self._say(words.trial_line(trial))

    def decided(self, result: ProbeResult) -> None:
        """Begin to draw, while trials run that only tell more of the answer."""
        self._drawing = threading.Thread(target=self._draw, args=(result,), daemon=True)
        self._drawing.start()

    def charts(self) -> Charts | None:
        """Return what was drawn of the answer, once that is done; None where nothing was."""
        if self._drawing is not None:
            self._drawing.join()
        return self._charts

    def _draw(self, result: ProbeResult) -> None:
        with contextlib.suppress(Exception):  # it is drawn again with the page, and told there
            from memfit.report.page import draw_charts  # noqa: PLC0415 - matplotlib is heavy

            self._charts = draw_charts(result)

    def warned(self, sentence: str) -> None:
        """Tell what went wrong without ending the probe."""
        self._console.print(Text.assemble(("warning: ", "bold yellow"), sentence), soft_wrap=True)

    def _say(self, sentence: str) -> None:
        if not self._quiet:
            self._console.print(Text(sentence), soft_wrap=True)
