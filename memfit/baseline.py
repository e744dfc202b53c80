"""The file that a gate compares with: peaks of many workloads, each with what it was measured on.

It is committed, so it is written for people who read its changes: sorted, one figure or row a
line, and nothing in it that differs from run to run.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from memfit.errors import CannotJudge, UsageError
from memfit.folder import write_whole
from memfit.records import (
    SCHEMA_VERSION,
    Category,
    Ledger,
    LedgerPeak,
    LedgerRow,
    Parameter,
    Precision,
    Source,
    check_schema,
)

SCHEMA = "memfit.baseline"
DEFAULT_FILE = "memfit-baseline.json"
Phase = Literal["build", "forward", "backward", "optimizer_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a workload is run to be compared."""

    target: str
    parameters: dict[str, str] = field(default_factory=dict)
    """Parameters that were set, as they were written."""
    device: str
    """The word for `--device`."""
    precision: Precision = Precision.FP32
    microbatch: int
    accumulation_steps: int
    replicas: int = 1
    clip_norm: float | None = None

    @property
    def name(self) -> str:
        """What tells this workload from the others of a baseline."""
        words = [self.device, self.precision.value]
        if self.replicas > 1:
            words.append(f"{self.replicas} replicas")
        words += [f"{key}={value}" for key, value in sorted(self.parameters.items())]
        return f"{self.target} on {', '.join(words)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What peaks depend on beside the code; entries are comparable when all of it is equal."""

    workload: str
    """Name of the workload."""
    parameters: dict[str, Parameter]
    """All parameters of the workload with the values used."""
    card: str
    card_bytes: int | None
    """Total memory of the device; None for a CPU, whose size says nothing of a workload."""
    torch: str
    cuda: str | None
    cudnn: str | None
    driver: str | None
    """Major version of a real GPU's driver."""
    precision: Precision
    clip_norm: float | None
    allocator: dict[str, str]
    """Variables that change how memory is allocated."""
    microbatch: int
    accumulation_steps: int
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePeaks:
    """Peaks of one phase over all groups, in bytes; None for what was not measured."""

    phase: Phase
    allocated_bytes: int | None
    reserved_bytes: int | None
    used_bytes: int | None
    """Device memory in use at the end of the phase, everything included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeaks:
    """Peaks of one device of one rank."""

    rank: int
    device: int
    phases: tuple[PhasePeaks, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One workload as it was measured."""

    setting: Setting
    fingerprint: Fingerprint
    source: Source
    devices: tuple[DevicePeaks, ...]
    ledger: Ledger | None = None
    fits_on: dict[str, bool] = field(default_factory=dict)
    """Other cards on which the same group was tried, and whether it fitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """All workloads of one file, by their names."""

    entries: dict[str, Entry] = field(default_factory=dict)


class _StoredEntry(msgspec.Struct, kw_only=True):
    """An entry as it stands in the file."""

    setting: Setting
    fingerprint: Fingerprint
    source: Source
    fits_on: dict[str, bool]
    devices: list[_StoredDevice]
    ledger: _StoredLedger | None


class _StoredDevice(msgspec.Struct, kw_only=True):
    rank: int
    device: int
    phases: list[tuple[Phase, int | None, int | None, int | None]]


class _StoredLedger(msgspec.Struct, kw_only=True):
    peaks: list[tuple[Phase, Literal["none", "first", "later"], int]]
    places: dict[str, tuple[str, str]]
    rows: list[tuple[Category, str, str | None, list[int]]]


class _StoredBaseline(msgspec.Struct, kw_only=True):
    schema: str
    schema_version: int
    workloads: dict[str, _StoredEntry]


def read_baseline(path: Path) -> Baseline:
    """Read a baseline.

    Raises:
        CannotJudge: When there is no such file.
        UsageError: When it cannot be read, is not a baseline, is damaged, or is newer.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise CannotJudge(
            f"there is no baseline {path}",
            hint=f"`memfit gate --update TARGET --baseline {path}` writes it",
        ) from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    check_schema(data, SCHEMA, origin=str(path))
    try:
        stored = msgspec.json.decode(data, type=_StoredBaseline)
        return Baseline(entries={n: _entry(e) for n, e in stored.workloads.items()})
    except (msgspec.DecodeError, ValueError) as error:
        raise UsageError(
            f"{path} is damaged: {error}",
            hint="take the committed file again, or write it anew with --update",
        ) from None


