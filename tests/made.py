"""Whole probes over trials that are made up: what each comes to stands in a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from memfit import probe as probing
from memfit.probe import ProbeRequest, run_probe
from memfit.records import (
    Environment,
    Evidence,
    TrialResult,
    TrialSpec,
    Verdict,
    WorkloadInfo,
)
from memfit.trial.protocol import Ready
from memfit.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import pytest

    from memfit.records import ProbeResult

FITS = (Verdict.FITS, False)
DOUBTFUL = (Verdict.OOM, True)
OOM = (Verdict.OOM, False)
HOST = (Verdict.HOST_OOM, False)
SIZE = (Verdict.SIZE_LIMIT, False)
ERROR = (Verdict.ERROR, False)
Answer = tuple[Verdict, bool]


class Silent:
    """Listens to everything."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class Runner:
    """Answers trials from a table: for each microbatch, what its runs come to, one by one."""

    def __init__(
        self,
        table: Mapping[int, list[Answer]],
        interrupt_at: int | None = None,
        *,
        tuned: Mapping[int, list[Answer]] | None = None,
    ) -> None:
        self.table = {m: list(answers) for m, answers in table.items()}
        self.tuned = self.table if tuned is None else {m: list(a) for m, a in tuned.items()}
        self.interrupt_at = interrupt_at
        self.asked: list[int] = []

    def __call__(self, *_: object, **__: object) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass

    def open(self) -> Ready:
        return Ready(
            workload=WorkloadInfo(
                name="Made",
                description="",
                target="made:Made",
                path="made.py",
                sha256="0" * 64,
                parameters={},
            ),
            environment=Environment(
                memfit="0",
                python="3",
                platform="Linux",
                torch="2",
                cuda=None,
                cudnn=None,
                driver=None,
                variables={},
            ),
            fork_refusal=None,
        )

    def run(self, spec: TrialSpec) -> TrialResult:
        self.asked.append(spec.split.microbatch)
        if len(self.asked) == self.interrupt_at:
            raise KeyboardInterrupt
        table = self.table if spec.allocator is None else self.tuned
        answers = table.get(spec.split.microbatch, [FITS])
        verdict, doubtful = answers.pop(0) if len(answers) > 1 else answers[0]
        fits = verdict is Verdict.FITS
        return TrialResult(
            spec=spec,
            verdict=verdict,
            evidence=Evidence(
                rule="all groups ran" if fits else "cuDNN internal",
                text="RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
                phase=None if fits else "forward",
                group=None if fits else 1,
                microbatch_index=None if fits else 1,
                doubtful=doubtful,
                output_tail=() if fits else ("its last line",),
            ),
            demand_bytes=spec.split.microbatch * 2**20,
            groups_run=2,
        )


def probe(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, out: Path, **changes: Any
) -> ProbeResult:
    """Ask for the largest microbatch of a logical batch of 8 on a CPU with 1 GiB."""
    monkeypatch.setattr(probing, "TrialRunner", runner)
    question: dict[str, Any] = {
        "target": "made:Made",
        "device": "cpu",
        "memory_limit": f"{GIB}B",
        "headroom": "0",
        "logical_batch": 8,
        "out": out,
    }
    result, _ = run_probe(ProbeRequest(**{**question, **changes}), Silent())
    return result
