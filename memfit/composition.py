"""From a ledger to the parts of a peak, once it is known that both are of the same peak."""

from __future__ import annotations

from dataclasses import replace

from memfit.records import Composition, Ledger, TrialResult, Verdict

_RAN = (Verdict.FITS, Verdict.THRASH)
"""Verdicts of trials that ran all their groups; how the allocator laid them out is not told."""
_NEAR = 0.01
"""Part of a peak by which that of a shorter group may differ."""


def composition_of(ledger: Ledger) -> Composition:
    """Sum a ledger's highest peak up by category."""
    at = ledger.highest
    sums: dict[str, int] = {}
    for row in ledger.rows:
        sums[row.category] = sums.get(row.category, 0) + row.bytes[at]
    return Composition(
        phase=ledger.peaks[at].phase,
        parameters_bytes=sums.pop("parameters", 0),
        buffers_bytes=sums.pop("buffers", 0),
        gradients_bytes=sums.pop("gradients", 0),
        optimizer_state_bytes=sums.pop("optimizer state", 0),
        activations_bytes=sums.pop("activations", 0),
        temporary_bytes=sums.pop("temporary", 0),
        other_bytes=sum(sums.values()),
        by_block=True,
    )


def with_ledger(measured: TrialResult, noted: TrialResult) -> TrialResult:
    """Give a measured trial the ledger of another, where their peaks are equal to the byte.

    Args:
        measured: The trial that counts.
        noted: The same trial, run once more with `record_ledger`.

    Returns:
        The measured trial with the ledger and the parts of its peak; unchanged where the other
        has no ledger or other peaks.
    """
    if noted.verdict not in _RAN or noted.ledger is None:
        return measured
    if _peaks(measured) != _peaks(noted):
        return measured
    return replace(measured, ledger=noted.ledger, composition=composition_of(noted.ledger))


def with_near_ledger(measured: TrialResult, noted: TrialResult) -> TrialResult:
    """Give a measured trial the ledger of a shorter group that has nearly the same peak.

    Where a block is larger than what it was asked for depends on the blocks before it, so a longer
    group can peak a little higher. The parts of the measured peak stay what they are.

    Returns:
        The measured trial with the ledger; unchanged where the other's peak is in another phase or
        more than one percent off.
    """
    if noted.verdict not in _RAN or noted.ledger is None or measured.composition is None:
        return measured
    highest = noted.ledger.peaks[noted.ledger.highest]
    peak = measured.peak_allocated_bytes
    if peak is None or highest.phase != measured.composition.phase:
        return measured
    if abs(highest.allocated_bytes - peak) > _NEAR * peak:
        return measured
    return replace(measured, ledger=noted.ledger)


def _peaks(trial: TrialResult) -> dict[tuple[int, int, str, str], int | None]:
    return {
        (device.rank, device.device, phase.phase, phase.groups): phase.peak_allocated_bytes
        for device in trial.devices
        for phase in device.phases
    }
