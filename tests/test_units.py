"""Bytes and seconds, in and out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.errors import UsageError
from memfit.units import (
    GIB,
    KIB,
    MIB,
    TIB,
    format_bytes,
    format_seconds,
    parse_bytes,
    parse_share,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1073741824", GIB),
        ("20GiB", 20 * GIB),
        ("20 gib", 20 * GIB),
        (" 1.5GiB ", 3 * GIB // 2),
        ("500MB", 500 * 10**6),
        ("1GB", 10**9),
        ("2TB", 2 * 10**12),
        ("1TiB", TIB),
        ("3kib", 3 * KIB),
        ("7B", 7),
        ("0.5 B", 0),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1GiBs", "1,5GiB", "1 G iB", "nan", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size") as raised:
        parse_bytes(text)
    assert raised.value.hint is not None
    assert raised.value.exit_code == 2


def test_shares_are_read() -> None:
    assert parse_share("10%", 1000) == 100
    assert parse_share(" 2.5 % ", 1000) == 25
    assert parse_share("512MiB", 1000) == 512 * MIB
    assert parse_share("0%", 1000) == 0


@pytest.mark.parametrize("text", ["100%", "250%"])
def test_a_share_has_to_leave_something(text: str) -> None:
    with pytest.raises(UsageError, match="leaves nothing"):
        parse_share(text, 1000)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1.00 KiB"),
        (512 * MIB, "512.00 MiB"),
        (23 * GIB + GIB // 2, "23.50 GiB"),
        (2 * TIB, "2.00 TiB"),
        (-3 * MIB, "-3.00 MiB"),
    ],
)
def test_sizes_are_written(size: int, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(0, 10**15))
def test_a_written_size_reads_back_to_two_places(size: int) -> None:
    again = parse_bytes(format_bytes(size))
    assert abs(again - size) <= size * 0.006 + 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.418, "0.42 s"),
        (9.99, "9.99 s"),
        (12.34, "12.3 s"),
        (60, "1 min 00 s"),
        (185.4, "3 min 05 s"),
    ],
)
def test_durations_are_written(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
