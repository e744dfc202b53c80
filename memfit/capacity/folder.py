"""The folder of a plan: its table, and one folder a cell."""

from __future__ import annotations

from memfit.capacity.table import CapacityProgress, CapacityTable
from memfit.folder import OutputFolder
from memfit.records import from_json, to_json

TABLE = "capacity.json"
PROGRESS = "capacity.progress.json"
CELLS = "capacity.csv"
PAGE = "capacity.html"


class CapacityFolder(OutputFolder):
    """The output folder of one plan."""

    kind, result, progress = "plan", TABLE, PROGRESS

    def unfinished(self) -> CapacityProgress | None:
        """Return the unfinished plan that the folder holds, or None."""
        data = self.saved_progress()
        origin = str(self.path / self.progress)
        return None if data is None else from_json(data, CapacityProgress, origin=origin)

    def save_progress(self, progress: CapacityProgress) -> None:
        """Save what the plan is about; raises CannotJudge when the disk refuses."""
        self.write(self.progress, to_json(progress))

    def save_table(self, table: CapacityTable) -> None:
        """Save the answer, which ends the unfinished state."""
        self.write(self.result, to_json(table))
        self.forget_progress()
