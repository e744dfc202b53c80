"""Checking a workload that a test writes, in this process."""

from __future__ import annotations

import itertools
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import torch

from memfit.verify.events import Expected
from memfit.verify.findings import decide
from memfit.verify.worker.loops import watch_script
from memfit.verify.worker.subject import Subject
from memfit.verify.worker.workload import WorkloadCheck
from memfit.workload import load

if TYPE_CHECKING:
    from pathlib import Path

    from memfit.verification import Finding, LoopSeen, Outcome
    from memfit.verify.worker.workload import Checked

_numbers = itertools.count()

HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn
import memfit
"""


def write(folder: Path, source: str) -> Path:
    """Write a workload under a name that no other module has."""
    path = folder / f"verified_{next(_numbers)}.py"
    path.write_text(HEAD + textwrap.dedent(source))
    return path


def check(
    folder: Path,
    source: str,
    *,
    logical_batch: int = 8,
    microbatch: int | None = None,
    parameters: dict[str, Any] | None = None,
) -> Checked:
    """Check a workload that a test writes."""
    return check_target(
        str(write(folder, source)),
        logical_batch=logical_batch,
        microbatch=microbatch,
        parameters=parameters,
    )


def check_target(
    target: str,
    *,
    logical_batch: int = 8,
    microbatch: int | None = None,
    parameters: dict[str, Any] | None = None,
) -> Checked:
    """Check a workload by its name."""
    loaded = load(target, parameters or {})
    try:
        subject = Subject(loaded, "cpu", 0)
        return WorkloadCheck(subject, logical_batch, microbatch, lambda _: None).run()
    finally:
        torch.set_default_dtype(torch.float32)


def outcome(checked: Checked) -> Outcome:
    """Return the answer."""
    return decide(checked.findings, compared=bool(checked.comparisons))


def codes(checked: Checked) -> list[str]:
    """Return the codes of what was found."""
    return [found.code for found in checked.findings]


def line_of(source: str, text: str) -> int:
    """Return the number of the line that holds a text, in the file that `write` makes."""
    lines = (HEAD + textwrap.dedent(source)).splitlines()
    return 1 + next(i for i, line in enumerate(lines) if text in line)


def watch(
    folder: Path,
    source: str,
    *,
    steps: int | None = None,
    logical_batch: int | None = None,
    seconds: float = 60.0,
) -> tuple[list[Finding], LoopSeen]:
    """Run a script under the watch."""
    path = folder / f"train_{next(_numbers)}.py"
    path.write_text(HEAD + textwrap.dedent(source))
    before = sys.argv, sys.path[:]
    try:
        expected = Expected(microbatches=steps, logical_batch=logical_batch)
        return watch_script(str(path), [], expected, seconds)
    finally:
        sys.argv, sys.path[:] = before
