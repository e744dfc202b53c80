"""The driver in a process: forks, refusals, threads, and who else asks for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from memfit.virtual import control, find_card, prepare

pytestmark = pytest.mark.virtual

CARD = find_card("rtx-4090")


def run(code, **changes):
    """Run a script in a fresh process; a change to None takes a variable away."""
    variables = {**os.environ, **prepare(CARD, total_bytes=CARD.total_bytes), **changes}
    kept = {name: value for name, value in variables.items() if value is not None}
    return subprocess.run(
        [sys.executable, "-c", code], env=kept, check=False, capture_output=True, text=True
    )


COUNT = """
import ctypes
count = ctypes.c_int(7)
print(ctypes.CDLL(None).cudaGetDeviceCount(ctypes.byref(count)), count.value)
"""


def test_a_good_description_reports_its_device():
    done = run(COUNT)
    assert (done.stdout.strip(), done.stderr) == ("0 1", "")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (None, "it is not set"),
        ("", "name is missing"),
        ("name=X", "major is missing"),
        ("sms=zero", "sms=zero is not a number"),
        ("sms=-1", "sms=-1 is not a number"),
        ("sms=0", "sms=0 is not within 1 to 1024"),
        ("total=1", "total=1 is not within"),
        ("context=99999999999", "context is not below total"),
        ("devices=17", "devices=17 is not within 1 to 16"),
        ('name=a"b', "name holds a character that is not allowed"),
        ("major=99999999999999999999999", "is not within 7 to 12"),
    ],
)
def test_a_malformed_description_leaves_no_device_and_one_clear_line(change, why):
    good = prepare(CARD, total_bytes=CARD.total_bytes)["MEMFIT_VGPU_CARD"]
    if change is not None and "=" in change and change != "name=X":
        key = change.partition("=")[0]
        others = [part for part in good.split(";") if not part.startswith(f"{key}=")]
        change = ";".join([*others, change])
    done = run(COUNT, MEMFIT_VGPU_CARD=change)
    assert done.stdout.strip() == "100 0"
    (line,) = done.stderr.splitlines()
    assert why in line
    assert line.endswith("no device is reported")


def test_torch_takes_a_malformed_description_for_a_machine_without_a_gpu():
    done = run(
        "import warnings; warnings.simplefilter('ignore'); import torch; "
        "print(torch.cuda.is_available())",
        MEMFIT_VGPU_CARD="nonsense",
    )
    assert done.stdout.strip() == "False"


def test_a_fork_after_importing_torch_is_safe(nursery):
    code = """
        import torch
        torch.cuda.is_available()
        import json, os
        pid = os.fork()
        if pid == 0:
            x = torch.ones(4, device="cuda")
            os._exit(7 if x.sum().item() == 4 and torch.cuda.memory_allocated() > 0 else 1)
        print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
    """
    assert nursery.value(code) == 7


def test_children_of_one_parent_do_not_share_memory(nursery):
    code = """
        import json, torch
        x = torch.empty(20 << 30, dtype=torch.uint8, device="cuda")
        print(json.dumps(torch.cuda.memory_reserved()))
    """
    assert [nursery.value(code) for _ in range(2)] == [20 << 30] * 2


def test_threads_may_allocate_at_once(nursery):
    code = """
        import ctypes, json, threading
        driver = ctypes.CDLL(None)
        def work():
            for _ in range(500):
                at = ctypes.c_void_p()
                assert driver.cudaMalloc(ctypes.byref(at), ctypes.c_size_t(4 << 20)) == 0
                assert driver.cudaFree(at) == 0
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        from memfit.virtual import control
        driver.cudaMemGetInfo.restype = ctypes.c_int
        print(json.dumps(control.used_bytes()))
    """
    before = nursery.value(
        "import json; from memfit.virtual import control; print(control.used_bytes())"
    )
    assert nursery.value(code) == before


def test_a_wrong_pointer_is_an_error_and_not_a_crash(nursery):
    code = """
        import ctypes, json
        driver = ctypes.CDLL(None)
        at = ctypes.c_void_p()
        assert driver.cudaMalloc(ctypes.byref(at), ctypes.c_size_t(2 << 20)) == 0
        past = ctypes.c_void_p(at.value + (2 << 20) - 4)
        host = ctypes.create_string_buffer(64)
        print(json.dumps([
            driver.cudaMemcpy(host, past, ctypes.c_size_t(8), 2),
            driver.cudaMemcpy(host, past, ctypes.c_size_t(4), 2),
            driver.cudaFree(past),
            driver.cudaMemset(ctypes.c_void_p(4096), 0, ctypes.c_size_t(8)),
        ]))
    """
    assert nursery.value(code) == [1, 0, 1, 1]


def test_other_programs_are_not_disturbed():
    done = run("import subprocess; print(subprocess.run(['ls', '/'], capture_output=True).stderr)")
    assert (done.stdout.strip(), done.stderr) == ("b''", "")


def test_the_driver_is_not_active_in_this_process():
    assert not control.active()
    with pytest.raises(RuntimeError, match="not loaded"):
        control.used_bytes()


def test_the_driver_is_active_in_a_worker(nursery):
    code = "import json; from memfit.virtual import control; print(json.dumps(control.active()))"
    assert nursery.value(code) is True
