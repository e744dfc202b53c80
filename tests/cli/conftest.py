"""One finished probe for all tests that only look at an answer."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.cli.terminal import WORKLOADS, Ended, memfit

if TYPE_CHECKING:
    from pathlib import Path

QUESTION = ("--device", "cpu", "--memory-limit", "2GiB", "-B", "8")


@dataclass(frozen=True, slots=True)
class Bench:
    """A folder with a workload behind a gate."""

    folder: Path

    @property
    def gate(self) -> Path:
        """The file that says what the workload does."""
        return self.folder / "gate"

    @property
    def reached(self) -> Path:
        """The file that is there once the workload hangs."""
        return self.folder / "gate.reached"

    def question(self, *more: str) -> tuple[str, ...]:
        """Words of a small probe: trials at microbatches 1, 2 and 8."""
        return ("probe", "gated.py", *QUESTION, "--out", "out", *more)

    def ask(self, *more: str, gate: str = "") -> Ended:
        """Run the small probe to its end."""
        self.gate.write_text(gate)
        return memfit(*self.question(*more), cwd=self.folder, GATE=self.gate)

    def left(self) -> set[str]:
        """Names in the output folder."""
        return {path.name for path in (self.folder / "out").iterdir()}


def make_bench(folder: Path) -> Bench:
    shutil.copy(WORKLOADS / "gated.py", folder)
    return Bench(folder)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return make_bench(tmp_path)


@pytest.fixture(scope="session")
def answered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bench, Ended]:
    """A finished probe, asked with --json. Tests leave it as it is."""
    bench = make_bench(tmp_path_factory.mktemp("answered"))
    return bench, bench.ask("--json")