def _entry(stored: _StoredEntry) -> Entry:
    return Entry(
        setting=stored.setting,
        fingerprint=stored.fingerprint,
        source=stored.source,
        devices=tuple(
            DevicePeaks(
                rank=d.rank,
                device=d.device,
                phases=tuple(
                    PhasePeaks(phase=p, allocated_bytes=a, reserved_bytes=r, used_bytes=u)
                    for p, a, r, u in d.phases
                ),
            )
            for d in stored.devices
        ),
        ledger=_ledger(stored.ledger) if stored.ledger else None,
        fits_on=stored.fits_on,
    )


def _ledger(stored: _StoredLedger) -> Ledger:
    rows = []
    for category, module, place, sizes in stored.rows:
        if len(sizes) != len(stored.peaks):
            raise ValueError(f"a row of the ledger has {len(sizes)} sizes, not {len(stored.peaks)}")
        function, text = stored.places.get(place or "", ("", ""))
        rows.append(
            LedgerRow(
                category=category,
                module=module,
                place=place,
                function=function,
                text=text,
                bytes=tuple(sizes),
                blocks=(),
            )
        )
    return Ledger(
        peaks=tuple(LedgerPeak(phase=p, groups=g, allocated_bytes=a) for p, g, a in stored.peaks),
        rows=tuple(rows),
    )


def write_baseline(path: Path, baseline: Baseline) -> bool:
    """Write a baseline whole, and return whether that changed the file.

    Raises:
        CannotJudge: When the system refuses.
    """
    data = encode(baseline)
    with contextlib.suppress(OSError):
        if path.read_bytes() == data:
            return False
    write_whole(path, data)
    return True


def encode(baseline: Baseline) -> bytes:
    """Write a baseline as JSON: objects spread out, one figure or row of the ledger a line."""
    document = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "workloads": {name: _stored(baseline.entries[name]) for name in sorted(baseline.entries)},
    }
    return ("\n".join(_lines(document)) + "\n").encode()


def _stored(entry: Entry) -> dict[str, Any]:
    found: dict[str, Any] = {
        "setting": msgspec.to_builtins(entry.setting),
        "fingerprint": msgspec.to_builtins(entry.fingerprint),
        "source": entry.source.value,
        "fits_on": dict(sorted(entry.fits_on.items())),
        "devices": [
            {
                "rank": d.rank,
                "device": d.device,
                "phases": [
                    [p.phase, p.allocated_bytes, p.reserved_bytes, p.used_bytes] for p in d.phases
                ],
            }
            for d in entry.devices
        ],
        "ledger": None,
    }
    ledger = entry.ledger
    if ledger is not None:
        places = {r.place: [r.function, r.text] for r in ledger.rows if r.place is not None}
        found["ledger"] = {
            "peaks": [[p.phase, p.groups, p.allocated_bytes] for p in ledger.peaks],
            "places": dict(sorted(places.items(), key=lambda item: _by_line(item[0]))),
            "rows": [[r.category, r.module, r.place, list(r.bytes)] for r in ledger.rows],
        }
    return found


def _by_line(place: str) -> tuple[str, int]:
    file, _, line = place.rpartition(":")
    return file, int(line)


def _lines(value: Any, indent: str = "", before: str = "", after: str = "") -> Iterable[str]:
    """Spread objects and lists of lists or objects over lines; anything else stays on one."""
    deeper = indent + "  "
    if isinstance(value, dict) and value:
        yield f"{indent}{before}{{"
        last = len(value) - 1
        for index, (key, item) in enumerate(value.items()):
            comma = "," if index < last else ""
            yield from _lines(item, deeper, f"{json.dumps(key, ensure_ascii=False)}: ", comma)
        yield f"{indent}}}{after}"
    elif isinstance(value, list) and value and isinstance(value[0], list | dict):
        yield f"{indent}{before}["
        for index, item in enumerate(value):
            yield from _lines(item, deeper, "", "," if index < len(value) - 1 else "")
        yield f"{indent}]{after}"
    else:
        yield f"{indent}{before}{json.dumps(value, ensure_ascii=False)}{after}"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Keep other updates away from a baseline while the context lasts.

    Raises:
        UsageError: When another one is at it, or the folder cannot be written.
    """
    try:
        folder = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another memfit is writing in the folder of {path}", hint="wait for it to end"
            ) from None
        if not os.access(path.parent, os.W_OK):
            raise UsageError(f"cannot write {path}: the folder is read-only")
        yield
    finally:
        os.close(folder)
