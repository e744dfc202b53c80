"""Sentences about what becomes of an answer when training goes on; plain text, as in `words`."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
