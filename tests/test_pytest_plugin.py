"""The plugin in a project's own tests: limits that hold and that fail, and peaks to assert on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

WORKLOADS = Path(__file__).parent / "workloads"
SAMPLE = """
import pytest

CARD = {"target": "places.py", "device": "rtx-3060", "microbatch": 4}

@pytest.mark.memfit_limit("2GiB", **CARD)
def test_fits():
    pass

@pytest.mark.memfit_limit("300MiB", **CARD)
def test_needs_more():
    pass

@pytest.mark.memfit_limit("2GiB", target="places.py", device="rtx-3060", microbatch=200_000)
def test_does_not_fit():
    pass

@pytest.mark.memfit_limit("2GiB", target="places.py", device="rtx-9999")
def test_has_a_card_that_is_none():
    pass

@pytest.mark.memfit_limit("2GiB", size=4, **CARD)
def test_has_a_word_that_is_none():
    pass

def test_peaks(memfit_peaks):
    peaks = memfit_peaks(**CARD)
    assert peaks.fits and peaks.virtual
    assert peaks.allocated_bytes <= peaks.reserved_bytes < peaks.used_bytes
    assert max(peaks.phases.values()) == peaks.allocated_bytes
    assert memfit_peaks(**CARD) is peaks
    sums = [sum(row.bytes[i] for row in peaks.ledger.rows) for i in range(4)]
    assert max(sums) == peaks.allocated_bytes
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest says of the sample project."""
    folder = tmp_path_factory.mktemp("sample")
    (folder / "places.py").write_text((WORKLOADS / "places.py").read_text())
    (folder / "test_memory.py").write_text(SAMPLE)
    installed = any(e.name == "memfit" for e in entry_points(group="pytest11"))
    loaded = [] if installed else ["-p", "memfit.pytest_plugin"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *loaded, "-p", "no:cacheprovider", "--strict-markers"],
        cwd=folder,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


pytestmark = pytest.mark.virtual


def test_what_stays_below_its_limit_passes_and_the_rest_fails(told: str) -> None:
    assert "4 failed, 2 passed" in told


def test_a_limit_that_does_not_hold_says_by_how_much_and_what_takes_it(told: str) -> None:
    assert re.search(r"use \d+\.\d\d MiB of the device, and the limit is 300.00 MiB", told)
    assert "the most of it:" in told
    assert "activations, blocks.[0-2].up, places.py:" in told
    assert "(virtual)" in told


def test_what_does_not_fit_at_all_says_so(told: str) -> None:
    assert "2 microbatches of 200000 (virtual) do not fit on the device" in told


def test_bad_words_are_told_without_a_traceback_of_memfit(told: str) -> None:
    assert "rtx-9999" in told
    assert "hint: " in told
    assert "unexpected keyword argument 'size'" in told
    assert "memfit/pytest_plugin.py" not in told
