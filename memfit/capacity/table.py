"""The record of a capacity plan: devices by settings, each cell a probe of its own. Pure.

A cell's probe is stored in a folder of its own; what is kept here is what a table needs of it.
Integers are bytes or counts, and `None` means not measured, as in `records`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from memfit.records import (
    SCHEMA_VERSION,
    Certificate,
    Composition,
    DeviceKind,
    DeviceSpec,
    Environment,
    Policy,
    Precision,
    ProbeResult,
    Source,
    Split,
    TrialResult,
    Verdict,
    WorkloadInfo,
)

_LEAST_POINTS = 2
"""Points that determine a line; its residual says something from three on."""


class CellStatus(StrEnum):
    """What is known of one cell."""

    FITS = "fits"
    NOTHING_FITS = "nothing_fits"
    """Not even the smallest microbatch fits."""
    FAILED = "failed"
    """The workload failed with these parameters on this device."""
    CANNOT_JUDGE = "cannot_judge"
    NOT_PROBED = "not_probed"
    """A smaller device was found to do, so this one was not asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a row of the table has in common."""

    parameters: dict[str, str]
    """Workload parameters of this plan, as they were given."""
    precision: Precision
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPoint:
    """One trial of a cell: what was measured at one microbatch."""

    trial: int
    microbatch: int
    accumulation_steps: int
    """Microbatches that a group of the trial ran; fewer than the split's in a search trial."""
    verdict: Verdict
    peak_allocated_bytes: int | None
    peak_bytes: int | None
    """The figure that is compared with the limit."""
    demand_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakFit:
    """A straight line through the allocated peaks of trials that fitted, by least squares.

    It describes the points and takes the place of none: kernels and the allocator are not affine.
    """

    points: int
    """Trials that it goes through."""
    intercept_bytes: int
    """What is there with no example at all."""
    slope_bytes: int
    """What one more example takes."""
    residual_bytes: int
    """The largest distance of a point from the line; 0 where two points are all there is."""
    residual_microbatch: int
    """The microbatch of that point."""

    def at(self, microbatch: int) -> int:
        """Bytes that the line gives for a size."""
        return self.intercept_bytes + self.slope_bytes * microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """Something that was changed in a cell, to see whether it buys room."""

    change: str
    cell: int
    """The cell that shows what it brought: one of the matrix, or one beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityCell:
    """One device with one setting."""

    index: int
    """Number of the cell, from 1."""
    device: DeviceSpec
    setting: Setting
    change: str | None = None
    """What `--try` changed in the cell `base`; None for a cell of the matrix itself."""
    base: int | None = None
    status: CellStatus
    source: Source | None = None
    folder: str | None = None
    """Folder of the probe, beside this record."""
    command: str
    """The probe that asks the same question alone."""
    split: Split | None = None
    certificate: Certificate | None = None
    groups_run: int | None = None
    """Full groups that the answer's trial ran."""
    peak_allocated_bytes: int | None = None
    peak_bytes: int | None = None
    composition: Composition | None = None
    """What the allocated peak is made of."""
    points: tuple[CapacityPoint, ...] = ()
    fit: PeakFit | None = None
    message: str | None = None
    """Why there is no answer, where there is none."""
    hint: str | None = None
    details: str | None = None
    limits: tuple[str, ...] = ()
    """What the figures leave out, one sentence each."""
    notes: tuple[str, ...] = ()
    tries: tuple[Tried, ...] = ()
    wall_s: float = 0.0

    @property
    def headroom_left_bytes(self) -> int | None:
        """Bytes between the peak and the limit."""
        return None if self.peak_bytes is None else self.device.limit_bytes - self.peak_bytes

    @property
    def microbatch(self) -> int | None:
        """The largest microbatch that was certified."""
        return None if self.split is None else self.split.microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """The smallest device on which a microbatch fits, for one setting."""

    setting: Setting
    microbatch: int
    device: str | None
    """Slug of the smallest device that does; None where none of those asked does."""
    cell: int | None
    alike: tuple[str, ...] = ()
    """Others of about the same memory that do as well."""
    below: int | None = None
    """The cell of the next smaller device, which does not."""
    undecided: tuple[int, ...] = ()
    """Cells of smaller devices that could not be judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacitySpec:
    """The question of a plan."""

    target: str
    devices: tuple[str, ...]
    """Slugs, from the least memory to the most."""
    limits_bytes: tuple[int, ...]
    """The most that may be used of each device."""
    settings: tuple[Setting, ...]
    """The rows, in the order in which they were given."""
    tries: tuple[str, ...] = ()
    need: int | None = None
    logical_batch: int | None = None
    policy: Policy = Policy.EXACT
    clip_norm: float | None = None
    group_microbatches: int = 2
    min_microbatch: int = 1
    max_microbatch: int | None = None
    seed: int = 0
    data_dependent: str = "worst"


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityTable:
    """The answer of a plan."""

    schema: Literal["memfit.capacity"] = "memfit.capacity"
    schema_version: int = SCHEMA_VERSION
    created: str
    """Moment of the answer, ISO 8601 in UTC."""
    command: str
    workload: WorkloadInfo
    """Its parameters are those of the first row."""
    spec: CapacitySpec
    cells: tuple[CapacityCell, ...]
    """Those of the matrix, row by row; then what `--try` changed in them."""
    needed: tuple[Needed, ...] = ()
    """One for each row, where `--need` asked."""
    environment: Environment
    notes: tuple[str, ...] = ()
    wall_s: float = 0.0

    @property
    def matrix(self) -> tuple[CapacityCell, ...]:
        """The cells of the matrix itself."""
        return tuple(cell for cell in self.cells if cell.base is None)

    def cell(self, index: int) -> CapacityCell:
        """Return a cell by its number."""
        return self.cells[index - 1]

    @property
    def is_virtual(self) -> bool:
        """Whether any figure comes from a virtual GPU."""
        return any(cell.device.kind is DeviceKind.VIRTUAL for cell in self.cells)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityProgress:
    """A plan that has not ended; cells with an answer are in their own folders."""

    schema: Literal["memfit.capacity-progress"] = "memfit.capacity-progress"
    schema_version: int = SCHEMA_VERSION
    command: str
    workload: WorkloadInfo
    spec: CapacitySpec
    environment: Environment


def point_of(trial: TrialResult) -> CapacityPoint:
    """Take from a trial what the table shows of it."""
    return CapacityPoint(
        trial=trial.spec.index,
        microbatch=trial.spec.split.microbatch,
        accumulation_steps=len(trial.spec.sizes),
        verdict=trial.verdict,
        peak_allocated_bytes=trial.peak_allocated_bytes,
        peak_bytes=trial.peak_bytes,
        demand_bytes=trial.demand_bytes,
    )


def points_of(result: ProbeResult) -> tuple[CapacityPoint, ...]:
    """Return the trials of a probe, by microbatch, without those that only diagnose."""
    trials = [point_of(t) for t in result.trials if t.spec.purpose != "diagnose"]
    return tuple(sorted(trials, key=lambda point: (point.microbatch, point.trial)))


def fit_of(points: tuple[CapacityPoint, ...]) -> PeakFit | None:
    """Draw the line through the peaks of what fitted; None with fewer than two sizes.

    A group of a single microbatch holds no gradients during forward and so lies elsewhere: it is
    left out. Of several trials of a size, the highest peak counts.
    """
    highest: dict[int, int] = {}
    for point in points:
        peak = point.peak_allocated_bytes
        if point.verdict is Verdict.FITS and point.accumulation_steps > 1 and peak is not None:
            highest[point.microbatch] = max(peak, highest.get(point.microbatch, 0))
    if len(highest) < _LEAST_POINTS:
        return None
    sizes = sorted(highest)
    count, total = len(sizes), sum(sizes)
    spread = count * sum(m * m for m in sizes) - total * total
    lift = sum(highest.values())
    slope = round((count * sum(m * highest[m] for m in sizes) - total * lift) / spread)
    intercept = round((lift - slope * total) / count)
    residuals = {m: abs(highest[m] - intercept - slope * m) for m in sizes}
    far = max(sizes, key=lambda m: (residuals[m], -m))
    return PeakFit(
        points=count,
        intercept_bytes=intercept,
        slope_bytes=slope,
        residual_bytes=0 if count == _LEAST_POINTS else residuals[far],
        residual_microbatch=far,
    )
