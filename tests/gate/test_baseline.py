"""The committed file: written for people, read back whole, refused when it is not sound."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from memfit.baseline import Baseline, encode, read_baseline, write_baseline, writing
from memfit.errors import CannotJudge, UsageError
from tests.gate.test_gate import entry, ledger, row

ENTRY = entry(rows=ledger(row("activations", "layers.[0-3]", 'x = "é|"', 100)))
BASELINE = Baseline(entries={"b": ENTRY, "a": replace(ENTRY, ledger=None, fits_on={"l4": True})})


def stored(path: Path) -> Path:
    write_baseline(path / "baseline.json", BASELINE)
    return path / "baseline.json"


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    found = read_baseline(stored(tmp_path))

    assert found.entries["a"] == BASELINE.entries["a"]
    assert found.entries["b"].ledger is not None
    assert encode(found) == encode(BASELINE)


def test_workloads_are_sorted_and_each_row_has_a_line_of_its_own() -> None:
    lines = encode(BASELINE).decode().splitlines()

    assert [line.strip() for line in lines if line.startswith('    "')] == ['"a": {', '"b": {']
    assert '          ["activations", "layers.[0-3]", "model.py:1", [100]]' in lines


def test_an_equal_baseline_is_not_written_again(tmp_path: Path) -> None:
    path = stored(tmp_path)
    os.utime(path, (0, 0))

    assert not write_baseline(path, BASELINE)
    assert path.stat().st_mtime == 0


def test_a_baseline_that_is_not_there_cannot_be_judged(tmp_path: Path) -> None:
    with pytest.raises(CannotJudge, match="there is no baseline"):
        read_baseline(tmp_path / "baseline.json")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: "hello", "not a memfit document"),
        (lambda text: text[: len(text) // 2], "not a memfit document|damaged"),
        (lambda text: "", "not a memfit document"),
        (lambda text: text.replace('"schema_version": 1', '"schema_version": 999'), "999"),
        (lambda text: text.replace("memfit.baseline", "memfit.probe"), "memfit.probe"),
        (lambda text: text.replace("[100]", "[100, 100]"), "damaged: a row"),
        (lambda text: text.replace('"rank": 0', '"rank": "zero"'), "damaged"),
    ],
)
def test_a_baseline_that_is_not_sound_is_refused(
    tmp_path: Path, damage: object, message: str
) -> None:
    path = stored(tmp_path)
    path.write_text(damage(path.read_text()))  # type: ignore[operator]

    with pytest.raises(UsageError, match=message):
        read_baseline(path)


def test_only_one_update_writes_a_baseline_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    with writing(path), pytest.raises(UsageError, match="another memfit"), writing(path):
        pass
    with writing(path):
        pass


def test_the_file_is_plain_json() -> None:
    assert json.loads(encode(BASELINE))["workloads"]["b"]["fingerprint"]["card"] == "RTX 4090"
    assert json.loads(encode(Baseline()))["workloads"] == {}
