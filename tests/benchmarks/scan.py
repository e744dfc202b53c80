"""The truth that answers are held against: sizes run one by one, with no search in between.

Every size is a full-group trial in a fresh process, run as a probe runs it. A second trial on a
card with a terabyte tells what the size needs when nothing limits it; sizes whose need alone is
above the limit cannot fit in any layout, and after a few of them in a row a scan stops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memfit.devices.select import DEFAULT_HEADROOM, choose, describe
from memfit.probe import worker_environment
from memfit.records import (
    DeviceKind,
    DeviceSpec,
    Precision,
    ProbeResult,
    Split,
    TrialResult,
    TrialSpec,
    Verdict,
    WorkloadInfo,
)
from memfit.trial.protocol import Mark
from memfit.trial.runner import TrialRunner
from memfit.units import TIB

UNLIMITED = TIB
"""Size of the virtual card on which a need without a limit is measured."""
EXAMPLES = Path("examples")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One question: a workload on a virtual card, with everything that changes the answer."""

    target: str = str(EXAMPLES / "gpt2.py")
    card: str = "rtx-4090"
    precision: Precision = Precision.BF16
    headroom: str = DEFAULT_HEADROOM
    memory_limit: str | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Say it in one line."""
        words = [Path(self.target).stem, self.card, self.precision.value]
        words.append(f"{self.headroom} headroom")
        if self.memory_limit is not None:
            words.append(f"limit {self.memory_limit}")
        words.extend(f"{name}={value}" for name, value in self.parameters.items())
        return ", ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one size showed."""

    microbatch: int
    accumulation_steps: int
    verdict: Verdict
    peak_allocated_bytes: int | None
    peak_bytes: int | None
    """Peak of the device: reserved memory and what lies outside the allocator."""
    need_bytes: int | None
    """What the size needs in whatever layout: for one that failed, measured on a card without a
    limit; None where it does not run there either."""
    text: str
    wall_s: float

    @property
    def fits(self) -> bool:
        """Whether full groups ran."""
        return self.verdict is Verdict.FITS


class Scanner:
    """Runs single trials of one setting."""

    def __init__(self, setting: Setting, runner: TrialRunner, device: DeviceSpec) -> None:
        """Use an open runner."""
        self.setting = setting
        self.device = device
        self.workload: WorkloadInfo | None = None
        self._runner = runner
        self._trials = 0

    def trial(self, split: Split, *, limited: bool = True, groups: int = 2) -> TrialResult:
        """Run full groups of one split; without the limit, on a card of a terabyte."""
        self._trials += 1
        device = self.device
        if not limited:
            device = dataclasses.replace(device, limit_bytes=UNLIMITED)
        spec = TrialSpec(
            index=self._trials,
            purpose="confirm",
            split=split,
            group_microbatches=split.accumulation_steps,
            groups=groups,
            precision=self.setting.precision,
            device=device,
        )
        return self._runner.run(spec)

    def row(self, split: Split) -> Row:
        """Try one size, and where it fails measure what it needs."""
        result = self.trial(split)
        if result.verdict is not Verdict.FITS and not result.verdict.limits_size:
            raise SystemExit(
                f"microbatch {split.microbatch}: {result.verdict}: {result.evidence.text}\n"
                f"{result.evidence.traceback or ''}"
            )
        need_bytes = result.demand_bytes
        if result.verdict is not Verdict.FITS:
            # Needs do not change with the length of the group from its second microbatch on.
            short = dataclasses.replace(
                split, accumulation_steps=min(split.accumulation_steps, 2), logical_batch=None
            )
            unlimited = self.trial(short, limited=False)
            need_bytes = unlimited.demand_bytes if unlimited.verdict is Verdict.FITS else None
        return Row(
            microbatch=split.microbatch,
            accumulation_steps=split.accumulation_steps,
            verdict=result.verdict,
            peak_allocated_bytes=result.peak_allocated_bytes,
            peak_bytes=result.peak_bytes,
            need_bytes=need_bytes,
            text=result.evidence.text,
            wall_s=result.wall_s,
        )

    def scan(self, splits: Iterable[Split], *, beyond: int) -> Iterator[Row]:
        """Try sizes in ascending order until `beyond` in a row need more than the limit."""
        above = 0
        for split in splits:
            row = self.row(split)
            yield row
            over = row.need_bytes is not None and row.need_bytes > self.device.limit_bytes
            above = above + 1 if over and not row.fits else 0
            if above >= beyond:
                return


@contextmanager
def scanner(setting: Setting) -> Iterator[Scanner]:
    """Open the trials of a setting, with a probe's own device, limit and worker environment."""
    choice = choose(setting.card)
    if choice.kind is not DeviceKind.VIRTUAL:
        raise SystemExit(f"{setting.card} is no virtual card: see `memfit gpus`")
    device = describe(choice, memory_limit=setting.memory_limit, headroom=setting.headroom)
    with TrialRunner(
        setting.target, setting.parameters, environment=worker_environment(choice, device)
    ) as runner:
        ready = runner.open()
        opened = Scanner(setting, runner, device)
        opened.workload = ready.workload
        yield opened


def holes(rows: Iterable[Row]) -> list[int]:
    """Return the sizes that failed below one that fits."""
    seen = list(rows)
    largest = max((row.microbatch for row in seen if row.fits), default=0)
    return [row.microbatch for row in seen if not row.fits and row.microbatch < largest]


class Deaf:
    """A probe's listener that listens to nothing."""

    def chosen(self, *_: Any) -> None:
        """Ignore."""

    def importing(self, *_: Any) -> None:
        """Ignore."""

    def loaded(self, *_: Any) -> None:
        """Ignore."""

    def resumed(self, *_: Any) -> None:
        """Ignore."""

    def asked(self, *_: Any) -> None:
        """Ignore."""

    def progressed(self, mark: Mark) -> None:
        """Ignore."""

    def finished(self, trial: TrialResult) -> None:
        """Ignore."""

    def decided(self, result: ProbeResult) -> None:
        """Ignore."""

    def warned(self, sentence: str) -> None:
        """Ignore."""
