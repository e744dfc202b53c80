"""One figure of a real card beside the same figure of the virtual GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

ALLOCATED = "peak allocated"
RESERVED = "peak reserved"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison."""

    data_set: str
    label: str
    metric: str
    measured: int
    """What the real card showed, in bytes."""
    found: int | None
    """What the virtual GPU showed; None where the run failed."""
    torch: str
    """The version that was run here."""
    recorded: float
    """The minor version of torch 2 that recorded the figure, as far as it is known."""
    exact: bool
    """Equal to the last byte, or to the last digit that was published."""
    cause: str = ""
    """Why it is off, where that is known."""
    drift: str = ""
    """What later versions of torch do otherwise, where the row is exact with a nearer one."""
    same_sequence: bool | None = None
    """Whether every allocation had the same size in the same order; None where not recorded."""

    @property
    def error(self) -> float | None:
        """Relative error, signed."""
        return None if self.found is None else (self.found - self.measured) / self.measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one data set gave with one torch."""

    data_set: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was not tried, and why; what a reader has to know."""
    ladder: list[dict[str, object]] = field(default_factory=list)
    """Verdicts, for the data set that has no bytes."""
