"""A process that was started without stdout still ends as its answer says."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.cli.terminal import command, environment, memfit

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


def test_a_word_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    name = os.fsdecode(b"bad\xff.py")
    (tmp_path / name).write_text("")
    ended = memfit("probe", name, cwd=tmp_path)

    assert ended.code == 2
    assert ended.error == r"b'bad\xff.py' is not UTF-8, and results are written in it"
