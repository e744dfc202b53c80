"""A disk that is full: the answer is still told, and what is on the disk is whole."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.cli.terminal import PATIENCE_S, Ended, command, environment

if TYPE_CHECKING:
    from tests.cli.conftest import Bench

ON_A_SMALL_DISK = """
mount -t tmpfs -o size="$SIZE" tmpfs disk || exit 99
"$@"
code=$?
[ ! -d disk/out ] || cp -r disk/out kept
exit $code
"""


def _refusal() -> str | None:
    """Why a small disk cannot be mounted here."""
    if shutil.which("unshare") is None:
        return "there is no unshare"
    tried = subprocess.run(
        ["unshare", "-Urm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"],
        capture_output=True,
        text=True,
        check=False,
    )
    return tried.stderr.strip() or None


pytestmark = pytest.mark.skipif(_refusal() is not None, reason=f"no small disk: {_refusal()}")


def ask(bench: Bench, size: str) -> tuple[Ended, set[str]]:
    """Run the small probe with its folder on a disk of this size, and list what it left."""
    (bench.folder / "disk").mkdir()
    bench.gate.touch()
    words = [*bench.question("--json")]
    words[words.index("out")] = "disk/out"
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", ON_A_SMALL_DISK, "sh", *command(*words)],
        cwd=bench.folder,
        env=environment(SIZE=size, GATE=bench.gate),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    kept = bench.folder / "kept"
    names = {path.name for path in kept.iterdir()} if kept.exists() else set()
    return Ended(done.returncode, done.stdout, done.stderr), names


def test_without_room_for_anything_the_answer_is_still_told(bench: Bench) -> None:
    ended, names = ask(bench, "4k")

    assert ended.code == 5
    assert ended.told["split"]["microbatch"] == 8
    assert ended.error.startswith("cannot write disk/out/memfit.json (")
    assert "No space left on device; 4096 bytes are free" in ended.error
    assert "make room" in ended.hint
    assert "warning: cannot write disk/out/memfit.progress.json" in ended.err
    assert "the search goes on, but cannot be resumed" in ended.err
    assert names == set()


def test_without_room_for_the_answer_the_finished_trials_stay(bench: Bench) -> None:
    ended, names = ask(bench, "20k")

    assert ended.code == 5
    assert ended.told["split"]["microbatch"] == 8
    assert ended.error.startswith("cannot write disk/out/memfit.json (")
    assert names == {"memfit.progress.json"}
    assert len(json.loads((bench.folder / "kept/memfit.progress.json").read_text())["trials"]) > 0


def test_without_room_for_the_page_the_answer_is_saved(bench: Bench) -> None:
    ended, names = ask(bench, "48k")

    assert ended.code == 5
    assert ended.error.startswith("cannot write disk/out/report.html (")
    assert ended.hint == (
        "the answer is saved in disk/out/memfit.json: make room, and "
        "`memfit report disk/out/memfit.json` makes the page"
    )
    assert names == {"memfit.json", "trials.csv"}
    assert json.loads((bench.folder / "kept/memfit.json").read_text()) == ended.told
