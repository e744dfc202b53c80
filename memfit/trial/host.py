"""What the host knows of processes that it killed while a trial ran."""

from __future__ import annotations

from collections.abc import Iterable

from memfit.devices.cgroup import levels, lowest_limit
from memfit.devices.kernel_log import KernelLog, oom_kills_of_the_system
from memfit.records import HostRecord


class HostWatch:
    """Counters of the host from the moment before a trial; `record` says what came since."""

    def __init__(self, pid: int) -> None:
        """Begin to watch.

        Args:
            pid: The process from which those of the trial inherit their control group.
        """
        groups = levels(pid)
        self._group = groups[0] if groups else None
        self._limited = lowest_limit(groups)
        self._group_before = self._group.oom_kills() if self._group else None
        self._system_before = oom_kills_of_the_system()
        self._log = KernelLog()

    def close(self) -> None:
        """Stop watching."""
        self._log.close()

    def record(self, pids: Iterable[int]) -> HostRecord:
        """Say what the kernel counted and wrote since the start.

        Args:
            pids: Processes whose end is to be explained.
        """
        kills = self._log.kills()
        named = [kills[pid] for pid in pids if pid in kills]
        limited = self._limited
        return HostRecord(
            cgroup=limited.path if limited else None,
            cgroup_limit_bytes=limited.limit_bytes if limited else None,
            cgroup_oom_kills=_since(
                self._group_before, self._group.oom_kills() if self._group else None
            ),
            system_oom_kills=_since(self._system_before, oom_kills_of_the_system()),
            kernel_log=(
                "unreadable"
                if not self._log.readable
                else "names it"
                if named
                else "does not name it"
            ),
            kernel_line=named[0] if named else None,
        )


def _since(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before
