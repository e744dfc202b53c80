"""A probe that is stopped: nothing is left running, nothing finished is lost, and it goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli.terminal import Ended, Running

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.conftest import Bench

    Stop = Callable[[int], None]


def ctrl_c(pid: int) -> None:
    """Signal the whole group, as a terminal does."""
    os.killpg(pid, signal.SIGINT)


def only(number: signal.Signals) -> Stop:
    return lambda pid: os.kill(pid, number)


def stopped(bench: Bench, stop: Stop) -> Ended:
    """Stop the small probe in its third trial, the one at microbatch 8."""
    bench.gate.write_text("8:hang")
    running = Running(*bench.question(), cwd=bench.folder, GATE=bench.gate)
    running.wait_for(bench.reached)
    stop(running.pid)
    return running.end()


def kept_trials(bench: Bench) -> list[dict[str, Any]]:
    assert bench.left() == {"memfit.progress.json"}
    stored: dict[str, Any] = json.loads((bench.folder / "out/memfit.progress.json").read_text())
    trials: list[dict[str, Any]] = stored["trials"]
    return trials


def the_same_answer(one: dict[str, Any], other: dict[str, Any]) -> bool:
    def shown(result: dict[str, Any]) -> Any:
        verdicts = [(trial["spec"]["index"], trial["verdict"]) for trial in result["trials"]]
        return result["split"], result["certificate"], verdicts

    return bool(shown(one) == shown(other))


def test_ctrl_c_keeps_finished_trials_and_the_same_command_goes_on(
    bench: Bench, answered: tuple[Bench, Ended]
) -> None:
    ended = stopped(bench, ctrl_c)

    assert (ended.code, ended.out, ended.error) == (130, "", "interrupted")
    assert ended.hint == "finished trials are kept in out: run the same command to go on"
    kept = kept_trials(bench)
    assert [trial["verdict"] for trial in kept] == ["fits", "fits"]

    other = bench.ask("--seed", "3")
    assert other.code == 2
    assert other.error == "out holds an unfinished probe of another question: seed was 0, is 3"
    assert "--force" in other.hint
    assert kept_trials(bench) == kept

    again = bench.ask("--json")
    assert again.code == 0
    assert "going on after 2 finished trials of an earlier run" in again.err
    assert "trial 2:" not in again.err
    assert again.told["trials"][:2] == kept
    assert the_same_answer(again.told, answered[1].told)
    assert "memfit.progress.json" not in bench.left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_memfit_alone_ends_it_as_well(bench: Bench, number: signal.Signals) -> None:
    ended = stopped(bench, only(number))

    assert (ended.code, ended.error) == (130, "interrupted")
    assert len(kept_trials(bench)) == 2


def test_a_kill_of_memfit_leaves_no_process_and_the_same_command_goes_on(bench: Bench) -> None:
    ended = stopped(bench, only(signal.SIGKILL))

    assert ended.code == -signal.SIGKILL
    kept = kept_trials(bench)
    again = bench.ask("--json")
    assert again.code == 0
    assert again.told["trials"][:2] == kept


def test_ctrl_c_while_torch_is_imported_leaves_nothing(bench: Bench) -> None:
    bench.gate.touch()
    running = Running(*bench.question(), cwd=bench.folder, GATE=bench.gate)
    running.wait_for_child()
    ctrl_c(running.pid)
    ended = running.end()

    assert (ended.code, ended.out, ended.error) == (130, "", "interrupted")
    assert not (bench.folder / "out").exists()


def test_no_temporary_files_are_left(bench: Bench, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    bench.gate.write_text("1:hang")
    running = Running(*bench.question(), cwd=bench.folder, GATE=bench.gate, TMPDIR=temporary)
    running.wait_for(bench.reached)
    ctrl_c(running.pid)

    assert running.end().code == 130
    assert not list(temporary.glob("memfit*"))
    assert not (bench.folder / "out").exists()


def test_ctrl_c_while_the_command_line_is_imported_ends_without_a_traceback() -> None:
    code = """
import os, signal, sys
from memfit.__main__ import main

class Interrupts:
    def find_spec(self, name, path, target=None):
        if name == "memfit.cli":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")
