"""One cell: what it is asked, and what a probe's end makes of it. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from memfit.capacity.matrix import Change
from memfit.capacity.table import (
    CapacityCell,
    CapacityPoint,
    CellStatus,
    Setting,
    Tried,
    fit_of,
    point_of,
    points_of,
)
from memfit.errors import CannotJudge, MemfitError, NothingFits
from memfit.folder import plain_name
from memfit.question import ProbeRequest
from memfit.records import DeviceKind, DeviceSpec, Parameter, ProbeResult, Source, TrialResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One device of a plan."""

    word: str
    """As the user named it."""
    device: DeviceSpec
    environment: Mapping[str, str]
    """Variables that make a process a worker on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What one cell is asked."""

    index: int
    """Number of the cell, from 1."""
    row: int
    """Index of the row that it belongs to."""
    column: Column
    setting: Setting
    change: Change | None = None
    base: int | None = None
    tries: tuple[Tried, ...] = ()
    folder: str = ""
    """Its folder, within that of the plan."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that the change sets."""
        return {} if self.change is None else self.change.environment


@dataclass(slots=True, kw_only=True)
class _Draft:
    row: int
    column: Column
    setting: Setting
    change: Change | None = None
    base: int | None = None
    tries: list[Tried] = field(default_factory=list)


def asks_of(
    columns: Sequence[Column],
    rows: Sequence[Setting],
    values: Sequence[Mapping[str, Parameter]],
    changes: Sequence[Change],
) -> tuple[Ask, ...]:
    """List the cells: those of the matrix row by row, then what each change makes of them.

    A change that leads to another cell of the matrix is not asked twice.

    Args:
        columns: The devices, from the least memory to the most.
        rows: The settings.
        values: All parameters of the workload, for each row.
        changes: What to try in every cell.
    """
    drafts = [_Draft(row=r, column=c, setting=row) for r, row in enumerate(rows) for c in columns]
    for change in changes:
        for r, row in enumerate(rows):
            changed = change.apply(row, values[r])
            if changed is None:
                continue
            twin = rows.index(changed) if changed in rows and not change.environment else None
            for c, column in enumerate(columns):
                base = r * len(columns) + c
                if twin is None:
                    drafts.append(
                        _Draft(row=r, column=column, setting=changed, change=change, base=base + 1)
                    )
                shown = len(drafts) if twin is None else twin * len(columns) + c + 1
                drafts[base].tries.append(Tried(change=change.name, cell=shown))
    names: set[str] = set()
    asks = []
    for index, draft in enumerate(drafts, start=1):
        asks.append(
            Ask(
                index=index,
                row=draft.row,
                column=draft.column,
                setting=draft.setting,
                change=draft.change,
                base=draft.base,
                tries=tuple(draft.tries),
                folder=f"cells/{_own_name(draft, names)}",
            )
        )
    return tuple(asks)


def _own_name(draft: _Draft, taken: set[str]) -> str:
    """Name a cell's folder after what it is asked, in letters that every system takes."""
    setting = draft.setting
    words = [
        draft.column.device.slug,
        *(f"{name}-{value}" for name, value in setting.parameters.items()),
        str(setting.precision),
        *([f"x{setting.replicas}"] if setting.replicas > 1 else []),
        *([draft.change.name] if draft.change and draft.change.environment else []),
    ]
    plain = plain_name(words)
    own, number = plain, 2
    while own in taken:
        own, number = f"{plain}-{number}", number + 1
    taken.add(own)
    return own


def probe_command(request: ProbeRequest, environment: Mapping[str, str]) -> str:
    """Write the command that asks a cell's question alone."""
    words = ["memfit", "probe", request.target]
    for name, value in request.parameters.items():
        words += ["--set", f"{name}={value}"]
    words += ["--device", request.device, "--precision", str(request.precision)]
    plain = ProbeRequest(target="")
    for option, name in (
        ("--replicas", "replicas"),
        ("--logical-batch", "logical_batch"),
        ("--policy", "policy"),
        ("--memory-limit", "memory_limit"),
        ("--headroom", "headroom"),
        ("--clip", "clip_norm"),
        ("--group-microbatches", "group_microbatches"),
        ("--min-microbatch", "min_microbatch"),
        ("--max-microbatch", "max_microbatch"),
        ("--max-trials", "max_trials"),
        ("--time-budget", "time_budget_s"),
        ("--trial-timeout", "trial_timeout_s"),
        ("--seed", "seed"),
        ("--data-dependent", "data_dependent"),
    ):
        value = getattr(request, name)
        if value != getattr(plain, name):
            words += [option, str(value)]
    before = "".join(f"{name}={shlex.quote(value)} " for name, value in environment.items())
    return before + shlex.join(words)


def answered_cell(ask: Ask, result: ProbeResult) -> CapacityCell:
    """Make the cell of a probe that has an answer."""
    answer, points = result.answer, points_of(result)
    return CapacityCell(
        index=ask.index,
        device=result.spec.device,
        setting=ask.setting,
        change=ask.change.name if ask.change else None,
        base=ask.base,
        status=CellStatus.FITS,
        source=result.source,
        folder=ask.folder,
        command=result.command,
        split=result.split,
        certificate=result.certificate,
        groups_run=answer.groups_run,
        peak_allocated_bytes=answer.peak_allocated_bytes,
        peak_bytes=answer.peak_bytes,
        composition=answer.composition,
        points=points,
        fit=fit_of(points),
        limits=result.limits,
        notes=result.notes,
        tries=ask.tries,
        wall_s=result.wall_s,
    )


def refused_cell(
    ask: Ask, error: MemfitError, trials: Sequence[TrialResult], *, command: str, wall_s: float
) -> CapacityCell:
    """Make the cell of a probe that ended without an answer."""
    status = CellStatus.FAILED
    if isinstance(error, NothingFits):
        status = CellStatus.NOTHING_FITS
    elif isinstance(error, CannotJudge):
        status = CellStatus.CANNOT_JUDGE
    points: tuple[CapacityPoint, ...] = tuple(point_of(t) for t in trials)
    virtual = ask.column.device.kind is DeviceKind.VIRTUAL
    return CapacityCell(
        index=ask.index,
        device=ask.column.device,
        setting=ask.setting,
        change=ask.change.name if ask.change else None,
        base=ask.base,
        status=status,
        source=Source.VIRTUAL if virtual else Source.MEASURED,
        command=command,
        points=tuple(sorted(points, key=lambda p: (p.microbatch, p.trial))),
        message=error.message,
        hint=error.hint,
        details=error.details,
        tries=ask.tries,
        wall_s=wall_s,
    )


def skipped_cell(ask: Ask, *, command: str) -> CapacityCell:
    """Make the cell of a device that was not asked, since a smaller one does."""
    return CapacityCell(
        index=ask.index,
        device=ask.column.device,
        setting=ask.setting,
        status=CellStatus.NOT_PROBED,
        command=command,
        message="not probed: a smaller device does",
    )
