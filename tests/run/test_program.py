"""Any program runs as it would without memfit: its words, its streams, its end."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import psutil
import pytest

from memfit.run import RunRequest, run_program
from tests.cli.terminal import memfit
from tests.run.conftest import CARD, Desk

pytestmark = pytest.mark.virtual


def test_a_script_without_torch_is_left_alone(desk: Desk) -> None:
    ended = desk.run("""
        import sys
        import json as something_else
        print("torch" in sys.modules, "memfit_watch" in sys.modules)
        print([entry for entry in sys.path if "observer" in entry])
        print("to stderr", file=sys.stderr)
    """)
    assert (ended.code, ended.out) == (0, "False False\n[]\n")
    assert ended.err.startswith("to stderr\n")
    assert "no process of this program used the virtual device" in ended.err


def test_a_sitecustomize_of_the_users_own_still_runs(desk: Desk) -> None:
    own = desk.folder / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import builtins\nbuiltins.customized = __file__\n")
    found = os.pathsep.join((str(own), os.environ.get("PYTHONPATH", "")))
    ended = desk.run("import sitecustomize; print(customized)", PYTHONPATH=found)
    assert ended.out.strip() == str(own / "sitecustomize.py")


def test_another_torch_is_told_and_an_observer_that_fails_ends_nothing(desk: Desk) -> None:
    other = desk.folder / "other"
    other.mkdir()
    fake = "__version__ = '0.1'\nclass _C:\n    _cuda_getDeviceCount = print\n"
    (other / "torch.py").write_text(fake)
    ended = desk.run("import sys; sys.path.insert(0, 'other'); import torch; print(torch._C)")
    assert (ended.code, ended.out) == (0, "<class 'torch._C'>\n")
    first, second = ended.err.splitlines()[:2]
    assert "imports torch 0.1, and the virtual GPU was built for memfit's own torch" in first
    assert "is not observed" in second


@pytest.mark.parametrize(
    ("code", "status", "signal_name"),
    [
        ("raise SystemExit(7)", 7, None),
        ("import os; os._exit(70)", 70, None),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", 143, "SIGTERM"),
    ],
)
def test_the_exit_status_is_the_programs_own(
    desk: Desk, code: str, status: int, signal_name: str | None
) -> None:
    ended = desk.run(f"print('said', flush=True)\n{code}", "--json")
    assert ended.code == status
    assert (ended.told["exit_status"], ended.told["signal"]) == (status, signal_name)
    assert ended.err.startswith("said\n")  # with --json, stdout is the document alone


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("os.kill(os.getpid(), 9)", "ended by SIGKILL, before any process told what it used"),
        ("os.abort()", "ended by SIGABRT, before any process told what it used"),
        ("os._exit(3)", "no process of this program told of a use of the virtual device"),
    ],
)
def test_a_program_that_ends_before_it_tells_anything_is_not_said_to_have_used_nothing(
    desk: Desk, code: str, said: str
) -> None:
    ended = desk.run(f"import os\n{code}")
    assert said in ended.err
    assert "used the virtual device" not in ended.err.replace(said, "")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--device", CARD], "there is no program to run"),
        (["--device", CARD, "--"], "there is no program to run"),
        (["--device", CARD, "--", "no-such-program"], "there is no program named no-such-program"),
        (["--device", CARD, "--", "./train.py"], "./train.py is not executable"),
        (["--device", CARD, "--", "/tmp"], "/tmp is a folder, not a program"),
        (["--device", "h900", "--", "true"], "there is no virtual GPU named 'h900'"),
        (["--device", "cuda", "--", "true"], "memfit run imitates a card, and 'cuda' is none"),
        (["--", "true"], "no card is named"),
        (
            ["--device", CARD, "--memory-limit", "1TiB", "--", "true"],
            "--memory-limit 1TiB is above",
        ),
        (["--device", CARD, "--out", "train.py", "--", "true"], "train.py exists"),
        (["--device", CARD, "--out", "no/where", "--", "true"], "there is no folder no"),
    ],
)
def test_wrong_words_end_with_status_2(desk: Desk, words: list[str], error: str) -> None:
    desk.write("")
    ended = memfit("run", *words, cwd=desk.folder)
    assert (ended.code, ended.out) == (2, "")
    assert ended.error.startswith(error)
    assert ended.hint


def test_the_number_of_devices_has_bounds(desk: Desk) -> None:
    words = ("--device", CARD, "--devices", "99", "--", "true")
    ended = memfit("run", *words, cwd=desk.folder)
    assert ended.code == 2
    assert ended.error == "99 virtual devices were asked for; there can be 1 to 16"


def test_a_file_that_is_no_program_is_told(desk: Desk) -> None:
    desk.write("no #! line").chmod(0o755)
    ended = memfit("run", "--device", CARD, "--", "./train.py", cwd=desk.folder)
    assert (ended.code, ended.error) == (2, "./train.py cannot be run: Exec format error")


def test_without_a_compiler_it_cannot_judge(desk: Desk) -> None:
    ended = desk.run("", PATH=desk.folder)
    assert ended.code == 5
    assert ended.error.startswith("no virtual GPU: there is no cc")


def test_out_holds_the_document_and_the_table_is_still_told(desk: Desk) -> None:
    ended = desk.run("print('said')", "--out", "run.json")
    document = json.loads((desk.folder / "run.json").read_text())
    assert (document["schema"], document["schema_version"]) == ("memfit.run", 1)
    assert document["program"] == [sys.executable, "train.py"]
    assert ended.out == "said\n"
    assert "on virtual NVIDIA A100-SXM4-80GB: 79.15 GiB (virtual)" in ended.err


SLEEPS = """
    import pathlib, subprocess, sys, time
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True)
    pathlib.Path("child").write_text(str(child.pid))
    if len(sys.argv) == 1:
        time.sleep(600)
"""


def runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_the_program_and_everything_below_it(
    desk: Desk, number: signal.Signals, status: int
) -> None:
    running = desk.start(SLEEPS, "--json")
    running.wait_for(desk.folder / "child")
    time.sleep(0.2)
    os.kill(running.pid, number)
    ended = running.end()  # which also sees that nothing is left
    assert ended.code == status
    assert ended.told["signal"] == number.name
    assert not runs(int((desk.folder / "child").read_text()))


def test_nothing_of_it_stays_in_the_process_that_started_it(desk: Desk) -> None:
    before = dict(os.environ), [signal.getsignal(n) for n in (1, 2, 15)]
    desk.write("raise SystemExit(3)")
    program = [sys.executable, str(desk.folder / "train.py")]
    result = run_program(RunRequest(program=program, device=CARD))
    assert (dict(os.environ), [signal.getsignal(n) for n in (1, 2, 15)]) == before
    assert "libcuda" not in os.environ.get("LD_PRELOAD", "")
    assert (result.exit_status, result.processes) == (3, ())


def test_what_a_program_leaves_behind_is_ended(desk: Desk) -> None:
    desk.write(SLEEPS)
    ended = memfit(*desk.words(), "and-end", cwd=desk.folder)
    assert ended.code == 0
    assert not runs(int((desk.folder / "child").read_text()))


def test_a_second_ctrl_c_ends_a_program_that_does_not_listen(desk: Desk) -> None:
    running = desk.start("""
        import pathlib, signal, time
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        pathlib.Path("ready").touch()
        time.sleep(600)
    """)
    running.wait_for(desk.folder / "ready")
    os.kill(running.pid, signal.SIGINT)
    time.sleep(0.5)
    os.kill(running.pid, signal.SIGINT)
    assert running.end().code == 137
