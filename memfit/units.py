"""Bytes in and out: GiB is 2**30, GB is 10**9, and both are accepted."""

from __future__ import annotations

import re

from memfit.errors import UsageError

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_FACTORS = {
    "": 1,
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


def parse_bytes(text: str) -> int:
    """Read a size such as `20GiB`, `500MB` or `1073741824`.

    Returns:
        The size in bytes, rounded down.

    Raises:
        UsageError: When the text is no size.
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise UsageError(
            f"{text!r} is not a size", hint="write it as 20GiB, 500MB or a number of bytes"
        )
    return int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


def parse_share(text: str, total_bytes: int) -> int:
    """Read a size, or a percentage of `total_bytes`, and return bytes.

    Raises:
        UsageError: When the text is neither, or the percentage is not below 100.
    """
    match = _PERCENT.fullmatch(text)
    if match is None:
        return parse_bytes(text)
    percent = float(match[1])
    if percent >= 100:  # noqa: PLR2004
        raise UsageError(
            f"{text!r} leaves nothing of the device", hint="use a percentage below 100%"
        )
    return int(total_bytes * percent / 100)


def format_bytes(size: int) -> str:
    """Write a size for people, in binary units: `23.5 GiB`, `512 MiB`, `0 B`."""
    magnitude = abs(size)
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if magnitude >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size} B"


def format_seconds(seconds: float) -> str:
    """Write a duration for people: `0.42 s`, `12.3 s`, `3 min 05 s`."""
    if seconds < 60:  # noqa: PLR2004
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"  # noqa: PLR2004
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"
