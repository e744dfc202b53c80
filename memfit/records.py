"""Frozen records of everything that is stored, and their JSON.

Integers are bytes or counts, floats are seconds unless the name says otherwise, and `None` means
not measured, never zero. A stored document carries `schema` (its name) and `schema_version`;
readers ignore keys they do not know and refuse a newer version.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import msgspec

from memfit.errors import UsageError
from memfit.verification import Verification

SCHEMA_VERSION = 1

Parameter = bool | int | float | str | None
"""A value of one workload parameter."""


class Source(StrEnum):
    """Where numbers come from."""

    MEASURED = "measured"
    """A real device ran everything."""
    VIRTUAL = "virtual"
    """PyTorch and its allocator ran over a stand-in driver; kernels were not executed."""


class DeviceKind(StrEnum):
    """What kind of device a trial runs on."""

    CUDA = "cuda"
    VIRTUAL = "virtual"
    CPU = "cpu"


class Precision(StrEnum):
    """Arithmetic of forward: plain float32, or autocast to a 16-bit type."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class Policy(StrEnum):
    """How the logical batch is split into microbatches."""

    EXACT = "exact"
    """`A * m * D = B` with equal microbatches."""
    RAGGED = "ragged"
    """`A = ceil(B / D / m)` microbatches, as equal as possible."""


