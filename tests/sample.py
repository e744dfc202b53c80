"""Records for tests. Every figure in here is made up, though of a plausible size.

`gpt2` is a GPT-2 on a virtual RTX 4090 that accumulates to 480 examples; `on_cpu` has nothing but
resident memory; `with_hole` is a search in which 14 does not fit although 13 and 15 do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from memfit.records import (
    Certificate,
    Composition,
    DeviceKind,
    DeviceMemory,
    DeviceSpec,
    Environment,
    Evidence,
    Parameter,
    PhaseMemory,
    Policy,
    Precision,
    ProbeResult,
    ProbeSpec,
    Source,
    Split,
    Timeline,
    TimelinePhase,
    TimelinePoint,
    TrialResult,
    TrialSpec,
    TriedAbove,
    Verdict,
    WorkloadInfo,
)
from memfit.units import GIB, MIB

Purpose = Literal["search", "confirm", "diagnose"]

PARAMETERS, GRADIENTS, OPTIMIZER = 497_814_528, 497_774_592, 995_590_144
PER_EXAMPLE = 1_035_000_000
CONTEXT = 511_705_088

RTX_4090 = DeviceSpec(
    kind=DeviceKind.VIRTUAL,
    slug="rtx-4090",
    name="NVIDIA GeForce RTX 4090",
    total_bytes=25_286_803_456,
    limit_bytes=24_749_932_544,
    headroom_bytes=512 * MIB,
    context_bytes=CONTEXT,
    context_source="catalogue",
    compute_capability="8.9",
)
CPU = DeviceSpec(
    kind=DeviceKind.CPU,
    slug="cpu",
    name="CPU (8 cores)",
    total_bytes=16 * GIB,
    limit_bytes=12 * GIB,
    memory_limit_bytes=12 * GIB,
)
ENVIRONMENT = Environment(
    memfit="0.1.0",
    python="3.11.7",
    platform="Linux-6.8.0-x86_64",
    torch="2.9.1+cu128",
    cuda="12.8",
    cudnn="9.10.2",
    driver=None,
    variables={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
)


def timeline(microbatches: int, m: int, points: int = 300) -> Timeline:
    """Make the sawtooth of a group: each microbatch climbs in forward and falls in backward."""
    base = PARAMETERS + OPTIMIZER
    per_phase = max(2, points // (2 * microbatches + 1))
    curve: list[TimelinePoint] = []
    phases: list[TimelinePhase] = []
    event = 0
    for index in range(microbatches):
        held = base + (GRADIENTS if index else 0)
        for phase in ("forward", "backward"):
            phases.append(
                TimelinePhase(
                    phase="forward" if phase == "forward" else "backward",
                    microbatch=index,
                    event=event,
                )
            )
            for step in range(per_phase):
                done = (step + 1) / per_phase
                level = done if phase == "forward" else 1 - done
                grown = int(GRADIENTS * done) if phase == "backward" and not index else 0
                curve.append(
                    TimelinePoint(
                        event=event, allocated_bytes=held + grown + int(PER_EXAMPLE * m * level)
                    )
                )
                event += 15
    phases.append(TimelinePhase(phase="optimizer_step", microbatch=None, event=event))
    for step in range(per_phase):
        extra = GRADIENTS // 2 if 0 < step < per_phase - 1 else 0
        curve.append(
            TimelinePoint(
                event=event,
                allocated_bytes=base + (0 if step == per_phase - 1 else GRADIENTS) + extra,
            )
        )
        event += 15
    return Timeline(events=event, points=tuple(curve), phases=tuple(phases))


def gpu_memory(allocated: int, *, slack: int = 180 * MIB, retries: int = 0) -> DeviceMemory:
    """Memory of a virtual GPU whose peak is in backward."""
    reserved = allocated + slack
    used = reserved + CONTEXT
    phases = [
        PhaseMemory(
            phase="build",
            groups="none",
            peak_allocated_bytes=PARAMETERS,
            peak_reserved_bytes=PARAMETERS + 20 * MIB,
            device_used_bytes=PARAMETERS + CONTEXT,
            outside_allocator_bytes=CONTEXT,
            alloc_retries=0,
            seconds=0.031,
        )
    ]
    for groups, less in (("first", OPTIMIZER), ("later", 0)):
        for phase, below in (("forward", 90 * MIB), ("backward", 0), ("optimizer_step", 9 * GIB)):
            top = max(PARAMETERS + GRADIENTS + OPTIMIZER, allocated - less - below)
            phases.append(
                PhaseMemory(
                    phase="forward"
                    if phase == "forward"
                    else ("backward" if phase == "backward" else "optimizer_step"),
                    groups="first" if groups == "first" else "later",
                    peak_allocated_bytes=top,
                    peak_reserved_bytes=top + slack,
                    device_used_bytes=used,
                    outside_allocator_bytes=CONTEXT,
                    alloc_retries=retries,
                    seconds=0.12,
                )
            )
    return DeviceMemory(
        rank=0,
        device=0,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        device_used_bytes=used,
        outside_allocator_bytes=CONTEXT,
        used_before_bytes=0,
        alloc_retries=retries,
        alloc_retries_last_group=0,
        inactive_split_bytes=42 * MIB,
        device_used_source="mem_get_info",
        phases=tuple(phases),
    )


def gpu_trial(
    index: int,
    m: int,
    *,
    fits: bool,
    purpose: Purpose = "search",
    logical_batch: int = 480,
    demand: int | None = None,
    device: DeviceSpec = RTX_4090,
) -> TrialResult:
    """Make one trial on a virtual GPU; `demand` overrides what its size would need."""
    allocated = PARAMETERS + GRADIENTS + OPTIMIZER + m * PER_EXAMPLE
    steps = logical_batch // m
    confirm = purpose == "confirm"
    need = demand if demand is not None else allocated + CONTEXT
    spec = TrialSpec(
        index=index,
        purpose=purpose,
        split=Split(microbatch=m, accumulation_steps=steps, logical_batch=steps * m),
        group_microbatches=steps if confirm else min(2, steps),
        precision=Precision.BF16,
        clip_norm=1.0,
        device=device,
        record_timeline=confirm,
    )
    if not fits:
        return TrialResult(
            spec=spec,
            verdict=Verdict.OOM,
            evidence=Evidence(
                rule="torch.OutOfMemoryError",
                text=f"tried to allocate 2.30 GiB with {device.limit_bytes} bytes to use",
                phase="backward",
                group=1,
                microbatch_index=1,
                exception="torch.OutOfMemoryError",
            ),
            demand_bytes=need,
            devices=(gpu_memory(min(allocated, device.limit_bytes - 3 * GIB), retries=1),),
            wall_s=0.21,
        )
    return TrialResult(
        spec=spec,
        verdict=Verdict.FITS,
        evidence=Evidence(rule="all groups ran", text="2 groups ran, 2 optimizer steps applied"),
        demand_bytes=need,
        devices=(gpu_memory(allocated),),
        composition=Composition(
            phase="backward",
            parameters_bytes=PARAMETERS,
            buffers_bytes=12_582_912,
            gradients_bytes=GRADIENTS,
            optimizer_state_bytes=OPTIMIZER,
            activations_bytes=allocated - PARAMETERS - GRADIENTS - OPTIMIZER - 12_582_912,
        ),
        timeline=timeline(steps, m) if confirm else None,
        groups_run=2,
        optimizer_steps_attempted=2,
        optimizer_steps_applied=2,
        wall_s=1.94 if confirm else 0.24,
    )


def probe(
    trials: tuple[TrialResult, ...],
    certificate: Certificate,
    *,
    logical_batch: int | None,
    device: DeviceSpec = RTX_4090,
    source: Source = Source.VIRTUAL,
    limits: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
) -> ProbeResult:
    """Put trials and their certificate into a result."""
    split = next(t.spec.split for t in trials if t.spec.index == certificate.trial)
    parameters: dict[str, Parameter] = {"seq_len": 1024}
    command = f"memfit probe examples/gpt2.py --device {device.slug}"
    if logical_batch is not None:
        command += f" --logical-batch {logical_batch}"
    return ProbeResult(
        created="2026-01-15T09:30:00Z",
        command=f"{command} --precision bf16",
        workload=WorkloadInfo(
            name="GPT2",
            description="GPT-2 124M on sequences of `seq_len` tokens.",
            target="examples/gpt2.py",
            path="examples/gpt2.py",
            sha256="5d" * 32,
            parameters=parameters,
        ),
        spec=ProbeSpec(
            target="examples/gpt2.py",
            parameters=parameters,
            device=device,
            logical_batch=logical_batch,
            policy=Policy.EXACT,
            precision=Precision.BF16,
            clip_norm=1.0,
        ),
        source=source,
        limits=limits,
        split=split,
        certificate=certificate,
        trials=trials,
        environment=ENVIRONMENT,
        loss_normalisation="Each microbatch's mean loss is weighted by its share of the group's "
        "elements, so the gradient is that of the whole logical batch.",
        last_group="Drop the incomplete group at the end of an epoch, or weigh it by its elements.",
        notes=notes,
        wall_s=sum(t.wall_s for t in trials) + 3.1,
    )


def gpt2() -> ProbeResult:
    """GPT-2 on a virtual RTX 4090: 20 fits, 24 does not."""
    return probe(
        (
            gpu_trial(1, 8, fits=True),
            gpu_trial(2, 16, fits=True),
            gpu_trial(3, 32, fits=False),
            gpu_trial(4, 24, fits=False),
            gpu_trial(5, 20, fits=True),
            gpu_trial(6, 20, fits=True, purpose="confirm"),
        ),
        Certificate(
            microbatch=20,
            trial=6,
            ceiling="tried",
            tried_above=(
                TriedAbove(microbatch=24, trial=4, verdict=Verdict.OOM, demand_exceeds_limit=True),
            ),
        ),
        logical_batch=480,
        limits=(
            "Kernels were not executed, so shapes that depend on data are not seen.",
            "cuDNN's benchmark mode is not modelled.",
            "The size of the CUDA context is taken from a catalogue.",
        ),
        notes=("30 and 40 divide 480 too, and lie above a size that cannot fit.",),
    )


def with_hole() -> ProbeResult:
    """A search whose 14 fails by fragmentation although 13 and 15 fit."""
    small = replace(RTX_4090, limit_bytes=18_500_000_000, memory_limit_bytes=18_500_000_000)
    below = small.limit_bytes - 300 * MIB

    def trial(index: int, m: int, *, fits: bool, purpose: Purpose = "search") -> TrialResult:
        return gpu_trial(
            index,
            m,
            fits=fits,
            purpose=purpose,
            logical_batch=4 * m,
            demand=below if m == 14 else None,
            device=small,
        )

    result = probe(
        (
            trial(1, 13, fits=True),
            trial(2, 16, fits=False),
            trial(3, 14, fits=False),
            trial(4, 15, fits=True),
            trial(5, 15, fits=True, purpose="confirm"),
        ),
        Certificate(
            microbatch=15,
            trial=5,
            ceiling="tried",
            tried_above=(
                TriedAbove(microbatch=16, trial=2, verdict=Verdict.OOM, demand_exceeds_limit=True),
            ),
        ),
        logical_batch=60,
        device=small,
        limits=("Kernels were not executed.",),
    )
    return replace(result, split=replace(result.split, logical_batch=60))


def cpu_trial(index: int, m: int, resident: int | None, purpose: Purpose = "search") -> TrialResult:
    """Make one trial on a CPU, where nothing but resident memory is known."""
    phases = tuple(
        PhaseMemory(
            phase=phase,
            groups=groups,
            peak_allocated_bytes=None,
            peak_reserved_bytes=None,
            device_used_bytes=resident,
            outside_allocator_bytes=None,
            alloc_retries=None,
            seconds=1.4,
        )
        for groups in _GROUPS
        for phase in _PHASES
    )
    return TrialResult(
        spec=TrialSpec(
            index=index,
            purpose=purpose,
            split=Split(microbatch=m, accumulation_steps=64 // m, logical_batch=64),
            group_microbatches=64 // m,
            device=CPU,
        ),
        verdict=Verdict.FITS,
        evidence=Evidence(rule="all groups ran", text="2 groups ran, 2 optimizer steps applied"),
        devices=(
            DeviceMemory(
                rank=0,
                device=0,
                peak_allocated_bytes=None,
                peak_reserved_bytes=None,
                device_used_bytes=resident,
                outside_allocator_bytes=None,
                used_before_bytes=None,
                alloc_retries=None,
                alloc_retries_last_group=None,
                inactive_split_bytes=None,
                device_used_source="rss",
                phases=phases,
            ),
        ),
        groups_run=2,
        optimizer_steps_attempted=2,
        optimizer_steps_applied=2,
        wall_s=9.7,
    )


_GROUPS: tuple[Literal["first", "later"], ...] = ("first", "later")
_PHASES: tuple[Literal["forward", "backward", "optimizer_step"], ...] = (
    "forward",
    "backward",
    "optimizer_step",
)


def on_cpu() -> ProbeResult:
    """A probe on a CPU that reached its cap; most figures are None."""
    return probe(
        (
            cpu_trial(1, 32, 5 * GIB),
            cpu_trial(2, 64, 8 * GIB + 300 * MIB),
            cpu_trial(3, 64, 8 * GIB + 310 * MIB, purpose="confirm"),
        ),
        Certificate(microbatch=64, trial=3, ceiling="cap", tried_above=(), cap=64),
        logical_batch=64,
        device=CPU,
        source=Source.MEASURED,
        limits=("Resident memory is a high-water mark of the whole process.",),
        notes=("The cap of the search was reached: the whole logical batch fits at once.",),
    )


def hostile() -> ProbeResult:
    """A result whose words try to become markup, and are long as well."""
    attack = "</script><script>alert('x')</script><img src=x onerror=alert(1)>"
    result = gpt2()
    trials = tuple(
        replace(
            t,
            evidence=replace(t.evidence, text=f"{attack} {'long' * 60}", exception=attack),
            composition=replace(t.composition, phase=attack) if t.composition else None,
        )
        for t in result.trials
    )
    parameters: dict[str, Parameter] = {attack: attack, "$x_1^{y$": "\\frac"}
    return replace(
        result,
        command=f"{result.command} {attack}",
        workload=replace(
            result.workload,
            name=attack + "VeryLongWorkloadName" * 8,
            description=attack,
            parameters=parameters,
        ),
        spec=replace(result.spec, device=replace(RTX_4090, name=f"{attack} $\\alpha_ RTX")),
        notes=(attack,),
        limits=(attack,),
        last_group=attack,
        loss_normalisation=attack,
        environment=replace(ENVIRONMENT, variables={"NCCL_DEBUG": attack}),
        trials=trials,
    )
