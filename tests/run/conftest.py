"""What the tests of `memfit run` share: a folder to run scripts in, on a virtual A100."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from memfit.virtual import find_card, prepare
from tests.cli.terminal import Ended, Running, memfit

CARD = "a100-80gb"


@pytest.fixture(scope="session", autouse=True)
def driver_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of the session's own, so that nothing is written to the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMFIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        # Nothing that starts these tests may look like a launcher, or observe them.
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MEMFIT_RUN_FOLDER"):
            patch.delenv(name, raising=False)
        yield


@dataclass(frozen=True, slots=True)
class Desk:
    """A folder with a script in it."""

    folder: Path

    def write(self, code: str, name: str = "train.py") -> Path:
        path = self.folder / name
        path.write_text(textwrap.dedent(code))
        return path

    def words(self, *options: object, launcher: tuple[str, ...] = ()) -> list[str]:
        started = [*map(str, options), "--", sys.executable, *launcher, "train.py"]
        return ["run", "--device", CARD, *started]

    def run(
        self,
        code: str,
        *options: object,
        launcher: tuple[str, ...] = (),
        **variables: object,
    ) -> Ended:
        """Run a script under memfit to its end."""
        self.write(code)
        return memfit(*self.words(*options, launcher=launcher), cwd=self.folder, **variables)

    def told(self, code: str, *options: object, **more: Any) -> dict[str, Any]:
        """Run a script and return the document about it."""
        return self.run(code, "--json", *options, **more).told

    def start(self, code: str, *options: object) -> Running:
        self.write(code)
        return Running(*self.words(*options), cwd=self.folder)

    def without_observer(self, code: str) -> str:
        """Run a script on the same card with nobody watching, and return what it printed."""
        card = find_card(CARD)
        variables = {**os.environ, **prepare(card, total_bytes=card.total_bytes)}
        done = subprocess.run(
            [sys.executable, str(self.write(code))],
            cwd=self.folder,
            env=variables,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)