class Verdict(StrEnum):
    """What a trial showed."""

    FITS = "fits"
    OOM = "oom"
    """The device's memory ran out."""
    HOST_OOM = "host_oom"
    """Host memory ran out, or the limit on it was passed."""
    THRASH = "thrash"
    """It runs only because the allocator keeps flushing its cache."""
    SIZE_LIMIT = "size_limit"
    """A kernel's index limit, not memory."""
    TIMEOUT = "timeout"
    ERROR = "error"
    """The user's code failed, or did not train."""
    CRASH = "crash"
    """A signal ended the process."""

    @property
    def limits_size(self) -> bool:
        """Whether this verdict says something about the size rather than about the code."""
        return self in (Verdict.OOM, Verdict.HOST_OOM, Verdict.THRASH, Verdict.SIZE_LIMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """The device that trials run on, and how much of it they may use."""

    kind: DeviceKind
    slug: str
    """Short name for folders and commands: `rtx-4090`, `cuda`, `cpu`."""
    name: str
    """Full name: `NVIDIA GeForce RTX 4090`; a virtual one is told by `kind`."""
    total_bytes: int
    """Total memory, as the device's driver reports it."""
    limit_bytes: int
    """The most that may be used on the device, everything included."""
    memory_limit_bytes: int | None = None
    """The limit that was asked for, or None."""
    headroom_bytes: int = 0
    """Bytes of the device kept free; already taken off `limit_bytes`."""
    context_bytes: int | None = None
    """Memory charged for the CUDA context on a virtual GPU; None where it is measured."""
    context_source: str | None = None
    """Where `context_bytes` comes from."""
    compute_capability: str | None = None
    """Such as `8.9`; None on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One way to run a logical batch: `accumulation_steps` microbatches on each replica."""

    microbatch: int
    """The largest microbatch of a group, in examples."""
    accumulation_steps: int
    """Microbatches whose gradients one optimizer step consumes."""
    replicas: int = 1
    logical_batch: int | None = None
    """Examples that one optimizer step consumes over all replicas; None when none was asked for,
    and a group is then `accumulation_steps` equal microbatches."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Examples of each microbatch of one replica's group, the larger ones first."""
        if self.logical_batch is None:
            return (self.microbatch,) * self.accumulation_steps
        base, larger = divmod(self.logical_batch // self.replicas, self.accumulation_steps)
        return (base + 1,) * larger + (base,) * (self.accumulation_steps - larger)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSpec:
    """What one trial runs."""

    index: int
    """Number of the trial in its probe, from 1."""
    purpose: Literal["search", "confirm", "diagnose", "trace", "evaluate"]
    """`confirm` runs full groups. The others never count as a fit: `diagnose` asks what microbatch
    1 would need on a virtual card without a limit, `trace` where memory comes from that grows from
    group to group, and `evaluate` what an evaluation pass takes."""
    reason: str = ""
    """Why this size was tried, in one sentence without a full stop."""
    repeats: int | None = None
    """The trial that this one repeats because its verdict was doubtful; this one then counts."""
    split: Split
    group_microbatches: int
    """Microbatches run in each group: all of them, or fewer in a search trial."""
    groups: int = 2
    """Groups to run at the least; the first creates optimizer state, the next run with it."""
    precision: Precision = Precision.FP32
    clip_norm: float | None = None
    """Norm to which the whole gradient is clipped once per group; None for no clipping."""
    device: DeviceSpec
    seed: int = 0
    timeout_s: float | None = None
    record_timeline: bool = False
    resumed: bool = False
    """Whether the optimizer's state is there before the first group."""
    evaluate: bool = False
    """Whether an evaluation pass follows the groups; its peak is told apart."""
    allocator: str | None = None
    """Settings that are added to those of the environment, such as `expandable_segments:True`."""
    record_ledger: bool = False
    """Whether every allocation is noted with its place; such a trial is never the measured one."""
    data_dependent: float = 1.0
    """Share of the elements that is taken to count where a size depends on values that a virtual
    GPU cannot know: 1 is the most memory, 0 the least."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Examples of each microbatch that a group of this trial runs.

        A shortened group of uneven microbatches keeps one of each size.
        """
        full = self.split.sizes
        if self.group_microbatches >= len(full):
            return full
        return (*full[: self.group_microbatches - 1], full[-1])

    @property
    def runs_full_groups(self) -> bool:
        """Whether every microbatch of the group is run."""
        return self.group_microbatches >= self.split.accumulation_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMemory:
    """Memory of one device in one phase, over the first group or over all later ones."""

    phase: Literal["build", "forward", "backward", "optimizer_step"]
    groups: Literal["none", "first", "later"]
    """Which groups the figures are over; `none` for the building of model and optimizer."""
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    device_used_bytes: int | None
    """What the driver reports for the whole device at the end of the phase; on a CPU, the peak
    resident memory of the trial's process."""
    outside_allocator_bytes: int | None
    """Device memory in use that is neither in the allocator nor was there before the trial."""
    alloc_retries: int | None
    """Times the allocator flushed its cache and tried again, in this phase."""
    seconds: float
    """Host time; kernels of a GPU may run on after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of one device of one rank, over the whole trial."""

    rank: int
    device: int
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    device_used_bytes: int | None
    outside_allocator_bytes: int | None
    used_before_bytes: int | None
    """Device memory in use before the trial touched the device."""
    alloc_retries: int | None
    alloc_retries_last_group: int | None
    """Retries within the last group; above zero is `thrash`."""
    inactive_split_bytes: int | None
    """Free bytes in split blocks at the end: fragmentation."""
    device_used_source: Literal["nvml", "mem_get_info", "rss"] | None
    phases: tuple[PhaseMemory, ...] = ()

    @property
    def peak_bytes(self) -> int | None:
        """The figure that is compared with the limit.

        On a GPU, reserved memory plus what lies outside the allocator; on a CPU, resident memory.
        """
        if self.peak_reserved_bytes is None:
            return self.device_used_bytes
        return self.peak_reserved_bytes + (self.outside_allocator_bytes or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """What the peak is made of, in allocated bytes of one device; the parts sum to the peak.

    From a ledger, every block is in its own part. Without one, parameters, buffers, gradients and
    optimizer state are sums over the tensors themselves, each rounded up to the allocator's block
    of 512 bytes, and `activations_bytes` is what remains of the peak.
    """

    phase: str
    """The phase in which the peak was reached."""
    parameters_bytes: int
    buffers_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int
    activations_bytes: int
    """What lives from forward for backward. Without a ledger it is the rest: temporaries,
    workspaces and the microbatch too and, in a group of one microbatch, gradients, which then come
    into being while activations go."""
    temporary_bytes: int = 0
    other_bytes: int = 0
    """The microbatch, workspaces of libraries, unsplit remainders, and what is none of these."""
    baseline_bytes: int = 0
    """In use before the model was built: interpreter and libraries, on a CPU; 0 on a GPU."""
    by_block: bool = False
    """Whether it comes from a ledger."""

    @property
    def parts(self) -> dict[str, int]:
        """The parts by their names, in words."""
        rest = "activations" if self.by_block else "activations and temporaries"
        parts = {
            "the process before the workload": self.baseline_bytes,
            "parameters": self.parameters_bytes,
            "buffers": self.buffers_bytes,
            "gradients": self.gradients_bytes,
            "optimizer state": self.optimizer_state_bytes,
            rest: self.activations_bytes,
        }
        if self.by_block:
            parts["temporaries"] = self.temporary_bytes
            parts["the microbatch, workspaces and remainders"] = self.other_bytes
        return parts

    @property
    def total_bytes(self) -> int:
        """The peak that the parts sum to."""
        return sum(self.parts.values())

    @property
    def dominant(self) -> str:
        """Name of the largest part, in words."""
        parts = self.parts
        return max(parts, key=lambda name: parts[name])


Category = Literal[
    "parameters",
    "buffers",
    "gradients",
    "optimizer state",
    "inputs",
    "activations",
    "temporary",
    "workspace",
    "remainders",
    "other",
]
"""What device memory is for. `activations` live from forward until backward wants them,
`temporary` is what comes and goes within a phase (in backward, gradients of activations),
`workspace` is scratch memory of a library such as cuBLAS or cuDNN, and `remainders` is what the
allocator hands out with large blocks because it would not split off so little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerPeak:
    """The moment at which a phase held most."""

    phase: Literal["build", "forward", "backward", "optimizer_step"]
    groups: Literal["none", "first", "later"]
    allocated_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """Blocks of one category, allocated for one module from one place."""

    category: Category
    module: str
    """Path of the module, `layers.3.mlp`; empty outside of modules. Rows that differ in one number
    of the path only are one row, `layers.[0-11].mlp`, with the bytes of all of them."""
    place: str | None
    """File and line, `model.py:41`: the innermost frame in the user's own code, else the innermost
    outside of torch. What backward allocates has the place of its forward."""
    function: str
    """Name of the function at that place."""
    text: str
    """The line itself, without its indent; empty where it is not the user's."""
    bytes: tuple[int, ...]
    """At each peak of the ledger, in its order."""
    blocks: tuple[int, ...]
    """Number of blocks at each peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What the peak of every phase is made of, block by block, as the allocator counts them.

    The rows sum to the allocated bytes of each peak.
    """

    peaks: tuple[LedgerPeak, ...]
    """One a phase, over all groups."""
    rows: tuple[LedgerRow, ...]
    """Sorted by category, module and place."""

    @property
    def highest(self) -> int:
        """Index of the highest peak; the first of equal ones."""
        return max(range(len(self.peaks)), key=lambda i: (self.peaks[i].allocated_bytes, -i))


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelinePoint:
    """Allocated memory at one moment of a group."""

    event: int
    """Position in the group, counted in allocator events (allocations and frees)."""
    allocated_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelinePhase:
    """Where a phase begins on the timeline."""

    phase: Literal["forward", "backward", "optimizer_step"]
    microbatch: int | None
    """Index of the microbatch in the group, from 0; None for the optimizer step."""
    event: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Allocated memory over one group with optimizer state in place, thinned with peaks kept.

    Sums of what was asked for, rounded up to blocks of 512 bytes. The allocator may hand out up to
    1 MiB more for a large request, so its own peak can lie a little higher.
    """

    events: int
    """Allocator events in the group."""
    points: tuple[TimelinePoint, ...]
    phases: tuple[TimelinePhase, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRecord:
    """What the host's kernel counted and wrote of killed processes while a trial ran."""

    cgroup: str | None
    """The control group with the lowest limit on memory among those that the trial was in."""
    cgroup_limit_bytes: int | None
    cgroup_oom_kills: int | None
    """Processes killed for want of memory in the trial's own group; None where not counted."""
    system_oom_kills: int | None
    """Processes killed for want of memory anywhere on the machine."""
    kernel_log: Literal["names it", "does not name it", "unreadable"]
    """Whether the kernel's log tells that the trial's process was killed for want of memory."""
    kernel_line: str | None = None
    """The kernel's own words, where its log names the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthPlace:
    """A place in the code whose allocations stay from group to group."""

    where: str
    """Folder, file and line; or what is known instead, where no Python code is on the stack."""
    bytes_per_group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Steadiness:
    """Whether the answer's memory stays what it was, group after group."""

    verdict: Literal["steady", "growing", "unknown"]
    groups: int
    """Groups that were looked at."""
    bytes_per_group: int | None = None
    """How much more is allocated after each group; None unless it grows."""
    groups_until_limit: int | None = None
    """About how many groups run before what is allocated reaches the limit."""
    places: tuple[GrowthPlace, ...] = ()
    """Where the blocks that stay were allocated, the largest first."""
    reason: str | None = None
    """Why it is unknown, or what the growth was when it is none, without a full stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPeak:
    """Memory of an evaluation pass at the training size, with the optimizer's state in place."""

    microbatch: int
    peak_allocated_bytes: int | None
    peak_bytes: int | None
    """As in `DeviceMemory`: the figure that is compared with the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherProcess:
    """A process beside the trial that used the same GPU."""

    pid: int
    name: str | None
    used_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """An evaluation pass at the answer's microbatch; it never changes the answer."""

    verdict: Verdict
    text: str
    """What decided the verdict, in one sentence."""
    microbatch: int
    peak: EvaluationPeak | None
    """None where it did not come to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What a trial showed beside its verdict and its peaks."""

    allocated_after_groups_bytes: tuple[int, ...] = ()
    """Allocated memory at the end of each group; empty where no allocator counts it."""
    growth_places: tuple[GrowthPlace, ...] = ()
    """Where memory that stayed came from, in a trial that traced it."""
    evaluation: EvaluationPeak | None = None
    """None in a trial without an evaluation pass."""
    unlike_shapes: tuple[str, ...] = ()
    """Shapes of microbatches of one size that differed from call to call; empty when alike."""
    unlike_counts: tuple[int, int] | None = None
    """Smallest and largest `count` of microbatches of one size, where they differed."""
    graphs_first_group: int | None = None
    """Graphs that torch.compile compiled up to the end of the first group; None without it."""
    graphs_later: int | None = None
    """Graphs compiled after the first group: recompilations."""
    other_processes: tuple[OtherProcess, ...] = ()
    """Processes seen on the same real GPU before or at the end of the trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What decided a verdict."""

    rule: str
    """Name of the rule that fired, such as `torch.OutOfMemoryError` or `all groups ran`."""
    text: str
    """One sentence with the numbers."""
    phase: str | None = None
    """Phase in which the trial ended, or None when it ended well."""
    group: int | None = None
    """Group in which it ended, from 1."""
    microbatch_index: int | None = None
    """Microbatch in which it ended, from 1."""
    exception: str | None = None
    """Class of the exception, or None."""
    traceback: str | None = None
    """The user's own traceback, without memfit's frames."""
    hint: str | None = None
    """What to do about it, where memfit knows."""
    output_tail: tuple[str, ...] = ()
    """Last lines that the trial printed."""
    seen_in: str | None = None
    """Where the message that decided was seen before: an issue, or a source file."""
    doubtful: bool = False
    """Whether what decided also has other causes; the trial is then repeated before it counts."""
    free_bytes: int | None = None
    """Free memory of the device, within the limit, when the trial failed."""
    exit_code: int | None = None
    """How the process ended by itself, negative for a signal; None where it left a report."""
    host: HostRecord | None = None
    """What the host's kernel had to say, where a process was killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """One finished trial."""

    spec: TrialSpec
    verdict: Verdict
    evidence: Evidence
    demand_bytes: int | None = None
    """Device memory that the trial needed, whatever the allocator's layout: for a fit, peak
    allocated plus what lies outside the allocator; for an out-of-memory error, allocated plus the
    request that failed plus what lies outside. Above the limit, no layout could have helped."""
    devices: tuple[DeviceMemory, ...] = ()
    composition: Composition | None = None
    timeline: Timeline | None = None
    ledger: Ledger | None = None
    """From a trial of its own with the same peaks; None where there was none."""
    observed: Observed = Observed()
    groups_run: int = 0
    optimizer_steps_attempted: int = 0
    optimizer_steps_applied: int = 0
    limits: tuple[str, ...] = ()
    """What the figures of this trial leave out, as its worker saw it, one sentence each."""
    wall_s: float = 0.0

    @property
    def peak_allocated_bytes(self) -> int | None:
        """Peak allocated on the most loaded device."""
        return _most(device.peak_allocated_bytes for device in self.devices)

    @property
    def peak_reserved_bytes(self) -> int | None:
        """Peak reserved on the most loaded device."""
        return _most(device.peak_reserved_bytes for device in self.devices)

    @property
    def peak_bytes(self) -> int | None:
        """The figure compared with the limit, on the most loaded device."""
        return _most(device.peak_bytes for device in self.devices)


def _most(values: Any) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSpec:
    """The question that a probe answers."""

    target: str
    """The file or module and, after a colon, the workload's name."""
    parameters: dict[str, Parameter]
    """Workload parameters set by the user."""
    device: DeviceSpec
    logical_batch: int | None = None
    replicas: int = 1
    policy: Policy = Policy.EXACT
    precision: Precision = Precision.FP32
    clip_norm: float | None = None
    group_microbatches: int = 2
    """Cap on the microbatches of a search trial's group."""
    groups: int = 2
    """Groups that a trial of full groups runs; growth from group to group shows from 3 on."""
    min_microbatch: int = 1
    max_microbatch: int | None = None
    max_trials: int = 40
    time_budget_s: float | None = None
    """Time after which no trial is begun once there is an answer; None for as long as it takes."""
    trial_timeout_s: float | None = None
    resumed: bool = False
    """As in `TrialSpec`."""
    evaluate: bool = False
    """Whether an evaluation pass was asked for after the answer."""
    allocator: str | None = None
    """As in `TrialSpec`: the answer holds with these settings of the allocator."""
    seed: int = 0
    data_dependent: float = 1.0
    """As in `TrialSpec`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What another setting of the allocator makes of the answer."""

    allocator: str
    """The setting, such as `expandable_segments:True`."""
    variable: str
    """The environment variable that this version of torch reads it from."""
    trials: int
    """Trials that were run with it above the answer."""
    complete: bool = True
    """Whether that search came to its end; False where trials or time were over before."""
    split: Split | None = None
    """The larger split that fits with it; None when it changes nothing."""
    trial: TrialResult | None = None
    """The trial of full groups in which that split's microbatch fitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadInfo:
    """The workload as it was loaded."""

    name: str
    description: str
    target: str
    path: str | None
    """Path of the user's file, as given; None for a module."""
    sha256: str | None
    """Digest of the user's file, and of the user's own modules that it imports."""
    parameters: dict[str, Parameter]
    """All parameters with the values used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What a result depends on beside the workload."""

    memfit: str
    python: str
    platform: str
    torch: str
    cuda: str | None
    cudnn: str | None
    driver: str | None
    """Driver version of a real GPU, else None."""
    variables: dict[str, str]
    """An allow-list of environment variables, never the whole environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedAbove:
    """A size above the answer that was tried."""

    microbatch: int
    trial: int
    """Index of the trial."""
    verdict: Verdict
    demand_exceeds_limit: bool
    """Whether the allocated demand alone exceeds the limit, so that no layout could help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Why the answer is the answer."""

    microbatch: int
    trial: int
    """Index of the trial in which this size ran full groups in a fresh process."""
    ceiling: Literal["tried", "cap", "budget", "time"]
    """`tried`: every candidate above was tried and did not fit, up to one that closes the search:
    its demand alone exceeds the limit, measured or by measured growth, or the host or an index
    limit refused it. `cap`: no larger candidate exists. `budget` and `time`: the ceiling of trials
    or the time budget was reached first, and `untried` sizes remain."""
    tried_above: tuple[TriedAbove, ...]
    untried: tuple[int, ...] = ()
    cap: int | None = None
    """The largest candidate, and so the cap where `ceiling` is `cap`."""
    closed_by: TriedAbove | None = None
    """The trial above whose size nothing was tried, and its verdict: what set the ceiling. None
    where no trial did, because the largest candidate was reached, or trials or time ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """One trial in the story of a search."""

    trial: int
    """Index of the trial."""
    microbatch: int
    verdict: Verdict
    reason: str
    """Why this size was tried."""
    evidence: str
    """What decided the verdict, in one sentence."""
    change: str
    """What the trial changed, in one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The answer of a probe, and everything that it stands on."""

    schema: Literal["memfit.probe"] = "memfit.probe"
    schema_version: int = SCHEMA_VERSION
    created: str
    """Moment of the answer, ISO 8601 in UTC."""
    command: str
    """The command that made this result."""
    workload: WorkloadInfo
    spec: ProbeSpec
    source: Source
    limits: tuple[str, ...]
    """What the figures leave out, one sentence each."""
    split: Split
    """The answer: `microbatch`, `accumulation_steps`, `replicas`, `logical_batch`."""
    certificate: Certificate
    trials: tuple[TrialResult, ...]
    other_trials: tuple[TrialResult, ...] = ()
    """Trials with another setting of the allocator than the answer's: those after which nothing
    fitted, or those that looked for a larger size."""
    story: tuple[Chapter, ...] = ()
    """The search in the order of its trials: what each showed, and what it changed."""
    environment: Environment
    loss_normalisation: str
    last_group: str
    """How a group with fewer examples, at the end of an epoch, is to be treated."""
    notes: tuple[str, ...] = ()
    """Remarks to the user: poor splits, caps reached, thrash seen."""
    evaluation: Evaluation | None = None
    """None where it was not asked for."""
    tuned: Tuned | None = None
    """None where no other setting was tried."""
    steadiness: Steadiness | None = None
    """None in a record of an earlier memfit, which did not look."""
    verification: Verification | None = None
    """What `memfit verify` found of this very file; None when it was not verified."""
    wall_s: float = 0.0

    @property
    def every_trial(self) -> tuple[TrialResult, ...]:
        """All trials that looked for a size, in the order in which they ran."""
        both = (*self.trials, *self.other_trials)
        return tuple(sorted(both, key=lambda trial: trial.spec.index))

    @property
    def answer_trial(self) -> int:
        """Index of the trial that the answer stands on."""
        return self.certificate.trial

    @property
    def answer(self) -> TrialResult:
        """The trial that the answer stands on."""
        return next(t for t in self.trials if t.spec.index == self.certificate.trial)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeProgress:
    """A probe that has not ended: what a resumed one starts from."""

    schema: Literal["memfit.progress"] = "memfit.progress"
    schema_version: int = SCHEMA_VERSION
    command: str
    workload: WorkloadInfo
    spec: ProbeSpec
    environment: Environment
    trials: tuple[TrialResult, ...] = ()
    other_trials: tuple[TrialResult, ...] = ()
    """Those with the allocator's own settings, where nothing fitted and the search went on."""
    stopped_by: TrialResult | None = None
    """The trial that stopped the probe without saying anything about its size; it is run again."""


class _Stored(Protocol):
    """A record that is a document of its own, with its schema as a field."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


Record = TypeVar("Record", bound=_Stored)


NOTHING_FITS = "memfit.nothing-fits"
"""Schema of the record of a probe without an answer; `memfit.nothing` has the record."""


class _Header(msgspec.Struct):
    schema: str
    schema_version: int


def to_json(record: Any) -> bytes:
    """Encode a record as an indented JSON document with a final newline."""
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"


def schema_of(data: bytes) -> str | None:
    """Return which document this is, or None when it is none of memfit's."""
    try:
        return msgspec.json.decode(data, type=_Header).schema
    except msgspec.DecodeError:
        return None


def from_json(data: bytes, kind: type[Record], *, origin: str) -> Record:
    """Decode a stored document.

    Args:
        data: The document.
        kind: The record it should hold.
        origin: Name of the file, for messages.

    Raises:
        UsageError: When it is not JSON, another document, damaged, or from a newer memfit.
    """
    expected = kind.__dataclass_fields__["schema"].default
    check_schema(data, expected, origin=origin)
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise UsageError(f"{origin} is damaged: {error}", hint="make it again") from None


def check_schema(data: bytes, expected: str, *, origin: str) -> None:
    """Refuse a document that is not JSON, another one, or from a newer memfit."""
    try:
        header = msgspec.json.decode(data, type=_Header)
    except msgspec.DecodeError as error:
        raise UsageError(
            f"{origin} is not a memfit document: {error}", hint=f"name a file that holds {expected}"
        ) from None
    if header.schema == NOTHING_FITS and header.schema != expected:
        raise UsageError(
            f"{origin} is the record of a probe in which nothing fits, so it has no microbatch",
            hint=f"`memfit report {origin}` makes the page that tells why",
        )
    if header.schema != expected:
        raise UsageError(
            f"{origin} holds {header.schema!r}, not {expected!r}",
            hint=f"name a file that holds {expected}",
        )
    if header.schema_version > SCHEMA_VERSION:
        raise UsageError(
            f"{origin} has schema version {header.schema_version}; "
            f"this memfit reads up to {SCHEMA_VERSION}",
            hint="update memfit",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPhase:
    """Memory of one device of one process, up to a moment of a run.

    Peaks reach back to the start of the process, whatever the program itself reset, so a later
    phase is never below an earlier one; where it is above, its figure is the phase's own peak.
    """

    until: Literal["first_step_begins", "first_step_ends", "end"]
    """The first optimizer step creates the optimizer's state; what follows runs with it."""
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    device_used_bytes: int | None
    """The most that was in use on the device by this process, context included."""
    allocated_bytes: int | None
    """What was allocated at that moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDevice:
    """Memory of one device of one process of a run."""

    device: int
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    device_used_bytes: int | None
    """The most that was in use on the device by this process, context included."""
    alloc_retries: int | None
    """Times the allocator flushed its cache and tried again."""
    inactive_split_bytes: int | None
    """Free bytes in split blocks at the end: fragmentation."""
    phases: tuple[RunPhase, ...] = ()
    """Only `end` where no optimizer step was seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunError:
    """An out-of-memory error that was raised; the program may have survived it."""

    device: int
    requested_bytes: int
    free_bytes: int
    """Free on the device when the request failed."""
    allocated_bytes: int | None
    reserved_bytes: int | None
    where: Literal["backward", "optimizer_step", "elsewhere"]
    """`elsewhere` is building, forward, or anything else that is not the other two."""
    optimizer_steps: int
    """Optimizer steps that had ended before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRead:
    """A place at which a program read device memory whose value is not sure."""

    where: str
    """The innermost line that is not torch's: `train.py:12`."""
    unknown: int
    """Reads of what only a kernel could have written."""
    changed: int
    """Reads of what was written, and may have been changed by a kernel since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProcess:
    """One process of a run that used the virtual device, as it saw itself."""

    pid: int
    program: tuple[str, ...]
    """The words of `sys.argv`."""
    name: str | None
    """The name that multiprocessing gave it, such as `SpawnProcess-1`."""
    rank: int | None
    world_size: int | None
    torch: str
    virtual: bool
    """Whether the stand-in driver was loaded; figures of a process without it are not kept."""
    devices: tuple[RunDevice, ...]
    optimizers: int
    """Optimizers that stepped."""
    optimizer_steps: int
    """Those that were seen; one that torch.compile has compiled is not."""
    out_of_memory: tuple[RunError, ...]
    """The first hundred."""
    out_of_memory_count: int
    invented_calls: int
    """Calls to functions whose results the stand-in driver had to invent."""
    invented: tuple[str, ...]
    """Those functions."""
    unknown_reads: int
    """Reads of device memory that only a kernel could have written; they were answered with 0."""
    changed_reads: int = 0
    """Reads of what was written and may have been changed by a kernel since: they were answered
    with what was written."""
    reads: tuple[RunRead, ...] = ()
    """The first fifty places of both."""
    benchmark: tuple[int, int, int] = (0, 0, 0)
    """What cuDNN's benchmark mode left open: convolutions of which it tried several plans, and the
    least and most workspace of the one whose plans differ most, in bytes."""
    rounding_bytes: int = 0
    """What of the peak rounds blocks of the driver's memory pools up to whole pages."""
    history_bytes: int = 0
    """What the histories of L-BFGS optimizers lack until they are full; values decide when."""
    ending: Literal["exit", "exception", "signal"] | None
    """`exception` is one that nobody caught. None when it left no word: it was killed or crashed,
    and the figures are the last that it wrote."""
    exit_status: int | None
    """None where only the process's own parent could know it."""
    exception: str | None
    """Class of the exception that nobody caught."""
    signal: str | None = None
    """Name of the signal that ended it, such as `SIGKILL`; None where it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a program did to a virtual device, process by process."""

    schema: Literal["memfit.run"] = "memfit.run"
    schema_version: int = SCHEMA_VERSION
    memfit: str
    """Version of memfit."""
    created: str
    """Moment of the end, ISO 8601 in UTC."""
    command: str
    """The command that made this result."""
    program: tuple[str, ...]
    """The program and its words, as it was started."""
    device: DeviceSpec
    device_count: int
    source: Source
    limits: tuple[str, ...]
    """What the figures leave out, one sentence each."""
    processes: tuple[RunProcess, ...]
    """The processes that used the device, by rank and then in the order of their start."""
    exit_status: int
    """The program's own; 128 plus its number for a signal."""
    signal: str | None
    """Name of the signal that ended the program, or None."""
    wall_s: float
