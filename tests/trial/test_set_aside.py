"""What a nursery imported is set aside, and the collector keeps the pace of a training program."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc
gc.disable()
imported = [[] for _ in range(1_000_000)]
from memfit.trial.nursery import _set_aside_what_was_imported
_set_aside_what_was_imported()
full = lambda: gc.get_stats()[2]["collections"]
before, frozen = full(), gc.get_freeze_count()
kept = [[] for _ in range({new})]
print(frozen >= 1_000_000, full() - before)
"""


def after(new: int) -> tuple[str, int]:
    """Set a million lists aside and make new ones; return if they are, and full collections."""
    program = PROGRAM.format(new=new)
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    aside, collections = said.stdout.split()
    return aside, int(collections)


def test_a_few_new_objects_bring_no_full_collection_of_their_own() -> None:
    assert after(150_000) == ("True", 0)


def test_as_many_new_objects_as_were_imported_bring_one() -> None:
    aside, collections = after(1_000_000)

    assert aside == "True"
    assert collections >= 1
