"""A process that was started without stdout still ends as its answer says."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.cli.terminal import command, environment

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("words", "code"), [(("gpus",), 0), (("gpus", "--json"), 0), (("probe", "nosuch.py"), 2)]
)
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_closed_streams_change_no_exit_status(
    closed: str, words: tuple[str, ...], code: int, tmp_path: Path
) -> None:
    line = f'"$@" {closed}'
    done = subprocess.run(
        ["sh", "-c", line, "sh", *command(*words)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == code
    assert "Traceback" not in done.stderr
