"""What the tests of the virtual GPU share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from memfit.virtual import find_card, prepare

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture(scope="session", autouse=True)
def driver_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of the session's own, so that nothing is written to the user's."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMFIT_CACHE", str(folder))
        yield folder


@dataclass(frozen=True)
class Nursery:
    """A process with torch imported, whose children run scripts on a virtual card."""

    process: subprocess.Popen[str]

    def run(
        self,
        code: str,
        *,
        card: str = "rtx-4090",
        total_bytes: int | None = None,
        devices: int = 1,
        env: dict[str, str] | None = None,
        may_fail: bool = False,
    ) -> str:
        """Run a script and return what it printed."""
        known = find_card(card)
        variables = prepare(known, total_bytes=total_bytes or known.total_bytes, devices=devices)
        request = {"code": textwrap.dedent(code), "env": variables | (env or {})}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        assert may_fail or answer["status"] == 0, answer["output"]
        return str(answer["output"])

    def value(self, code: str, **options: Any) -> Any:
        """Run a script and return the last line that it printed, as JSON."""
        return json.loads(self.run(code, **options).splitlines()[-1])


@pytest.fixture(scope="session")
def nursery(driver_cache: Path) -> Iterator[Nursery]:
    card = find_card("rtx-4090")
    process = subprocess.Popen(
        [sys.executable, str(HERE / "nursery.py")],
        env={**os.environ, **prepare(card, total_bytes=card.total_bytes), "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield Nursery(process)
    assert process.stdin is not None
    process.stdin.close()
    process.wait(timeout=30)
    if process.stdout is not None:
        process.stdout.close()


@pytest.fixture
def on_card(nursery: Nursery) -> Callable[..., Any]:
    return nursery.value
