"""The question of a plan: what the user asked for, checked, and put into devices and rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from memfit.batch import candidates
from memfit.capacity.cells import Ask, Column
from memfit.capacity.table import CapacitySpec, Setting
from memfit.devices.select import Choice, choose
from memfit.errors import UsageError
from memfit.probe import worker_environment
from memfit.question import ProbeRequest, check_request, describe_device
from memfit.records import DeviceKind, DeviceSpec, Policy, Precision
from memfit.virtual import cards

EVERY_CARD = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The question in the user's words; what is wrong with them ends in a UsageError."""

    target: str
    devices: tuple[str, ...]
    """Words as `--device` takes them; `all` is every card of the catalogue."""
    parameters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    precisions: tuple[Precision, ...] = (Precision.FP32,)
    replicas: tuple[int, ...] = (1,)
    tries: tuple[str, ...] = ()
    need: int | None = None
    logical_batch: int | None = None
    policy: Policy = Policy.EXACT
    memory_limit: str | None = None
    headroom: str = "2%"
    clip_norm: float | None = None
    group_microbatches: int = 2
    min_microbatch: int = 1
    max_microbatch: int | None = None
    max_trials: int | None = None
    time_budget_s: float | None = None
    """For each cell."""
    trial_timeout_s: float | None = 1800.0
    seed: int = 0
    data_dependent: str = "worst"
    jobs: int | None = None
    """Cells that run at once; one for each core when None."""
    out: Path | None = None
    force: bool = False
    command: str = ""

    @property
    def probe(self) -> ProbeRequest:
        """What the probes of all cells are asked alike."""
        return ProbeRequest(
            target=self.target,
            memory_limit=self.memory_limit,
            headroom=self.headroom,
            logical_batch=self.logical_batch,
            policy=self.policy,
            clip_norm=self.clip_norm,
            group_microbatches=self.group_microbatches,
            min_microbatch=self.min_microbatch,
            max_microbatch=self.need or self.max_microbatch,
            max_trials=self.max_trials,
            time_budget_s=self.time_budget_s,
            trial_timeout_s=self.trial_timeout_s,
            seed=self.seed,
            data_dependent=self.data_dependent,
            by_block=False,  # it takes longer than all trials of a cell together
        )

    def probe_of(self, ask: Ask) -> ProbeRequest:
        """What the probe of one cell is asked."""
        return replace(
            self.probe,
            parameters=ask.setting.parameters,
            device=ask.column.word,
            replicas=ask.setting.replicas,
            precision=ask.setting.precision,
            environment=ask.environment,
        )


def check_plan(request: PlanRequest) -> None:
    """Refuse what no cell could be asked, before anything runs; raises UsageError."""
    check_request(request.probe)
    if request.jobs is not None and request.jobs < 1:
        raise UsageError(f"--jobs is {request.jobs}; it must be at least 1")
    if request.need is not None:
        if request.need < 1:
            raise UsageError(f"--need is {request.need}; it must be at least 1")
        for taken, option in (
            (request.max_microbatch, "--max-microbatch"),
            (request.tries, "--try"),
        ):
            if taken:
                raise UsageError(
                    f"--need and {option} do not go together",
                    hint=f"ask them apart, or drop {option}",
                )
    for replicas in request.replicas:
        sizes = candidates(
            logical_batch=request.logical_batch,
            replicas=replicas,
            policy=request.policy,
            min_microbatch=request.min_microbatch,
            max_microbatch=request.max_microbatch,
        )
        if request.need is not None:
            sizes.split(request.need)  # raises where no split has it


def columns_of(request: PlanRequest, said: Callable[[str], None]) -> tuple[Column, ...]:
    """Find the devices, from the least memory to the most.

    Args:
        request: The question.
        said: Told which device `auto` chose.

    Raises:
        UsageError: When there is none, one is named twice, or one has no such limit.
        CannotJudge: When this machine cannot imitate them.
    """
    found: list[tuple[str, Choice]] = []
    for word in _words(request.devices):
        choice = choose(word)
        if choice.said:
            said(choice.said)
        if choice.kind is DeviceKind.CUDA:
            raise UsageError(
                "a plan does not probe this machine's own GPU",
                hint="`memfit probe --device cuda` does; name cards here (see `memfit gpus`)",
            )
        twin = next((w for w, other in found if _is_same(other, choice)), None)
        if twin is not None:
            name = choice.card.name if choice.card else choice.slug
            raise UsageError(
                f"--on names the {name} twice: {twin} and {word}", hint="name each device once"
            )
        found.append((word, choice))
    if not found:
        raise UsageError(
            "no device is named", hint="as in --on a100-40gb,h100-80gb; `memfit gpus` lists cards"
        )
    columns = [_column(request, word, choice) for word, choice in found]
    return tuple(sorted(columns, key=lambda c: (c.device.total_bytes, c.device.slug)))


def _words(devices: tuple[str, ...]) -> list[str]:
    every = [card.slug for card in cards()]
    return [name for word in devices for name in (every if word == EVERY_CARD else [word])]


def _is_same(one: Choice, other: Choice) -> bool:
    if one.card is None or other.card is None:
        return one.kind is other.kind
    return (one.slug, one.card.file) == (other.slug, other.card.file)


def _column(request: PlanRequest, word: str, choice: Choice) -> Column:
    device = describe_device(request.probe, choice, gpu=None)
    return Column(word=word, device=device, environment=worker_environment(choice, device))


def spec_of(
    request: PlanRequest, columns: tuple[Column, ...], rows: tuple[Setting, ...]
) -> CapacitySpec:
    """Put the question into a record."""
    return CapacitySpec(
        target=request.target,
        devices=tuple(column.device.slug for column in columns),
        limits_bytes=tuple(_asked_bytes(column.device) for column in columns),
        settings=rows,
        tries=request.tries,
        need=request.need,
        logical_batch=request.logical_batch,
        policy=request.policy,
        clip_norm=request.clip_norm,
        group_microbatches=request.group_microbatches,
        min_microbatch=request.min_microbatch,
        max_microbatch=request.max_microbatch,
        seed=request.seed,
        data_dependent=request.data_dependent,
    )


def _asked_bytes(device: DeviceSpec) -> int:
    """The limit as it was asked for: what a machine has free today is no part of the question."""
    free = device.kind is DeviceKind.CPU and device.memory_limit_bytes is None
    return device.total_bytes if free else device.limit_bytes
