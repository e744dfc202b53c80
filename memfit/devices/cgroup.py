"""Control groups: the limits on this machine's memory, and the kernel's count of what it killed.

Both versions: files of version 1 are described in the kernel's `admin-guide/cgroup-v1/memory.rst`,
those of version 2 in `admin-guide/cgroup-v2.rst`. Where there are none, nothing is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT = 1 << 60
"""Version 1 writes "no limit" as the largest number of pages; no machine has this much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One control group among those that a process is in, from its own up to the root."""

    path: str
    """As the process is told it, such as `/user.slice/job_7`."""
    limit_bytes: int | None
    events: Path
    """The file in which the kernel counts."""

    def oom_kills(self) -> int | None:
        """Processes that the kernel has killed in it for want of memory; None if not counted."""
        return _counter(self.events, "oom_kill")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hierarchy:
    """Where one version of the memory controller is mounted."""

    root: str
    """Group that the mount point shows."""
    mount: Path
    version: int


def levels(pid: int | str = "self", *, proc: Path = Path("/proc")) -> tuple[Level, ...]:
    """Return the memory groups of a process, its own first; empty where there are none.

    Args:
        pid: The process.
        proc: Where the process file system is mounted.
    """
    try:
        mounts = (proc / "self/mountinfo").read_text()
        groups = (proc / str(pid) / "cgroup").read_text()
    except OSError:
        return ()
    for hierarchy in _hierarchies(mounts):
        path = _path_of(groups, hierarchy.version)
        if path is not None:
            found = _walk(hierarchy, path)
            if found:
                return found
    return ()


def lowest_limit(found: tuple[Level, ...]) -> Level | None:
    """Return the level with the lowest limit, or None where nothing is limited."""
    limited = [level for level in found if level.limit_bytes is not None]
    return min(limited, key=lambda level: level.limit_bytes or 0, default=None)


def _hierarchies(mounts: str) -> list[_Hierarchy]:
    """Find the memory controller of version 1, then version 2, which may be without it."""
    found = []
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.partition(" ")
        controllers = options.rpartition(" ")[2].split(",")
        version = 2 if kind == "cgroup2" else 1 if kind == "cgroup" else 0
        if version == 2 or (version == 1 and "memory" in controllers):  # noqa: PLR2004
            root, mount = fields.split()[3:5]
            found.append(_Hierarchy(root=root, mount=Path(mount), version=version))
    return sorted(found, key=lambda hierarchy: hierarchy.version)


def _path_of(groups: str, version: int) -> str | None:
    for line in groups.splitlines():
        number, controllers, path = line.split(":", 2)
        if version == 1 and "memory" in controllers.split(","):
            return path
        if version == 2 and (number, controllers) == ("0", ""):  # noqa: PLR2004
            return path
    return None


def _walk(hierarchy: _Hierarchy, path: str) -> tuple[Level, ...]:
    """Read a group and those above it, as far as the mount point shows them."""
    below = path.removeprefix(hierarchy.root if hierarchy.root != "/" else "")
    parts = [part for part in below.split("/") if part not in ("", "..")]
    found = []
    for depth in range(len(parts), -1, -1):
        folder = hierarchy.mount.joinpath(*parts[:depth])
        name = "/" + "/".join(parts[:depth])
        level = _level(folder, name, hierarchy.version)
        if level is not None:
            found.append(level)
    return tuple(found)


def _level(folder: Path, name: str, version: int) -> Level | None:
    limit, events = (
        ("memory.max", "memory.events")
        if version == 2  # noqa: PLR2004
        else ("memory.limit_in_bytes", "memory.oom_control")
    )
    if not (folder / limit).exists() and not (folder / events).exists():
        return None
    allowed = _number(folder / limit)
    return Level(
        path=name,
        limit_bytes=allowed if allowed is not None and allowed < _NO_LIMIT else None,
        events=folder / events,
    )


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # `max` is no number, and no limit
        return None


def _counter(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    values = (value for key, _, value in (line.partition(" ") for line in lines) if key == name)
    return next((int(value) for value in values if value.isdigit()), None)
