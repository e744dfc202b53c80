"""The figures that were measured on real cards, as they are found in a folder given by the user."""

from __future__ import annotations

import csv
import gzip
import json
from functools import cached_property
from pathlib import Path
from typing import Any


class Truth:
    """A folder with `measured.csv` and `traces/`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def rows(self) -> list[dict[str, str]]:
        """Every row of `measured.csv`; none where the file is missing."""
        path = self.folder / "measured.csv"
        if not path.exists():
            return []
        with path.open(newline="") as file:
            return list(csv.DictReader(file))

    def of(self, source: str) -> list[dict[str, str]]:
        """Rows whose source begins with a name."""
        return [row for row in self.rows if row["source"].startswith(source)]

    def trace(self, part: str) -> dict[str, Any] | None:
        """Return the trace whose file name contains a part; None where there is none."""
        for path in sorted((self.folder / "traces").glob("*.json.gz")):
            if part in path.name:
                with gzip.open(path, "rt") as file:
                    found: dict[str, Any] = json.load(file)
                return found
        return None
