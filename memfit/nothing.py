"""The record of a probe in which nothing fits: an answer of none, and everything it stands on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memfit.records import (
    SCHEMA_VERSION,
    Environment,
    ProbeSpec,
    Source,
    TrialResult,
    WorkloadInfo,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NothingFound:
    """Not even the smallest microbatch fits."""

    schema: Literal["memfit.nothing-fits"] = "memfit.nothing-fits"
    schema_version: int = SCHEMA_VERSION
    created: str
    """Moment of the answer, ISO 8601 in UTC."""
    command: str
    """The command that made this record."""
    workload: WorkloadInfo
    spec: ProbeSpec
    source: Source
    limits: tuple[str, ...]
    """What the figures leave out, one sentence each."""
    message: str
    """What does not fit, and what it needs."""
    hint: str | None
    """What would help."""
    details: str | None
    """What one microbatch is made of, as a small table."""
    trials: tuple[TrialResult, ...]
    other_trials: tuple[TrialResult, ...] = ()
    """Those with the allocator's own settings, where `trials` went on with another one."""
    diagnosis: TrialResult | None = None
    """The smallest microbatch without a limit; None where that was not tried."""
    environment: Environment
    wall_s: float = 0.0

    @property
    def answer_trial(self) -> None:
        """No trial is the answer's."""
        return

    @property
    def every_trial(self) -> tuple[TrialResult, ...]:
        """All trials in the order in which they ran."""
        last = () if self.diagnosis is None else (self.diagnosis,)
        return (*self.other_trials, *self.trials, *last)
