"""Numbered siblings told as one: `layers.0.mlp` to `layers.11.mlp` are `layers.[0-11].mlp`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

_RANGE = re.compile(r"\[(\d+)-(\d+)\]")


def fold(paths: Iterable[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Fold paths that differ in one number, where the numbers follow each other.

    Returns:
        Each folded path with the paths that it stands for, sorted.
    """
    left = sorted(set(paths), key=natural)
    found: list[tuple[str, tuple[str, ...]]] = []
    depth = max((path.count(".") for path in left), default=0) + 1
    for at in range(depth):
        groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for path in left:
            parts = path.split(".")
            if at < len(parts) and parts[at].isdecimal() and str(int(parts[at])) == parts[at]:
                groups[(*parts[:at], "", *parts[at + 1 :])].append(int(parts[at]))
        for others, numbers in groups.items():
            for first, last in _runs(sorted(numbers)):
                if first == last:
                    continue
                members = tuple(_with(others, at, str(n)) for n in range(first, last + 1))
                found.append((_with(others, at, f"[{first}-{last}]"), members))
        taken = {path for _, members in found for path in members}
        left = [path for path in left if path not in taken]
    found.extend((path, (path,)) for path in left)
    return sorted(found, key=lambda pair: natural(pair[0]))


def unfold(path: str) -> tuple[str, ...]:
    """Return the paths that a folded one stands for."""
    match = _RANGE.search(path)
    if match is None:
        return (path,)
    first, last = int(match[1]), int(match[2])
    return tuple(
        path[: match.start()] + str(n) + path[match.end() :] for n in range(first, last + 1)
    )


def natural(path: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key by which `layers.2` comes before `layers.10`."""
    return tuple(
        (0, int(part), "") if part.isdecimal() else (1, 0, part) for part in path.split(".")
    )


def _with(parts: Sequence[str], at: int, part: str) -> str:
    return ".".join([*parts[:at], part, *parts[at + 1 :]])


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Cut sorted numbers into runs without a gap, each told by its first and last."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs
