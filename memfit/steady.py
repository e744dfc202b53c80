"""Whether memory stays what it was from group to group, told from what was allocated. Pure.

Some things grow once and stop: the first optimizer step makes state, caches fill, libraries take
their workspaces. So growth in the answer's own trial is only a suspicion; it is put to a trial of
its own, which runs more groups and notes where the blocks come from that stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.records import Steadiness, TrialResult

if TYPE_CHECKING:
    from collections.abc import Sequence

TRACED_GROUPS = 9
"""Groups of the trial that traces a growth; only the later half of them counts."""
_TELLING = 3
"""The least groups from which anything shows: the first makes the optimizer's state."""


def suspicious(ends: Sequence[int]) -> bool:
    """Whether what is allocated after each group rose from the first to the middle and on."""
    middle = len(ends) // 2
    return len(ends) >= _TELLING and ends[-1] > ends[middle] > ends[0]


def judge(trial: TrialResult, traced: TrialResult | None) -> Steadiness:
    """Say whether the memory of the answer grows.

    Args:
        trial: The trial that the answer stands on.
        traced: The trial that traced its growth; None where there was nothing to trace.
    """
    ends = trial.observed.allocated_after_groups_bytes
    if len(ends) < _TELLING:
        few = f"{len(ends)} groups are too few to tell"
        reason = few if ends else "no allocator counts here what is in use"
        return Steadiness(verdict="unknown", groups=trial.groups_run, reason=reason)
    if not suspicious(ends):
        return Steadiness(verdict="steady", groups=len(ends))
    seen = traced.observed.allocated_after_groups_bytes if traced is not None else ()
    later = seen[len(seen) // 2 :]
    if traced is None or len(later) < _TELLING:
        how = "was not run" if traced is None else f"ended too early ({traced.verdict})"
        reason = f"it rose from group to group, and the trial that was to trace it {how}"
        return Steadiness(verdict="unknown", groups=len(ends), reason=reason)
    if not suspicious(later):
        reason = "it rose at first and then stopped"
        return Steadiness(verdict="steady", groups=len(seen), reason=reason)
    rise = (later[-1] - later[0]) // (len(later) - 1)
    room = max(trial.spec.device.limit_bytes - (trial.demand_bytes or 0), 0)
    return Steadiness(
        verdict="growing",
        groups=len(seen),
        bytes_per_group=rise,
        groups_until_limit=None if trial.demand_bytes is None else len(ends) + room // rise,
        places=traced.observed.growth_places,
    )
