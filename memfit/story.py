"""The search told trial by trial: what each one showed, and what it changed. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.outcomes import repetitions, unrepeated
from memfit.records import Certificate, Chapter, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memfit.records import TrialResult


def tell(trials: Iterable[TrialResult], certificate: Certificate) -> tuple[Chapter, ...]:
    """Tell a search in the order of its trials."""
    ordered = sorted(trials, key=lambda t: t.spec.index)
    story = _Story(certificate, ordered)
    return tuple(
        Chapter(
            trial=trial.spec.index,
            microbatch=trial.spec.split.microbatch,
            verdict=trial.verdict,
            reason=trial.spec.reason,
            evidence=trial.evidence.text,
            change=story.change(trial),
        )
        for trial in ordered
    )


class _Story:
    """What is known so far."""

    def __init__(self, certificate: Certificate, trials: list[TrialResult]) -> None:
        self._certificate = certificate
        self._closed_by = certificate.closed_by.trial if certificate.closed_by else None
        self._trials = {trial.spec.index: trial for trial in trials}
        self._repeated_as = repetitions(trials)
        self._floor: int | None = None
        self._ceiling: int | None = None

    def change(self, trial: TrialResult) -> str:
        """Say what a trial changed, and remember it."""
        if trial.spec.purpose == "diagnose":
            return "A diagnosis without a limit: it says what would be needed and is never a fit."
        again = self._repeated_as.get(trial.spec.index)
        if again is not None:
            return f"Doubtful, so it does not count: repeated as trial {again}."
        if unrepeated([trial]) is not None:
            return "Doubtful, so it does not count: no trial was left to repeat it."
        said = self._change(trial)
        m = trial.spec.split.microbatch
        if trial.verdict is Verdict.FITS:
            self._floor = m if self._floor is None else max(self._floor, m)
        elif self._closes(trial):
            self._ceiling = m if self._ceiling is None else min(self._ceiling, m)
        return self._repetition_words(trial) + said

    def _repetition_words(self, trial: TrialResult) -> str:
        first = self._trials.get(trial.spec.repeats or 0)
        if first is None:
            return ""
        if first.verdict is trial.verdict:
            return f"Agrees with trial {first.spec.index}, which it repeats. "
        return f"Disagrees with trial {first.spec.index}, which it repeats; this one counts. "

    def _closes(self, trial: TrialResult) -> bool:
        """Whether nothing above a trial's size had to be tried after it."""
        return (
            _no_layout_helps(trial)
            or trial.verdict in (Verdict.HOST_OOM, Verdict.SIZE_LIMIT)
            or trial.spec.index == self._closed_by
        )

    def _change(self, trial: TrialResult) -> str:
        if trial.verdict is Verdict.FITS:
            return self._change_of_fit(trial)
        if trial.verdict.limits_size:
            return self._change_of_limit(trial)
        return "It says nothing about the size."

    def _change_of_fit(self, trial: TrialResult) -> str:
        m, floor = trial.spec.split.microbatch, self._floor
        if trial.spec.index == self._certificate.trial:
            return f"Certifies {m}: full groups ran in a fresh process. This is the answer."
        if floor is None:
            return f"The answer is at least {m}, if full groups agree."
        if m > floor:
            return f"Raises the floor from {floor} to {m}."
        return f"{m} fits too; the floor stays at {floor}."

    def _change_of_limit(self, trial: TrialResult) -> str:
        m = trial.spec.split.microbatch
        if trial.verdict is Verdict.THRASH:
            return f"{m} is out: it runs only by flushing the allocator's cache again and again."
        if not self._closes(trial):
            return f"{m} is out as the allocator laid it out; larger sizes stay open."
        if self._ceiling is not None and m >= self._ceiling:
            return f"Agrees with what {self._ceiling} showed."
        return f"Closes {m} and everything above it: {_why_closed(trial)}."


def _no_layout_helps(trial: TrialResult) -> bool:
    """Whether the demand alone exceeds the limit."""
    need = trial.demand_bytes
    return trial.verdict.limits_size and need is not None and need > trial.spec.device.limit_bytes


def _why_closed(trial: TrialResult) -> str:
    if trial.verdict is Verdict.SIZE_LIMIT:
        return "a kernel's index limit refuses it, whatever the memory"
    if _no_layout_helps(trial):
        return "its demand alone exceeds the limit"
    if trial.verdict is Verdict.HOST_OOM:
        return "the host's memory refuses it"
    if trial.evidence.phase in ("imported", "build"):
        return "the model alone does not fit"
    return "it ran out of memory, and growth puts its demand above the limit"
