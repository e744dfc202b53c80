"""The question of a probe: what the user asked for, checked, and put into a device's terms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from memfit import virtual
from memfit.allocator import AllocatorChoice
from memfit.devices.select import Choice, describe
from memfit.errors import CannotJudge, UsageError
from memfit.records import (
    DeviceKind,
    DeviceSpec,
    Policy,
    Precision,
    ProbeResult,
    TrialResult,
    TrialSpec,
    WorkloadInfo,
)
from memfit.trial.protocol import Mark
from memfit.trial.runner import TrialRunner
from memfit.workload import split_target

MOST_TRIALS = {DeviceKind.CUDA: 40, DeviceKind.CPU: 40, DeviceKind.VIRTUAL: 400}
"""Trials that a probe may spend unless it is told otherwise. With a fragmented allocator, dozens of
sizes above the answer have to be tried; where a trial takes milliseconds, all of them are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """The question in the user's words; what is wrong with them ends in a UsageError."""

    target: str
    parameters: Mapping[str, str] = field(default_factory=dict)
    device: str = "auto"
    memory: str | None = None
    """Total memory of a virtual GPU, in the place of its card's."""
    memory_limit: str | None = None
    headroom: str = "2%"
    logical_batch: int | None = None
    replicas: int = 1
    policy: Policy = Policy.EXACT
    precision: Precision = Precision.FP32
    clip_norm: float | None = None
    group_microbatches: int = 2
    allocator: AllocatorChoice = AllocatorChoice.AUTO
    resumed: bool = False
    """Whether the optimizer's state is there from the start, as after a checkpoint."""
    evaluate: bool = False
    """Whether an evaluation pass follows, which never changes the answer."""
    groups: int = 3
    """Groups of a trial that runs full ones."""
    min_microbatch: int = 1
    max_microbatch: int | None = None
    max_trials: int | None = None
    """None: `MOST_TRIALS` of the device's kind."""
    time_budget_s: float | None = None
    trial_timeout_s: float | None = 1800.0
    seed: int = 0
    data_dependent: str = "worst"
    by_block: bool = True
    """Whether the answer is run once more, to see allocation by allocation what its peak is made
    of; no part of the question."""
    side_by_side: bool = True
    """Whether two trials may run at once on a virtual card; no part of the question."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for the trials' processes, beside those of the device."""
    out: Path | None = None
    force: bool = False
    command: str = ""


class ProbeListener(Protocol):
    """Told what a probe does while it runs."""

    def chosen(self, sentence: str) -> None:
        """Tell which device was chosen where the user left it open."""

    def importing(self, target: str) -> None:
        """Tell that the question is sound, and the user's code is being imported."""

    def loaded(self, workload: WorkloadInfo, device: DeviceSpec) -> None:
        """Tell that the user's code is imported and the search begins."""

    def resumed(self, trials: int) -> None:
        """Tell that finished trials of an earlier run are used."""

    def asked(self, spec: TrialSpec) -> None:
        """Tell that a trial begins; `spec.reason` says why at this size."""

    def progressed(self, mark: Mark) -> None:
        """Tell where in a trial the worker is."""

    def finished(self, trial: TrialResult) -> None:
        """Tell how a trial ended."""

    def decided(self, result: ProbeResult) -> None:
        """Tell the answer, before what only tells more of it (its ledger, for one) is known."""

    def warned(self, sentence: str) -> None:
        """Tell what went wrong without ending the probe."""


def check_request(request: ProbeRequest) -> None:
    """Refuse a question whose words make no sense; raises UsageError."""
    split_target(request.target)
    share_of(request.data_dependent)
    for name, value, least in (
        ("--group-microbatches", request.group_microbatches, 2),
        ("--groups", request.groups, 2),
        ("--max-trials", request.max_trials, 1),
    ):
        if value is not None and value < least:
            raise UsageError(f"{name} is {value}; it must be at least {least}")
    for name, amount in (
        ("--clip", request.clip_norm),
        ("--trial-timeout", request.trial_timeout_s),
        ("--time-budget", request.time_budget_s),
    ):
        if amount is not None and not 0 < amount < math.inf:
            raise UsageError(f"{name} is {amount}; it must be above zero")


def share_of(words: str) -> float:
    """Read what `--data-dependent` says: `worst`, `none` or a share between 0 and 1."""
    if words in ("worst", "none"):
        return float(words == "worst")
    try:
        share = float(words)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise UsageError(
            f"--data-dependent is {words}; it is worst, none, or a share between 0 and 1"
        )
    return share


def describe_device(
    request: ProbeRequest, choice: Choice, *, gpu: tuple[str, int, str] | None
) -> DeviceSpec:
    """Put the device that was asked for, and how much of it may be used, into a record."""
    return describe(
        choice,
        memory_limit=request.memory_limit,
        headroom=request.headroom,
        memory=request.memory,
        gpu=gpu,
    )


def ask_cuda(runner: TrialRunner) -> tuple[str, int, str]:
    """Return name, total bytes and compute capability of the real GPU."""
    gpu = runner.describe_gpu()
    if gpu.failure is not None:
        raise CannotJudge(f"CUDA has no device here: {gpu.failure}", hint="see `memfit doctor`")
    if gpu.virtual:
        raise CannotJudge(
            "the CUDA device here is a virtual GPU that was started from outside",
            hint="name the card with --device instead",
        )
    return gpu.name, gpu.total_bytes, gpu.compute_capability


def worker_environment(choice: Choice, device: DeviceSpec | None) -> dict[str, str]:
    """Return the variables that make a process a worker on the chosen device."""
    if choice.card is None:
        # A trial on the CPU must not find a GPU, and on a GPU must see only its own.
        return {"CUDA_VISIBLE_DEVICES": ""} if choice.kind is DeviceKind.CPU else {}
    assert device is not None
    return virtual.prepare(choice.card, total_bytes=device.limit_bytes)
