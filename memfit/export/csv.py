"""Trials as a table of comma-separated values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memfit.nothing import NothingFound
    from memfit.records import DeviceMemory, ProbeResult, TrialResult

_OF_DEVICE = (
    "rank",
    "device",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "peak_bytes",
    "device_used_bytes",
    "outside_allocator_bytes",
    "used_before_bytes",
    "alloc_retries",
    "alloc_retries_last_group",
    "inactive_split_bytes",
    "device_used_source",
)
COLUMNS = (
    "trial",
    "purpose",
    "microbatch",
    "accumulation_steps",
    "replicas",
    "logical_batch",
    "group_microbatches",
    "groups_run",
    "optimizer_steps_attempted",
    "optimizer_steps_applied",
    "precision",
    "verdict",
    "is_answer",
    "source",
    "device_slug",
    "device_name",
    "device_total_bytes",
    "limit_bytes",
    "demand_bytes",
    *_OF_DEVICE,
    "wall_s",
    "evidence_rule",
    "evidence",
    "ended_in_phase",
    "ended_in_group",
    "ended_in_microbatch",
    "doubtful",
    "repeats_trial",
    "allocator",
)
"""The columns in their order; a new one is added at the end."""


def trials_csv(result: ProbeResult | NothingFound) -> str:
    """Write the trials of a probe as CSV, one row for each trial and device.

    A trial that recorded no device has one row with those cells empty. An empty cell is a figure
    that was not measured.

    Args:
        result: The answer, or that there is none, with all trials.

    Returns:
        The text, with a header row; lines end with a newline alone.
    """
    import pandas as pd  # noqa: PLC0415 - heavy, and needed for this file only

    rows = [
        _row(result, trial, memory)
        for trial in result.every_trial
        for memory in (trial.devices or (None,))
    ]
    # Whole numbers stay whole beside empty cells only as objects: pandas' own would be floats.
    table = pd.DataFrame(rows, columns=list(COLUMNS), dtype=object)
    return str(table.to_csv(index=False, lineterminator="\n"))


def _row(
    result: ProbeResult | NothingFound, trial: TrialResult, memory: DeviceMemory | None
) -> dict[str, Any]:
    spec, evidence = trial.spec, trial.evidence
    row: dict[str, Any] = {
        "trial": spec.index,
        "purpose": spec.purpose,
        "microbatch": spec.split.microbatch,
        "accumulation_steps": spec.split.accumulation_steps,
        "replicas": spec.split.replicas,
        "logical_batch": spec.split.logical_batch,
        "group_microbatches": len(spec.sizes),
        "groups_run": trial.groups_run,
        "optimizer_steps_attempted": trial.optimizer_steps_attempted,
        "optimizer_steps_applied": trial.optimizer_steps_applied,
        "precision": spec.precision.value,
        "verdict": trial.verdict.value,
        "is_answer": str(spec.index == result.answer_trial).lower(),
        "source": result.source.value,
        "device_slug": spec.device.slug,
        "device_name": spec.device.name,
        "device_total_bytes": spec.device.total_bytes,
        "limit_bytes": spec.device.limit_bytes,
        "demand_bytes": trial.demand_bytes,
        "wall_s": trial.wall_s,
        "evidence_rule": evidence.rule,
        "evidence": evidence.text,
        "ended_in_phase": evidence.phase,
        "ended_in_group": evidence.group,
        "ended_in_microbatch": evidence.microbatch_index,
        "doubtful": str(evidence.doubtful).lower(),
        "repeats_trial": spec.repeats,
        "allocator": spec.allocator,
    }
    if memory is not None:
        row.update({name: getattr(memory, name) for name in _OF_DEVICE})
    return row
