"""Several processes on one virtual machine: which devices each sees, and what they hold of them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from memfit.virtual import find_card, prepare, shared_by

pytestmark = pytest.mark.virtual

CARD = find_card("rtx-4090")
GIB = 2**30
DEVICES = 4

PRELUDE = """
import ctypes, json, os, sys
driver = ctypes.CDLL(None)
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]
class Process(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("g", ctypes.c_uint),
                ("c", ctypes.c_uint)]
def count():
    found = ctypes.c_int(-1)
    driver.cudaGetDeviceCount(ctypes.byref(found))
    return found.value
def bus(device):
    text = ctypes.create_string_buffer(32)
    driver.cudaDeviceGetPCIBusId(text, 32, device)
    return int(text.value.split(b":")[1], 16) - 1
def allocate(gib, device=0):
    at = ctypes.c_void_p()
    driver.cudaSetDevice(device)
    return driver.cudaMalloc(ctypes.byref(at), ctypes.c_size_t(gib << 30)), at
def free(device=0):
    available, total = ctypes.c_size_t(), ctypes.c_size_t()
    driver.cudaSetDevice(device)
    driver.cudaMemGetInfo(ctypes.byref(available), ctypes.byref(total))
    return available.value
def nvml(number):
    handle = ctypes.c_void_p()
    driver.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle))
    info, many, out = Info(), ctypes.c_uint(64), (Process * 64)()
    driver.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(info))
    assert driver.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(many), out) == 0
    return info.used, sorted((out[i].pid, out[i].used) for i in range(many.value))
def say(*values):
    print(json.dumps(values), flush=True)
"""


def environment(**changes: str) -> dict[str, str]:
    prepared = prepare(CARD, total_bytes=CARD.total_bytes, devices=DEVICES)
    return {**os.environ, **prepared, **changes}


def told(code: str, **changes: str) -> list[object]:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        env=environment(**changes),
        check=True,
        capture_output=True,
        text=True,
    )
    return list(json.loads(done.stdout.splitlines()[-1]))


@contextlib.contextmanager
def holding(code: str, **changes: str) -> Iterator[tuple[subprocess.Popen[str], list[object]]]:
    """Run a process up to what it says, and keep it there."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"{PRELUDE}{textwrap.dedent(code)}\nsys.stdin.read()"],
        env=environment(**changes),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
        process.kill()


UUID = "GPU-6d656d66-6974-0000-0000-00000000000"


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        ("0,1,2,3", [0, 1, 2, 3]),
        ("3,1", [3, 1]),
        ("2", [2]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1,9,2", [1]),
        ("1,1", []),
        (" 2 , 0 ", [2, 0]),
        (f"{UUID}3,{UUID}0", [3, 0]),
        ("GPU-", []),
        ("GPU-6d656d66", []),
        ("0x1", []),
        ("1;rm", []),
        ("99999999999999999999", []),
        (",".join(map(str, range(40))), [0, 1, 2, 3]),
    ],
)
def test_cuda_sees_the_devices_that_the_variable_names_in_its_order(visible, seen):
    found = told("say(*(bus(device) for device in range(count())))", CUDA_VISIBLE_DEVICES=visible)

    assert found == seen


def test_torch_and_nvml_agree_about_the_devices():
    code = """
        import warnings; warnings.simplefilter("ignore")
        import torch
        first = torch.empty(1 << 30, dtype=torch.uint8, device="cuda:0")
        say(torch.cuda.device_count(), [str(torch.cuda.get_device_properties(i).uuid)[-1]
            for i in range(2)], nvml(2)[0] - nvml(0)[0], nvml(1)[0], first.device.index)
    """
    assert told(code, CUDA_VISIBLE_DEVICES="2,0") == [2, ["2", "0"], GIB, 0, 0]


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    return shared_by(tmp_path)


def test_processes_see_each_others_memory(machine):
    with holding("say(*allocate(4)[:1], os.getpid())", **machine) as (process, (status, pid)):
        assert (status, pid) == (0, process.pid)
        alone = told("say(free(), nvml(0))")
        beside = told("say(free(), nvml(0), nvml(1), os.getpid())", **machine)
    context = CARD.total_bytes - int(str(alone[0]))

    assert beside[0] == CARD.total_bytes - 4 * GIB - 2 * context
    own = beside[3]
    members = sorted([[pid, 4 * GIB + context], [own, context]])
    assert beside[1] == [4 * GIB + 2 * context, members]
    assert beside[2] == [0, []]


def test_what_others_hold_cannot_be_had_until_they_end(machine):
    code = "say(allocate(12)[0], allocate(8)[0])"
    with holding("say(allocate(12)[0])", **machine) as (process, _):
        assert told(code, **machine) == [2, 0]
        other_device = "say(allocate(20, device=1)[0])"
        assert told(other_device, **machine) == [0]
        process.kill()  # it has no chance to give anything back
        process.wait()
        assert told(code, **machine) == [0, 0]


def test_a_device_is_the_same_one_under_any_order(machine):
    with holding("say(allocate(12)[0])", CUDA_VISIBLE_DEVICES="3", **machine):
        assert told(
            "say(allocate(20, 0)[0], allocate(20, 1)[0])",
            **{**machine, "CUDA_VISIBLE_DEVICES": "1,3"},
        ) == [0, 2]


def test_processes_without_a_machine_have_their_devices_to_themselves():
    with holding("say(allocate(12)[0])"):
        assert told("say(allocate(20)[0])") == [0]


def test_many_processes_at_once_never_hold_more_than_there_is(machine):
    code = """
        held = 0
        for _ in range(40):
            status, at = allocate(1)
            held += status == 0
        say(held)
        sys.stdin.read()
    """
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
                    env=environment(**machine),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for _ in range(4)
        ]
        held = [json.loads(str(p.stdout and p.stdout.readline()))[0] for p in processes]
        for process in processes:
            process.kill()
    assert 21 <= sum(held) <= 23  # 24 GiB, less one to four contexts


def test_a_folder_that_is_none_is_told_and_the_process_is_alone():
    done = subprocess.run(
        [sys.executable, "-c", f"{PRELUDE}\nsay(allocate(1)[0])"],
        env=environment(MEMFIT_VGPU_MACHINE="/no/such/folder"),
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "[0]"
    assert "MEMFIT_VGPU_MACHINE names no folder" in done.stderr
