"""A nursery that is started before it is known what it is for."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from memfit.__main__ import _will_need_virtual_gpu
from memfit.trial import start
from memfit.virtual import CARD_VARIABLE
from memfit.virtual.build import driver_folder
from tests.cli.terminal import WORKLOADS, Running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOST = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def started() -> Iterator[list[start.NurseryProcess]]:
    """Processes that end with the test."""
    made: list[start.NurseryProcess] = []
    yield made
    for process in made:
        process.end()


@pytest.mark.parametrize(
    ("words", "guess"),
    [
        (["probe", "model.py", "--device", "rtx-4090"], True),
        (["probe", "--device=h100-80gb", "model.py"], True),
        (["probe", "model.py", "--device", "mine.toml"], True),
        (["probe", "model.py", "--device", "cpu"], False),
        (["probe", "model.py", "--device", " CUDA"], False),
        (["probe", "model.py", "--device", "cpu", "--device", "a100-80gb"], True),
        (["probe", "model.py", "--device"], True),
        (["probe", "--help"], False),
        (["probe", "model.py", "-h"], False),
        (["probe"], False),
        (["verify", "model.py"], False),
        (["run", "--device", "rtx-4090", "--", "memfit", "probe", "model.py"], False),
        ([], False),
    ],
)
def test_it_is_guessed_from_the_words_whether_a_virtual_gpu_is_needed(
    words: list[str], guess: bool
) -> None:
    assert _will_need_virtual_gpu(words) is guess


@pytest.mark.parametrize("there", [True, False])
def test_without_a_device_it_is_guessed_from_the_machine(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = tmp_path / "nvidiactl"
    if there:
        gpu.touch()
    monkeypatch.setattr("memfit.__main__._GPU", gpu)

    assert _will_need_virtual_gpu(["probe", "model.py"]) is not there


def test_what_was_started_ahead_is_handed_out_once(started: list[start.NurseryProcess]) -> None:
    start.start_ahead(HOST)
    one = start.start({**HOST, CARD_VARIABLE: "told with the workload"})
    other = start.start(HOST)
    started += [one, other]

    assert one is not other
    assert one.process.poll() is None


def test_what_was_started_ahead_for_another_environment_is_ended(
    started: list[start.NurseryProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []
    make = start.NurseryProcess.__init__

    def keep(self: start.NurseryProcess, variables: dict[str, str]) -> None:
        make(self, variables)
        launched.append(self)

    monkeypatch.setattr(start.NurseryProcess, "__init__", keep)
    start.start_ahead({**HOST, "LD_LIBRARY_PATH": "/nowhere"})
    started.append(start.start(HOST))

    ahead, now = launched
    assert ahead.process.returncode is not None
    assert now is started[0]


def test_what_it_prints_is_read_while_it_goes_on(started: list[start.NurseryProcess]) -> None:
    process = start.start({**HOST, "PYTHONVERBOSE": "1"})
    started.append(process)
    until = time.monotonic() + 60
    while not (said := process.output()):
        assert time.monotonic() < until
        time.sleep(0.01)

    assert "import" in said or "#" in said
    assert len(process.output()) <= 1 << 16


def nurseries_of(running: Running) -> list[psutil.Process]:
    """Return the nurseries that a command has started, and the trials that those have forked."""
    found = []
    for child in psutil.Process(running.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "memfit.trial.nursery" in child.cmdline():
                found.append(child)
    return found


HURRIES = """
import sys
from memfit.__main__ import hurry
hurry(["probe", "model.py", "--device", "rtx-4090"])
from memfit.trial import start
print(start._ahead is not None, {"memfit.records", "msgspec", "psutil", "typer"} & set(sys.modules))
"""


@pytest.mark.virtual
def test_it_is_started_before_memfit_is_imported() -> None:
    driver_folder()  # what is not built yet is not built in a hurry
    done = subprocess.run(
        [sys.executable, "-c", HURRIES], capture_output=True, text=True, check=True
    )

    assert done.stdout == "True set()\n"


@pytest.mark.virtual
def test_a_probe_of_a_virtual_gpu_has_no_nursery_but_the_one_that_was_started_ahead(
    tmp_path: Path,
) -> None:
    shutil.copy(WORKLOADS / "gated.py", tmp_path)
    gate = tmp_path / "gate"
    gate.write_text("1:hang")
    running = Running(
        *("probe", "gated.py", "--device", "rtx-4090", "--one-at-a-time", "--out", "out"),
        cwd=tmp_path,
        GATE=gate,
    )
    running.wait_for(tmp_path / "gate.reached")
    nurseries = nurseries_of(running)
    os.killpg(running.pid, signal.SIGKILL)
    running.end()

    assert len(nurseries) == 2  # the nursery, and the trial that it forked
    assert not psutil.wait_procs(nurseries, timeout=20)[1]


@pytest.mark.virtual
def test_a_target_that_is_not_there_leaves_no_process_behind(tmp_path: Path) -> None:
    running = Running("probe", "missing.py", "--device", "rtx-4090", cwd=tmp_path)
    running.wait_until(lambda: nurseries_of(running))

    assert running.end().code == 2
