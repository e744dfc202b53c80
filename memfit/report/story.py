"""The search told trial by trial: what each one changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memfit.records import Verdict

if TYPE_CHECKING:
    from memfit.records import ProbeResult, TrialResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """One trial in the story of the search."""

    trial: TrialResult
    change: str
    """What the trial changed, in one sentence."""


def story(result: ProbeResult) -> tuple[Chapter, ...]:
    """Tell the search in the order of its trials."""
    chapters: list[Chapter] = []
    floor: int | None = None
    ceiling: int | None = None
    for trial in sorted(result.trials, key=lambda t: t.spec.index):
        change = _change(result, trial, floor, ceiling)
        chapters.append(Chapter(trial=trial, change=change))
        m = trial.spec.split.microbatch
        if trial.spec.purpose == "diagnose":
            continue
        if trial.verdict is Verdict.FITS:
            floor = m if floor is None else max(floor, m)
        elif _no_layout_helps(trial):
            ceiling = m if ceiling is None else min(ceiling, m)
    return tuple(chapters)


def _no_layout_helps(trial: TrialResult) -> bool:
    """Whether the demand alone exceeds the limit."""
    need = trial.demand_bytes
    return trial.verdict.limits_size and need is not None and need > trial.spec.device.limit_bytes


def _change(result: ProbeResult, trial: TrialResult, floor: int | None, ceiling: int | None) -> str:
    if trial.spec.purpose == "diagnose":
        return "A diagnosis without a limit: it says what would be needed and is never a fit."
    if trial.verdict is Verdict.FITS:
        return _change_of_fit(result, trial, floor)
    if trial.verdict.limits_size:
        return _change_of_limit(trial, ceiling)
    return "It says nothing about the size."


def _change_of_fit(result: ProbeResult, trial: TrialResult, floor: int | None) -> str:
    m = trial.spec.split.microbatch
    if trial.spec.index == result.certificate.trial:
        return f"Certifies {m}: full groups ran in a fresh process. This is the answer."
    if floor is None:
        return f"The answer is at least {m}, if full groups agree."
    if m > floor:
        return f"Raises the floor from {floor} to {m}."
    return f"{m} fits too; the floor stays at {floor}."


def _change_of_limit(trial: TrialResult, ceiling: int | None) -> str:
    m = trial.spec.split.microbatch
    if trial.verdict is Verdict.THRASH:
        return f"{m} is out: it runs only by flushing the allocator's cache again and again."
    if trial.verdict is Verdict.SIZE_LIMIT:
        return f"{m} is out by a kernel's index limit, whatever the memory."
    if not _no_layout_helps(trial):
        return f"{m} is out as the allocator laid it out; larger sizes stay open."
    if ceiling is not None and m >= ceiling:
        return f"Agrees with what {ceiling} showed."
    return f"Closes {m} and everything above it: its demand alone exceeds the limit."
