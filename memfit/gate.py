"""A measurement beside its baseline: whether it needs more memory, and what grew.

Nothing here starts, reads or writes anything.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from memfit.baseline import Entry, PhasePeaks
from memfit.folding import fold, natural, unfold
from memfit.records import SCHEMA_VERSION, Category, Ledger, Source
from memfit.units import MIB, format_bytes

Mark = Literal[" ", "+", "-", "!", "*", "x", "~"]
"""` ` the same, `+` more than the limits allow, `-` less, `!` does not run or fit any more, `*`
fits where it did not, `x` not comparable, `~` changed within the limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a change may cost; an increase fails when it exceeds both of the first two."""

    max_increase: float = 0.02
    """Share of the baseline's peak."""
    min_delta_bytes: int = 16 * MIB
    limit_bytes: int | None = None
    """The most that a device may have in use, whatever the baseline says."""

    def mark(self, before: int, now: int) -> Mark:
        """Judge one figure."""
        if now == before:
            return " "
        if abs(now - before) > max(self.max_increase * before, self.min_delta_bytes):
            return "+" if now > before else "-"
        return "~"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One phase of one device, or with `peak` the highest of its phases, before and now."""

    rank: int
    device: int
    phase: Literal["build", "forward", "backward", "optimizer_step", "peak"]
    mark: Mark
    allocated_bytes: tuple[int | None, int | None]
    reserved_bytes: tuple[int | None, int | None]
    used_bytes: tuple[int | None, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A field of the fingerprint that is not what it was."""

    field: str
    before: str
    now: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What changed at one place, in bytes of the peak that is explained."""

    category: Category
    module: str
    place: str | None
    text: str
    bytes: int
    """More than zero for growth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Whether a group fits on another card."""

    card: str
    mark: Mark
    before: bool | None
    """None where the baseline does not say."""
    now: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One workload beside its baseline."""

    name: str
    target: str
    mark: Mark
    verdict: Literal["same", "within limits", "less", "more", "failed", "not comparable", "error"]
    source: Source | None
    microbatch: int | None = None
    accumulation_steps: int | None = None
    reasons: tuple[str, ...] = ()
    """Why it fails or cannot be compared, one sentence each."""
    differences: tuple[Difference, ...] = ()
    figures: tuple[Figure, ...] = ()
    explained: Literal["build", "forward", "backward", "optimizer_step"] | None = None
    """The phase whose peak `changes` explain."""
    changes: tuple[Change, ...] = ()
    """Growth first, the largest first; then what became less. They sum to the change."""
    suspects: tuple[Change, ...] = ()
    """Growth at lines that held nothing at any peak of the baseline, at the peak of any phase, the
    largest first: lines that are new, rewritten or newly kept are where the cause often is."""
    fits: tuple[Fit, ...] = ()

    @property
    def fails(self) -> bool:
        """Whether this fails a gate."""
        return self.verdict in ("more", "failed", "not comparable", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """What a gate found."""

    schema: Literal["memfit.gate"] = "memfit.gate"
    schema_version: int = SCHEMA_VERSION
    memfit: str
    baseline: str
    """The file, as it was named."""
    limits: Limits
    passed: bool
    workloads: tuple[Comparison, ...]


def differences_of(before: Entry, now: Entry) -> tuple[Difference, ...]:
    """Return the fields of the fingerprint that differ, in words."""
    found = []
    for name in (f.name for f in dataclasses.fields(before.fingerprint)):
        one, other = getattr(before.fingerprint, name), getattr(now.fingerprint, name)
        if isinstance(one, dict):
            found += [
                Difference(field=f"{name}.{key}", before=_word(one, key), now=_word(other, key))
                for key in sorted({*one, *other})
                if one.get(key, ...) != other.get(key, ...)
            ]
        elif one != other:
            found.append(Difference(field=name, before=str(one), now=str(other)))
    if before.source is not now.source:
        found.append(Difference(field="source", before=before.source, now=now.source))
    return tuple(found)


def _word(values: dict[str, Any], key: str) -> str:
    return str(values[key]) if key in values else "not there"


def compare(before: Entry, now: Entry, limits: Limits) -> Comparison:
    """Compare a measurement with its baseline.

    Args:
        before: The baseline's entry.
        now: What was measured, with its ledger where anything changed.
        limits: What a change may cost.
    """
    setting = before.setting
    found = Comparison(
        name=setting.name,
        target=setting.target,
        mark=" ",
        verdict="same",
        source=now.source,
        microbatch=setting.microbatch,
        accumulation_steps=setting.accumulation_steps,
    )
    differences = differences_of(before, now)
    if differences:
        return replace(
            found,
            mark="x",
            verdict="not comparable",
            differences=differences,
            reasons=tuple(f"{d.field} was {d.before} and is {d.now}" for d in differences),
        )
    figures = figures_of(before, now, limits)
    marks = {figure.mark for figure in figures}
    fits = tuple(_fit(before, card, fits) for card, fits in sorted(now.fits_on.items()))
    reasons = [_reason(figure) for figure in _grown(figures)]
    over = [] if limits.limit_bytes is None else _over(now, limits.limit_bytes)
    lost = [f"it does not fit on {fit.card} any more" for fit in fits if fit.mark == "!"]
    reasons += [*over, *lost]
    phase, changes = _explain(before, now, figures)
    found = replace(
        found,
        figures=figures,
        fits=fits,
        reasons=tuple(reasons),
        explained=phase,
        changes=changes,
        suspects=_suspects(before, now, changes),
    )
    if over or lost:
        return replace(found, mark="!" if lost else "+", verdict="failed")
    if "+" in marks:
        return replace(found, mark="+", verdict="more")
    if any(fit.mark == "*" for fit in fits):
        return replace(found, mark="*", verdict="less")
    if "-" in marks:
        return replace(found, mark="-", verdict="less")
    return replace(found, mark="~", verdict="within limits") if "~" in marks else found


def _grown(figures: Sequence[Figure]) -> list[Figure]:
    """Figures that grew too much; a phase that is the device's peak is told once."""
    grown = [figure for figure in figures if figure.mark == "+"]
    peaks = {
        (f.rank, f.device, f.allocated_bytes, f.used_bytes) for f in grown if f.phase == "peak"
    }
    return [
        f
        for f in grown
        if f.phase == "peak" or (f.rank, f.device, f.allocated_bytes, f.used_bytes) not in peaks
    ]


def _fit(before: Entry, card: str, fits: bool) -> Fit:  # noqa: FBT001 - it is the answer
    known = before.fits_on.get(card)
    mark: Mark = " "
    if fits and known is False:
        mark = "*"
    elif not fits and known is not False:
        mark = "!"
    return Fit(card=card, mark=mark, before=known, now=fits)


def _over(now: Entry, limit: int) -> list[str]:
    found = []
    for device in now.devices:
        used = max((p.used_bytes or 0 for p in device.phases), default=0)
        if used > limit:
            found.append(
                f"device {device.device} uses {format_bytes(used)}, and the limit is "
                f"{format_bytes(limit)}"
            )
    return found


def figures_of(before: Entry, now: Entry, limits: Limits) -> tuple[Figure, ...]:
    """Put the figures of both beside each other: each device's peak, then its phases."""
    found: list[Figure] = []
    known = {(d.rank, d.device): d for d in before.devices}
    for device in now.devices:
        old = known.get((device.rank, device.device))
        phases_before = old.phases if old else ()
        by_phase = {p.phase: p for p in phases_before}
        pairs = [("peak", _highest(phases_before), _highest(device.phases))]
        pairs += [(p.phase, by_phase.get(p.phase, _nothing(p)), p) for p in device.phases]
        for name, one, other in pairs:
            was, has = _judged(one), _judged(other)
            found.append(
                Figure(
                    rank=device.rank,
                    device=device.device,
                    phase=name,  # type: ignore[arg-type]
                    mark=" " if was is None or has is None else limits.mark(was, has),
                    allocated_bytes=(one.allocated_bytes, other.allocated_bytes),
                    reserved_bytes=(one.reserved_bytes, other.reserved_bytes),
                    used_bytes=(one.used_bytes, other.used_bytes),
                )
            )
    return tuple(found)


def _judged(peaks: PhasePeaks) -> int | None:
    """The figure that decides: allocated; where no allocator counts, what is in use."""
    return peaks.used_bytes if peaks.allocated_bytes is None else peaks.allocated_bytes


def _nothing(like: PhasePeaks) -> PhasePeaks:
    return replace(like, allocated_bytes=None, reserved_bytes=None, used_bytes=None)


def _highest(phases: Sequence[PhasePeaks]) -> PhasePeaks:
    def most(values: Iterable[int | None]) -> int | None:
        return max((v for v in values if v is not None), default=None)

    return PhasePeaks(
        phase="backward",
        allocated_bytes=most(p.allocated_bytes for p in phases),
        reserved_bytes=most(p.reserved_bytes for p in phases),
        used_bytes=most(p.used_bytes for p in phases),
    )


def _reason(figure: Figure) -> str:
    one, other = figure.allocated_bytes
    if one is None or other is None:
        one, other = figure.used_bytes
    assert one is not None
    assert other is not None
    what = "the peak" if figure.phase == "peak" else figure.phase.replace("_", " ")
    share = f" ({(other - one) / one:+.1%})" if one else ""
    return (
        f"{what} grew by {format_bytes(other - one)}{share}, from {format_bytes(one)} to "
        f"{format_bytes(other)}"
    )


# -- what grew -------------------------------------------------------------------------------

_Key = tuple[Category, str, str, str, str]
"""Category, module, file, function and text; never a number of a line, for lines move."""


def _explain(
    before: Entry, now: Entry, figures: Sequence[Figure]
) -> tuple[Literal["build", "forward", "backward", "optimizer_step"] | None, tuple[Change, ...]]:
    """Choose the peak to explain, and say what changed in it."""
    if before.ledger is None or now.ledger is None:
        return None, ()
    peak = next((f for f in figures if f.phase == "peak"), None)
    changed = [f for f in figures if f.phase != "peak" and f.mark != " "]
    if not changed or peak is None:
        return None, ()

    def weight(figure: Figure) -> tuple[bool, bool, int]:
        one, other = figure.allocated_bytes
        delta = (other or 0) - (one or 0)
        highest = peak.mark != " " and figure.allocated_bytes[1] == peak.allocated_bytes[1]
        return figure.mark == "+", highest, abs(delta)

    phase = max(changed, key=weight).phase
    assert phase != "peak"
    return phase, tuple(changes_of(before.ledger, now.ledger, phase))


def _suspects(before: Entry, now: Entry, changes: Sequence[Change]) -> tuple[Change, ...]:
    """Find growth at lines of the project whose text is in no row of the baseline."""
    if not any(change.bytes > 0 for change in changes):
        return ()
    assert before.ledger is not None
    assert now.ledger is not None
    known = {row.text for row in before.ledger.rows}
    largest: dict[str | None, Change] = {}
    for peak in now.ledger.peaks:
        for change in changes_of(before.ledger, now.ledger, peak.phase):
            if change.bytes > 0 and change.text and change.text not in known:
                kept = largest.get(change.place)
                if kept is None or change.bytes > kept.bytes:
                    largest[change.place] = change
    return tuple(sorted(largest.values(), key=lambda c: (-c.bytes, c.place or "")))


def changes_of(before: Ledger, now: Ledger, phase: str) -> list[Change]:
    """Say what changed between the peaks of one phase, the largest growth first.

    Rows are matched by module, function and the text of the line. What then remains is netted
    within a module and within a line and, where the bytes are equal, among siblings and within a
    category, so that renamed modules, moved code and rewritten lines are no change.
    """
    old, _ = _column(before, phase)
    new, places = _column(now, phase)
    old_places = _column(before, phase)[1]
    deltas: dict[_Key, int] = defaultdict(int)
    for key, size in new.items():
        deltas[key] += size
    for key, size in old.items():
        deltas[key] -= size
    for group in _LEVELS:
        _net(deltas, group)
    _net_equal(deltas, lambda key: (key[0], key[1].rpartition(".")[0]))
    _net_equal(deltas, lambda key: key[0])
    _blame_parameters(deltas)
    return _told(deltas, {**old_places, **places})


def _column(ledger: Ledger, phase: str) -> tuple[dict[_Key, int], dict[_Key, str | None]]:
    """Bytes and places at one phase's peak, with folded modules taken apart."""
    index = next((i for i, p in enumerate(ledger.peaks) if p.phase == phase), None)
    sizes: dict[_Key, int] = defaultdict(int)
    places: dict[_Key, str | None] = {}
    if index is None:
        return sizes, places
    for row in ledger.rows:
        modules = unfold(row.module)
        file = (row.place or "").rpartition(":")[0]
        for module in modules:
            key = (row.category, module, file, row.function, row.text)
            sizes[key] += row.bytes[index] // len(modules)
            places.setdefault(key, row.place)
    return sizes, places


_LEVELS: tuple[Callable[[_Key], Any], ...] = (
    lambda key: (key[0], key[1], key[4]),  # the function or the file was renamed
    lambda key: (key[0], key[1]),  # the line was rewritten
    lambda key: (key[0], key[2], key[3], key[4]),  # the module was renamed
    lambda key: (key[0], key[4]) if key[4] else key,
)


def _net(deltas: dict[_Key, int], group: Callable[[_Key], Any]) -> None:
    """Set what became less against what grew within each group, the closest sizes first."""
    groups: dict[Any, list[_Key]] = defaultdict(list)
    for key, delta in deltas.items():
        if delta:
            groups[group(key)].append(key)
    for keys in groups.values():
        _cancel(deltas, keys)
        less = sorted((k for k in keys if deltas[k] < 0), key=lambda k: (deltas[k], k))
        for key in less:
            grown = [k for k in keys if deltas[k] > 0]
            for other in sorted(grown, key=lambda k: (abs(deltas[k] + deltas[key]), k)):
                taken = min(deltas[other], -deltas[key])
                deltas[other] -= taken
                deltas[key] += taken


def _net_equal(deltas: dict[_Key, int], group: Callable[[_Key], Any]) -> None:
    """Set off only what is equal to the byte."""
    groups: dict[Any, list[_Key]] = defaultdict(list)
    for key, delta in deltas.items():
        if delta:
            groups[group(key)].append(key)
    for keys in groups.values():
        _cancel(deltas, keys)


def _cancel(deltas: dict[_Key, int], keys: Sequence[_Key]) -> None:
    grown: dict[int, list[_Key]] = defaultdict(list)
    for key in sorted(keys, reverse=True):
        if deltas[key] > 0:
            grown[deltas[key]].append(key)
    for key in sorted(keys):
        if deltas[key] < 0 and grown[-deltas[key]]:
            deltas[grown[-deltas[key]].pop()] = 0
            deltas[key] = 0


def _blame_parameters(deltas: dict[_Key, int]) -> None:
    """Gradients and optimizer state of parameters that were added are those parameters' fault."""
    made: dict[str, _Key] = {}
    for key, delta in deltas.items():
        if key[0] == "parameters" and delta > 0:
            made.setdefault(key[1], key)
    for key in list(deltas):
        cause = made.get(key[1])
        if cause and key[0] in ("gradients", "optimizer state") and deltas[key] > 0:
            blamed = (key[0], *cause[1:])
            if blamed != key:
                deltas[blamed] = deltas.get(blamed, 0) + deltas.pop(key)


def _told(deltas: dict[_Key, int], places: dict[_Key, str | None]) -> list[Change]:
    """Make one change of what happened alike in numbered modules, and sort them."""
    by_rest = {key[1:]: place for key, place in places.items()}
    alike: dict[Any, list[str]] = defaultdict(list)
    for key, delta in deltas.items():
        if delta:
            place = places.get(key, by_rest.get(key[1:]))
            alike[(key[0], place, key[4], delta)].append(key[1])
    found = [
        Change(
            category=category,
            module=module,
            place=place,
            text=text,
            bytes=delta * len(members),
        )
        for (category, place, text, delta), modules in alike.items()
        for module, members in fold(modules)
    ]
    return sorted(
        found, key=lambda c: (-c.bytes, c.category, natural(c.module), c.place or "", c.text)
    )
