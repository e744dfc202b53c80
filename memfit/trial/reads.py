"""What a trial reads from a virtual GPU, and the two passes that answer it.

Kernels do not run, so device memory that they would have written is unknown. A trial is measured
at once, and a listener waits for the first read of such memory by the host: a loss, a flag, a
count. Most trials have none, and are done. At the first one the trial is left, and

 1. a pass that is not measured works out values beside the program and records every read;
 2. the trial is measured anew, with nothing beside it, and the driver answers from the record.

Used in the worker process only.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Literal

from memfit.errors import WorkloadError
from memfit.trial.protocol import (
    ReadPass,
    ReadPlace,
    ReadScript,
    read_script,
    write_needs_values,
    write_script,
)
from memfit.virtual import control

TRACE = "MEMFIT_TRACE_READS"
"""Environment variable that has every place named, instead of the first few."""
_FEW = 4
_ENDLESS = 5_000
"""Reads of assumed values at one place and in one phase after which a loop is taken to wait for
one in vain."""
_MEMFIT = str(Path(__file__).parents[1])


class TrialReads:
    """The host's reads of device memory in one trial."""

    def __init__(self, which: ReadPass | None, *, share: float, folder: Path) -> None:
        """Prepare one pass.

        Args:
            which: The pass, or None where values are real.
            share: Share of unknown elements that is taken to count, for the words.
            folder: The trial's folder.
        """
        self._which = which
        self._share = share
        self._folder = folder
        self._values: Counter[str] = Counter()
        self._shapes: Counter[str] = Counter()
        self._in_phase: Counter[str] = Counter()
        self._groups: list[int] = []
        self._group = 0
        self._endless = False
        self._script: ReadScript | None = None

    def begin(self) -> None:
        """Begin, before anything is computed."""
        if self._which == "watch":
            control.listen(self._leave_at_unknown)
        if self._which == "record":
            control.record_reads()
            control.listen(self._note_unanswered)
        if self._which == "play":
            self._script = read_script(self._folder)
            control.play_reads(self._script.tape if self._script else b"")

    def begin_group(self) -> None:
        """Mark where a group begins; one beyond those that were recorded reads as the last did."""
        if self._which == "record":
            self._groups.append(control.tape_position())
        if self._script is not None and self._script.groups:
            at = min(self._group, len(self._script.groups) - 1)
            control.seek_tape(self._script.groups[at])
        self._group += 1

    def begin_phase(self) -> None:
        """Begin to count anew how often one place reads."""
        self._in_phase.clear()

    def note(self, unknown: Literal["value", "shape"]) -> None:
        """Note that an assumption steers the program here.

        Raises:
            WorkloadError: When a loop does nothing but wait for a value.
        """
        where = _place()[0]
        counter = self._values if unknown == "value" else self._shapes
        counter[where] += 1
        self._in_phase[where] += 1
        if self._in_phase[where] == _ENDLESS:
            self._endless = True
            raise WorkloadError(
                f"{where} read {_ENDLESS:,} values that a virtual GPU cannot know, and does not "
                "end with what was assumed for them",
                hint="bound the loop by a number that the host knows",
            )

    def finish(self) -> None:
        """Leave what was recorded."""
        if self._which != "record":
            return
        control.listen(None)
        script = ReadScript(
            tape=control.tape(),
            groups=self._groups,
            values=[ReadPlace(where, times) for where, times in self._values.items()],
            shapes=[ReadPlace(where, times) for where, times in self._shapes.items()],
            endless=self._endless,
        )
        write_script(self._folder, script)

    def limits(self) -> list[str]:
        """What was assumed, one sentence each."""
        if self._which != "play":
            return []
        if self._script is None:
            return [
                "Host code reads values that kernels compute. They could not be worked out, and "
                "read as zero."
            ]
        said = []
        if self._script.values:
            said.append(
                f"Host code read {_times(self._script.values)} a value that only kernels know "
                f"({_places(self._script.values)}): numbers were taken as 1, counts and indices "
                "as 0, flags as false, and checks that something holds for all elements as passed."
            )
        if self._script.shapes:
            said.append(
                f"Sizes depended {_times(self._script.shapes)} on values that only kernels know "
                f"({_places(self._script.shapes)}): {_share_words(self._share)} of the elements "
                "concerned were taken to count."
            )
        missed = control.mismatched_reads()
        if missed:
            said.append(
                f"{missed} reads of the measured pass were not those that were worked out for it; "
                "what kernels would have computed there read as zero."
            )
        return said

    # -- listening ---------------------------------------------------------------------------

    def _leave_at_unknown(self, _: int, kind: int) -> None:
        if kind in (control.CERTAIN, control.ANSWERED):
            return
        where, harmless = _place()
        if harmless == "always" or (harmless == "unchanged" and kind == control.CHANGED):
            return
        write_needs_values(self._folder, where)
        os._exit(0)

    def _note_unanswered(self, _: int, kind: int) -> None:
        if kind == control.UNKNOWN:
            where, harmless = _place()
            if harmless is None:
                self._values[where] += 1


def _place() -> tuple[str, Literal["always", "unchanged"] | None]:
    """Where the program reads, and whether what it reads there is harmless.

    Drawing truncated random numbers again until they lie within bounds is harmless, and the checks
    of data-parallel wrappers, which compare what the driver itself has copied. Of memfit's own
    gradient scaler the driver knows the scale and the flags as long as gradients are finite.
    """
    torch, scaling = _torch_folder(), False
    for frame in _frames():
        name = frame.f_code.co_filename
        scaling = scaling or name.startswith(f"{torch}/amp/")
        if name.startswith((f"{torch}/nn/init.py", f"{torch}/distributed/")) or (
            name == f"{torch}/nn/parallel/distributed.py"
        ):
            return _words(frame), "always"
        if name.startswith((torch, "<")):
            continue
        if name.startswith(_MEMFIT):
            if name == f"{_MEMFIT}/group.py":
                harmless: Literal["unchanged"] | None = "unchanged" if scaling else None
                return "the gradient scaler" if scaling else "the optimizer step", harmless
            continue
        return _words(frame), None
    return "the backward pass", None


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        yield frame
        frame = frame.f_back


def _torch_folder() -> str:
    return str(Path(sys.modules["torch"].__file__ or "").parent)


def _words(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{'/'.join(path.parts[-2:])}:{frame.f_lineno}"


def _times(places: list[ReadPlace]) -> str:
    times = sum(place.times for place in places)
    return "once" if times == 1 else f"{times:,} times"


def _places(places: list[ReadPlace]) -> str:
    shown = places if os.environ.get(TRACE) else places[:_FEW]
    words = ", ".join(place.where for place in shown)
    left = len(places) - len(shown)
    return words + (f" and {left} other places" if left > 1 else " and another" if left else "")


def _share_words(share: float) -> str:
    return "all" if share == 1 else "none" if share == 0 else f"{share:.0%}"
