"""Records of a verification: whether accumulation reproduces the logical batch, and why not.

A `Verification` is a document of its own, and is kept in the record of a probe of the same
workload. Relative errors are norms: `|a - b| / sum of the norms of what a and b are sums of`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class Severity(StrEnum):
    """What a finding means for the gradient of the logical batch."""

    ERROR = "error"
    """Something else is trained: the loss, the loop or the workload is to be changed."""
    WARNING = "warning"
    """By the nature of a layer or of the check, equality does not hold or cannot be shown."""
    REMARK = "remark"
    """Nothing is wrong; it is worth knowing."""


class Outcome(StrEnum):
    """The answer of a verification."""

    EQUAL = "equal"
    """Within the tolerance of the arithmetic; never bit for bit."""
    DIFFERENT = "different"
    UNKNOWN = "unknown"
    """Nothing was found wrong, but equality could not be shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A line of the user's own file."""

    file: str
    line: int
    code: str
    """The line itself, without its indentation."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was found, under its code in the catalogue."""

    code: str
    """Such as `MF203`; `memfit verify --explain MF203` prints its page."""
    severity: Severity
    title: str
    evidence: str
    """What was seen, with its numbers, in sentences."""
    remedy: str
    place: Place | None = None
    accepted: bool = False
    """Whether the user has accepted it beforehand, so that it does not decide the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One accumulated group beside the physical batch, from the same parameters and examples."""

    sizes: tuple[int, ...]
    """Examples of each microbatch, in order."""
    dtype: str
    """Such as `float64`."""
    held: tuple[Literal["draws", "statistics"], ...]
    """What was held still on both sides: random draws, statistics of the batch."""
    error: float
    """Relative error of the whole gradient."""
    tolerance: float
    """Largest error of one parameter's gradient that rounding explains."""
    worst_parameter: str
    """The parameter with the largest error."""
    worst_error: float
    """Its error, relative to the whole gradient; compared with `tolerance`."""
    step_error: float | None = None
    """Relative difference of the parameters after one optimizer step; None where none was made."""
    step_tolerance: float | None = None
    visible: float | None = None
    """Smallest relative error in the weight of any one microbatch that would have been found,
    whatever rounding did; None where no microbatch has a gradient."""

    @property
    def equal(self) -> bool:
        """Whether rounding explains every difference."""
        return self.worst_error <= self.tolerance and (
            self.step_error is None
            or self.step_tolerance is None
            or self.step_error <= self.step_tolerance
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossNature:
    """What the loss is, as its gradients show."""

    kind: Literal["mean", "sum", "scaled", "coupled", "unknown"]
    """`scaled` is a mean times a constant; `coupled` is no sum of terms of single examples."""
    over: Literal["examples", "elements"] | None
    weights: tuple[float, ...] = ()
    """The share of each example in the loss of the whole batch."""
    counts: tuple[int, ...] = ()
    """The elements of each example as `count()` says; empty where it says nothing."""
    factor: float | None = None
    """Sum of the weights: 1 for a mean, the number of elements for a sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSeen:
    """One accumulation group of the user's own loop."""

    microbatches: int
    elements: tuple[int | None, ...]
    """Elements that the loss of each microbatch is over; None where the loss could not be read."""
    factors: tuple[float | None, ...]
    """What each microbatch's mean loss was multiplied by."""
    error: float | None
    """Relative error of the gradient that the optimizer got, against the mean over all elements
    of the group; None where it was not worked out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSeen:
    """What the user's own loop did while it was watched."""

    groups: tuple[GroupSeen, ...]
    """The first hundred."""
    group_count: int
    backward_passes: int
    steps_attempted: int
    steps_applied: int
    steps_skipped: int
    """Those that a gradient scaler skipped."""
    schedule_steps: int
    ended: Literal["by itself", "time", "groups"]
    """How the watching ended."""
    errors_over: Literal["examples", "elements"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCheck:
    """Gradients of real data-parallel processes beside the physical batch."""

    replicas: int
    counts: tuple[int, ...]
    """Elements of each replica's share."""
    error: float
    """With the factor `D`."""
    tolerance: float
    ratio_without: float
    """Norm of the gradient without the factor, in terms of the right one."""
    error_mean_of_means: float
    """When each replica takes the mean over its own elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The answer of `memfit verify`, and everything that it stands on."""

    schema: Literal["memfit.verify"] = "memfit.verify"
    schema_version: int = 1
    created: str
    """Moment of the answer, ISO 8601 in UTC."""
    command: str
    memfit: str
    torch: str
    target: str
    workload: str
    sha256: str | None
    """Digest of the user's file, and of the user's own modules that it imports."""
    parameters: dict[str, bool | int | float | str | None]
    """All parameters of the workload with the values used."""
    device: Literal["cpu", "cuda"]
    outcome: Outcome
    logical_batch: int | None
    """Examples of the physical batch; None where only a loop was watched."""
    findings: tuple[Finding, ...]
    comparisons: tuple[Comparison, ...] = ()
    loss: LossNature | None = None
    loop: LoopSeen | None = None
    replicas: ReplicaCheck | None = None
    notes: tuple[str, ...] = ()
    """What was not checked, and why, one sentence each."""
    seed: int = 0
    wall_s: float = 0.0
