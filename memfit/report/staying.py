"""Sentences about what becomes of an answer when training goes on; plain text, as in `words`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.allocator import combined, settings_of, variable_for
from memfit.records import DeviceKind
from memfit.units import format_bytes

if TYPE_CHECKING:
    from memfit.records import ProbeResult, Steadiness, TrialResult

_SHOWN = 3
_MANY_GROUPS = 1_000_000


def steadiness(result: ProbeResult) -> str | None:
    """Say whether memory grows from group to group; None where nothing is to be said."""
    found = result.steadiness
    if found is None or (found.verdict == "steady" and found.reason is None):
        return None
    if found.verdict == "growing":
        return _growing(found)
    if found.verdict == "unknown":
        return f"Whether memory grows from group to group is unknown: {found.reason}."
    return f"Memory is steady over {found.groups} groups: {found.reason}."


def grows(result: ProbeResult) -> bool:
    """Whether the answer's memory grows, so that the size does not stay good."""
    return result.steadiness is not None and result.steadiness.verdict == "growing"


def _growing(found: Steadiness) -> str:
    size = format_bytes(found.bytes_per_group or 0)
    text = f"Memory grows by {size} with every group, so this size does not stay good"
    left = found.groups_until_limit
    if left is not None:
        many = f"more than {_MANY_GROUPS:,}" if left > _MANY_GROUPS else f"about {left:,}"
        text += f": the limit is reached after {many} groups"
    if found.places:
        shown = ", ".join(
            f"{place.where} ({format_bytes(place.bytes_per_group)})"
            for place in found.places[:_SHOWN]
        )
        more = len(found.places) - _SHOWN
        text += f". What stays was allocated in {shown}" + (f" and {more} more" if more > 0 else "")
        text += "; look for what keeps it: a list of losses, a retained graph, a cache"
    return f"{text}."


def trace_line(trial: TrialResult) -> str:
    """Say what a trial that traced a growth saw."""
    ends = trial.observed.allocated_after_groups_bytes
    if len(ends) < 2:  # noqa: PLR2004 - a rise is between two groups
        return f"traced: {len(ends)} groups ended"
    rise = (ends[-1] - ends[0]) // (len(ends) - 1)
    return f"traced: {format_bytes(rise)} more after each of {len(ends)} groups, without a limit"


def tuned(result: ProbeResult) -> str | None:
    """Say what another setting of the allocator changes; None where none was tried."""
    found = result.tuned
    if found is None:
        return None
    if found.split is None or found.trial is None:
        tried = f"{found.trials} trial{'' if found.trials == 1 else 's'}"
        if not found.complete:
            when = f"after {tried}" if found.trials else "before a trial"
            return (
                f"Whether {found.allocator} lets a larger microbatch fit is not known: trials or "
                f"time were over {when} with it."
            )
        return f"{found.allocator} lets no larger microbatch fit ({tried})."
    virtual = " (virtual)" if found.trial.spec.device.kind is DeviceKind.VIRTUAL else ""
    peak, limit = found.trial.peak_bytes, found.trial.spec.device.limit_bytes
    told = "" if peak is None else f", peak {format_bytes(peak)} of {format_bytes(limit)}{virtual}"
    steps = found.split.accumulation_steps
    return (
        f"With expandable segments, microbatch {found.split.microbatch} fits as well, with "
        f"{steps} accumulation step{'' if steps == 1 else 's'}{told}: "
        f"`export {export_line(result)}`, and load the plan with `tuned=True`."
    )


def needed_setting(result: ProbeResult) -> str | None:
    """Say what the answer needs of the environment; None when it needs nothing."""
    if result.spec.allocator is None:
        return None
    return f"The answer holds with `export {export_line(result)}`, and was not tried without."


def export_line(result: ProbeResult) -> str:
    """Write the variable and the settings that the environment has to have."""
    present = settings_of(result.environment.variables)
    added = result.spec.allocator or (result.tuned.allocator if result.tuned else "")
    return f"{variable_for(result.environment.torch)}={combined(present, added)}"


def evaluation(result: ProbeResult) -> str | None:
    """Say what an evaluation pass takes; None where none was asked for."""
    found = result.evaluation
    if found is None:
        return None
    if found.peak is None:
        return (
            f"An evaluation pass at microbatch {found.microbatch} did not come to its end "
            f"({found.text}); evaluate with a smaller one. The answer is for training and stands."
        )
    device = result.spec.device
    virtual = " (virtual)" if device.kind is DeviceKind.VIRTUAL else ""
    peak = found.peak.peak_bytes
    told = "its peak was not measured" if peak is None else f"peak {format_bytes(peak)}"
    return (
        f"An evaluation pass at microbatch {found.microbatch} fits too: {told} of "
        f"{format_bytes(device.limit_bytes)}{virtual}."
    )
